"""A block drafter's trees and memory by operators, in bfloat16 and float32, against PyTorch's in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from models.config import MoAConfig
from models.kv_cache import KVCache
from models.llama import Llama
from models.moa import MoA
from models.tiled_decoder import suits_head, tiled_decoder, tiled_head
from models.tiles import TYPES, operator_class
from speculative.batch import TreeLayout, layout_operator, layout_suits, token_ids_of, verify_plan
from speculative.drafters import tiled_block, tiled_memory
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.moa import MoADrafter
from speculative.drafters.moa_graphs import use_compiled
from speculative.policy import DraftShape
from speculative.request import Request, SamplingParams
from speculative.sequence import Sequence
from speculative.texts import Texts
from speculative.tiled_verification import TiledVerification
from speculative.tree import DraftTree
from tests.integration.test_tiled_decoder import CONFIG, target

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("operators"),
]

LENGTH, SIZE = 200, 6
SIZES = {"sa_intermediate_size": 96, "ca_intermediate_size": 128, "draft_block_size": SIZE}
SHAPE = DraftShape(SIZE, 4, 12)
GREEDY = SamplingParams(50, temperature=0.0)
SETTINGS = {
    "greedy": [GREEDY] * 3,
    "seeded": [SamplingParams(50, temperature=0.9, seed=seed) for seed in (1, 2, 3)],
    "mixed": [
        GREEDY,
        SamplingParams(50, temperature=1.3, top_k=7, seed=4),
        SamplingParams(50, temperature=0.7, top_p=0.8, min_p=0.02, seed=5),
    ],
    "one allowed": [SamplingParams(50, temperature=1.0, top_k=1, seed=6)] * 3,
}


def moa(config: MoAConfig, vocabulary: int | None) -> MoA:
    """One whose parts are all at work, and whose choices are clear."""
    torch.manual_seed(7)
    made = MoA(config).bfloat16().requires_grad_(False)
    for name, parameter in made.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.4 if "stand_ins" in name else 0.1)
    if vocabulary is not None:
        made.draft_vocabulary = torch.randperm(CONFIG.vocab_size)[:vocabulary]
    return made


OFF = {torch.bfloat16: {"atol": 0.06, "rtol": 0.03}, torch.float32: {"atol": 1e-4, "rtol": 1e-4}}
"""How far memory may be off."""


@pytest.fixture(params=TYPES, ids=list(TYPES.values()))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What operators store."""
    kind: torch.dtype = request.param
    return kind


@pytest.fixture(params=["block", "entry", "few tokens", "paired", "paired, few tokens", "paired, two heads"])
def drafters(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[MoADrafter, MoADrafter]:
    """The same drafting by operators, and in float32 without."""
    paired = "paired" in request.param
    # Copying asks the first of two KV heads then, by queries that do not fill whole panels.
    heads_of = {"sa_num_kv_heads": 2, "ca_num_kv_heads": 2} if "two heads" in request.param else {}
    config = MoAConfig.from_target(CONFIG, **SIZES, **heads_of, has_entry=paired or request.param == "entry", paired=paired)
    weights = moa(config, 96 if "few tokens" in request.param else None)
    tiled, exact = (MoADrafter(copy.deepcopy(weights).to(kind), heads(kind), 4, LENGTH, SHAPE) for kind in (dtype, torch.float32))
    assert tiled_block.suits(tiled.network, SHAPE.breadth) and tiled_memory.suits(tiled.network)
    use_compiled(tiled, {})
    return tiled, exact


def heads(dtype: torch.dtype) -> Llama:
    """A target whose head is loud enough for some tokens to be likelier than others."""
    model = target(torch.bfloat16)
    model.lm_head.weight.mul_(4)
    return model.to(dtype)


def filled(cache: KVCache) -> KVCache:
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
    return cache


def sequences(params: list[SamplingParams], texts: Texts) -> list[Sequence]:
    """Texts of several lengths, one of which the drafter knows nothing of."""
    made = []
    for slot, (each, length) in enumerate(zip(params, (37, 5, 64), strict=True)):
        tokens = torch.randint(3, CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        sequence = texts.begin(Request(str(slot), tuple(tokens), each), LENGTH)
        sequence.slot, sequence.num_computed = slot, length - 1
        made.append(sequence)
    made[1].drafter_start = made[1].num_computed
    return made


def verified(count: int) -> VerifiedTokens:
    """Of three slots, in no order."""
    generator = torch.Generator().manual_seed(count)
    slots, positions = torch.arange(count) % 3, torch.randperm(150, generator=generator)[:count]
    hidden = torch.randn(count, CONFIG.hidden_size, generator=generator).bfloat16()
    token_ids, previous = torch.randint(3, CONFIG.vocab_size, (2, count), generator=generator)
    return VerifiedTokens(torch.stack((token_ids, previous, slots, positions)), hidden)


def told(drafter: MoADrafter, tokens: VerifiedTokens) -> None:
    cache = filled(drafter.target.new_cache(4, 40, LENGTH))
    hidden = None if drafter.network.moa.entry is None or tokens.tapped is None else tokens.tapped.to(drafter.target.dtype)
    drafter.extend(VerifiedTokens(tokens.rows, hidden), cache)


@pytest.mark.parametrize("count", [1, 4, 100])
def test_memory_is_float32s(drafters: tuple[MoADrafter, MoADrafter], count: int) -> None:
    for drafter in drafters:
        told(drafter, verified(count))
    paired = drafters[0].config.paired
    for number, (tiled, exact) in enumerate(zip(*(drafter.caches for drafter in drafters), strict=True)):
        first = 0
        if paired and number == 1:
            # What CA keeps is of the tokens before: before a first there is none, and what the other writes there is never read.
            first = int((verified(count).positions == 0).sum())
            exact.data[:, exact.rows_per_slot - 1 :: exact.rows_per_slot] = 0
        torch.testing.assert_close(tiled.data.float(), exact.data, **OFF[tiled.data.dtype])
        assert int((tiled.data != 0).any(dim=-1).sum()) == count - first


def test_memory_of_a_step_in_lists_is_the_same(drafters: tuple[MoADrafter, MoADrafter]) -> None:
    """Of a step's rows, of which these tokens' are some."""
    drafter, tokens = drafters[0], verified(4)
    told(drafter, tokens)
    expected = [cache.data.clone() for cache in drafter.caches]
    for kept in drafter.caches:
        kept.data.zero_()
    hidden, places = None, [6, 0, 3, 4]
    if drafter.network.moa.entry is not None and tokens.tapped is not None:
        hidden = torch.zeros(9, CONFIG.hidden_size, dtype=drafter.target.dtype)
        hidden[places] = tokens.tapped.to(hidden.dtype)
    cache = filled(drafter.target.new_cache(4, 40, LENGTH))
    drafter.extend(VerifiedTokens(tokens.rows.tolist(), hidden, places=places), cache)
    assert all(torch.equal(kept.data, before) for kept, before in zip(drafter.caches, expected, strict=True))
    if hidden is not None:
        with pytest.raises(RuntimeError, match="no row 9"):
            drafter.extend(VerifiedTokens(tokens.rows.tolist(), hidden, places=[6, 0, 9, 4]), cache)


def test_the_newest_memory_is_float32s(drafters: tuple[MoADrafter, MoADrafter]) -> None:
    """Paired with what follows it, for drafting from it."""
    if not drafters[0].config.paired:
        pytest.skip("memory is not paired")
    batch = sequences(SETTINGS["greedy"], Texts(None, CONFIG.vocab_size, frozenset()))
    for drafter in drafters:
        for cache in drafter.caches:
            filled(cache)
        drafter.pair_newest(batch)
    for tiled, exact in zip(*(drafter.caches for drafter in drafters), strict=True):
        changed = int((exact.data != filled(copy.deepcopy(exact)).data).any(dim=-1).sum())
        assert changed == (0 if exact is drafters[1].caches[0] else len(batch))
        torch.testing.assert_close(tiled.data.float(), exact.data, **OFF[tiled.data.dtype])


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The probability of each path, by the number of its text and its tokens."""
    assert tree.probabilities is not None
    found: dict[tuple[int, ...], float] = {}
    for text, rows in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.probabilities.tolist(), strict=True)):
        ends: list[tuple[int, ...]] = [(text,)]
        for token, parent, probability in zip(*rows, strict=True):
            ends.append((*ends[parent], token))
            found.setdefault(ends[-1], probability)
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("batch", [1, 3])
def test_trees_are_float32s(drafters: tuple[MoADrafter, MoADrafter], settings: str, batch: int, dtype: torch.dtype) -> None:
    texts = Texts(None, CONFIG.vocab_size, frozenset())
    trees = []
    for drafter in drafters:
        for cache in drafter.caches:
            filled(cache)
        with torch.inference_mode():
            trees.append(drafter.propose(sequences(SETTINGS[settings], texts)[:batch], SHAPE, None))
    # What cannot be chosen may fill trees up, and may be anything.
    tiled, exact = ({path: probability for path, probability in paths(tree).items() if probability > 1e-9} for tree in trees)
    shared = tiled.keys() & exact.keys()
    # Nodes on the edge of being among the best may change places; likely ones may not.
    edges = [min(probability for path, probability in exact.items() if path[0] == text) + 0.05 for text in range(batch)]
    assert all(path in shared for path, probability in exact.items() if probability > edges[path[0]])
    assert len(shared) >= 0.7 * len(exact)
    # In bfloat16 two likely tokens may with noise be close to a tie, PyTorch is 0.04 off too. Beside sampled texts PyTorch's sum of
    # a greedy one's probabilities leaves out the least likely tokens.
    off = 0.08 if dtype == torch.bfloat16 else 5e-3 if settings == "mixed" else 1e-4
    assert all(tiled[path] == pytest.approx(exact[path], abs=off) for path in shared)
    assert trees[0].sizes == trees[1].sizes


def test_trees_end_where_they_are_hardly_reached_and_keep_what_is_likely(drafters: tuple[MoADrafter, MoADrafter]) -> None:
    drafter = drafters[0]
    for cache in drafter.caches:
        filled(cache)
    batch = sequences(SETTINGS["greedy"], Texts(None, CONFIG.vocab_size, frozenset()))
    shallow = drafter.propose(batch, DraftShape(SIZE, 4, 30, min_reach=1.0), None)
    assert shallow.tokens.shape[1] == 4  # one level
    likely = drafter.propose(batch, DraftShape(SIZE, 4, 30, min_probability=0.1), None)
    assert likely.probabilities is not None
    whole = drafter.propose(batch, DraftShape(SIZE, 4, 30), None)
    assert whole.probabilities is not None and sum(likely.sizes) == int((whole.probabilities >= 0.1).sum()) > 0


def test_what_does_not_belong_together_is_refused(drafters: tuple[MoADrafter, MoADrafter]) -> None:
    drafter = drafters[0]
    trees, windows = drafter.trees, [cache.window(0, 1)[0] for cache in drafter.caches]
    assert trees is not None
    text, no_rare = [[5], [0], [9], [9], [3]], [[]]
    for texts, said in [
        ([[160], [0], [9], [9], [3]], "no token 160"),
        ([[5], [0], [LENGTH + 1], [9], [3]], "ends lie outside|no cache row 201"),
    ]:
        with pytest.raises(RuntimeError, match=said):
            trees(windows, texts, no_rare, [], SIZE, 4, 12, 0.0, 1.0)
    for rare, said in [([[7, 160]], "no token 160"), ([[7, -1]], "no token -1"), ([[7], [8]], "each has rare tokens")]:
        with pytest.raises(RuntimeError, match=said):
            trees(windows, text, rare, [], SIZE, 4, 12, 0.0, 1.0)
    with pytest.raises(RuntimeError, match="trees of 1 to 6 levels"):
        trees(windows, text, no_rare, [], SIZE + 1, 4, 12, 0.0, 1.0)
    tokens = verified(2)
    tokens.slots.fill_(9)
    with pytest.raises(RuntimeError, match="no slot 9"):
        told(drafter, tokens)


@pytest.mark.parametrize("settings", ["greedy", "seeded"])
def test_logits_that_are_no_numbers_are_of_some_tokens(drafters: tuple[MoADrafter, MoADrafter], settings: str) -> None:
    drafter = drafters[0]
    for cache in drafter.caches:
        cache.data.fill_(float("nan"))
    tree = drafter.propose(sequences(SETTINGS[settings], Texts(None, CONFIG.vocab_size, frozenset())), SHAPE, None)
    assert 0 <= int(tree.tokens.min()) <= int(tree.tokens.max()) < CONFIG.vocab_size


@pytest.mark.parametrize(
    "changes", [{"draft_block_size": 0}, {"attends_to_all_memory": False}, {"sa_num_kv_heads": 2}, {"ca_intermediate_size": 100}]
)
def test_other_drafters_are_left_to_the_compiler(changes: dict[str, int]) -> None:
    drafter = MoADrafter(moa(MoAConfig.from_target(CONFIG, **SIZES | changes), None), heads(torch.bfloat16), 4, LENGTH, SHAPE)
    assert not tiled_block.suits(drafter.network, SHAPE.breadth)


@pytest.mark.parametrize("count", [0, 1, 10, 70])
def test_logits_are_float32s(count: int, dtype: torch.dtype) -> None:
    model = heads(dtype)
    assert suits_head(model)
    hidden = torch.randn(count, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits, best = tiled_head(model).run([hidden])
    expected = hidden.float() @ model.lm_head.weight.float().T
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(best, expected.argmax(dim=-1))


def test_the_first_of_equal_logits_is_the_best(dtype: torch.dtype) -> None:
    model = heads(dtype)
    model.lm_head.weight[[30, 31, 150]] = model.lm_head.weight[30].abs() * 50
    assert tiled_head(model).run([torch.ones(2, CONFIG.hidden_size, dtype=dtype)])[1].tolist() == [30, 30]


def test_a_tree_stands_where_pytorch_puts_it(dtype: torch.dtype) -> None:
    cache = target(dtype).new_cache(4, 12, LENGTH)
    assert layout_suits(cache)
    parents: Tensor = torch.tensor([[0, 1, 2, 0, 4, 1], [0, 0, 0, 1, 4, 5], [0, 0, 0, 0, 0, 0]])
    inputs = [parents, torch.tensor([0, 61, 130]), torch.arange(128)]
    expected = TreeLayout(cache, CONFIG.groups)(*inputs)
    for one, other in zip(layout_operator(cache, CONFIG.groups).run(inputs), expected, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
    lengths = [0, 64, 130]
    plain = verify_plan(cache, CONFIG.groups, lengths, DraftTree.empty(3), first_slot=1)
    layout = {"root_layout": layout_operator(cache, CONFIG.groups).run}
    alone = verify_plan(cache, CONFIG.groups, lengths, DraftTree.empty(3), layout, first_slot=1)
    assert torch.equal(alone.positions, plain.positions) and torch.equal(alone.write, plain.write)
    assert torch.equal(alone.mask, plain.mask) and alone.first_slot == 1
    with pytest.raises(RuntimeError, match="a parent stands behind its child"):
        layout_operator(cache, CONFIG.groups).run([torch.tensor([[2, 0]]), torch.tensor([4]), torch.arange(64)])


TREES = {
    "one text": ([5], DraftTree([[7, 8, 9]], [[0, 0, 1]], (3,))),
    "several": ([5, 6, 9], DraftTree([[7, 8, 9], [1, 0, 0], [2, 3, 4]], [[0, 1, 1], [0, 0, 0], [0, 1, 2]], (3, 1, 3))),
    "roots alone": ([5, 6], DraftTree.empty(2)),
}


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("trees", TREES.values(), ids=list(TREES))
def test_a_pass_in_one_is_one_in_parts(dtype: torch.dtype, trees: tuple[list[int], DraftTree], first_slot: int) -> None:
    """Layout, layers and head together, against one after another: all numbers, and what is written to the cache."""
    (roots, tree), model = trees, heads(dtype)
    lengths = [40, 3, 70][: len(roots)]
    layers, head = tiled_decoder(model), tiled_head(model)
    parts, whole = (filled(model.new_cache(4, 12, LENGTH)) for _ in range(2))
    layout = layout_operator(parts, CONFIG.groups)
    tree_pass = TiledVerification(layout, layers.operator, head, whole, taps=True)
    logits, best, tapped = tree_pass(roots, tree, lengths, first_slot)

    model.compiled = layers
    plan = verify_plan(parts, CONFIG.groups, lengths, tree, {"layout": layout.run, "root_layout": layout.run}, first_slot)
    hidden = model(token_ids_of(roots, tree, parts.data.device).flatten(), plan, parts)
    expected, expected_best = head.run([hidden])
    assert torch.equal(logits, expected.view(len(roots), tree.num_rows, -1))
    assert best == expected_best.view(len(roots), tree.num_rows).tolist()
    assert tapped is not None and torch.equal(tapped, hidden)
    assert torch.equal(whole.data, parts.data)


def test_a_pass_refuses_what_does_not_belong_together(dtype: torch.dtype) -> None:
    model = heads(dtype)
    cache = model.new_cache(4, 12, LENGTH)
    operator = operator_class("TreePass", dtype)(
        layout_operator(cache, CONFIG.groups), tiled_decoder(model).operator, tiled_head(model)
    )
    for ids, parents, lengths, said in [
        ([5, 7, 8], [0], [40], "do not belong together"),
        ([5, 7, 8], [0, 0], [], "do not belong together"),
        ([5, 7, 8], [0, 3], [40], "a parent stands behind its child"),
        ([5, 7, 160], [0, 0], [40], "no token 160"),
        ([5, *[7] * 12], [0] * 12, [40], "13 rows do not fit 12 scratch rows"),
    ]:
        with pytest.raises(RuntimeError, match=said):
            operator.run(ids, parents, lengths, 64, cache.window(0, 1))
    with pytest.raises(RuntimeError, match=r"a decoder of \d+ layers got 1 caches"):
        operator.run([5], [], [40], 64, cache.window(0, 1)[:1])
