"""The engine over the fixtures' random models: lossless whatever is drafted, batched, aborted or chunked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from models.loader import load_drafter, load_target
from models.saving import save_drafter
from speculative.errors import ContextLengthError, EngineLoadError, InvalidRequestError
from speculative.request import Request, SamplingParams
from speculative.scheduler import Scheduler
from speculative.sequence import Sequence
from speculative.texts import Texts
from tests.speculative.conftest import DRAFTERS, N0, N1, MakeEngine, request, run, tokens

TREES = [
    {},
    {"draft_depth": 3, "draft_breadth": 2, "draft_nodes": 5},
    {"draft_depth": 4, "draft_breadth": 1, "draft_nodes": 4},
    {"draft_depth": 6, "draft_breadth": 8, "draft_nodes": 62},
    {"draft_depth": 1, "draft_breadth": 3, "draft_nodes": 3},
    {"draft_depth": 6, "draft_breadth": 4, "draft_nodes": 20, "draft_min_reach": 0.1, "draft_temperature": 0.3},
    {"draft_lookup": 1},
    {"draft_depth": 3, "draft_breadth": 2, "draft_nodes": 5, "draft_lookup": 2},
]
PROMPTS = [[1], [5, 9], list(range(3, 20)), [7, 7, 7, 7, 7], list(range(100, 140)), [2, 4, 8, 16, 32, 64]]
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.95, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.05},
]


def mixed_requests(**extra: object) -> list[Request]:
    """Different prompts, lengths and sampling settings side by side."""
    return [
        request(str(i), prompt, max_tokens=20 + 3 * i, seed=40 + i, **{**SAMPLING[i], **extra}) for i, prompt in enumerate(PROMPTS)
    ]


def shortened(whole: Request, length: int) -> Request:
    return replace(whole, params=replace(whole.params, max_tokens=length))


@pytest.fixture(scope="module")
def plain_tokens() -> dict[str, dict[str, list[int]]]:
    return {}


def alone(make_engine: MakeEngine, folder: object, cache: dict[str, dict[str, list[int]]]) -> dict[str, list[int]]:
    """Each request decoded plainly, one at a time: what everything else must equal."""
    if str(folder) not in cache:
        engine = make_engine(folder, "none", max_num_seqs=1)
        cache[str(folder)] = {name: ids for each in mixed_requests() for name, ids in tokens(run(engine, [each])).items()}
    return cache[str(folder)]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("folder", "drafter"), [*((N0, name) for name in DRAFTERS), (N1, "moa")])
def test_output_is_the_same_whatever_is_drafted(make_engine, plain_tokens, folder, drafter, tree) -> None:
    engine = make_engine(folder, drafter, max_num_seqs=6, prefill_chunk=16, **tree)
    expected = alone(make_engine, folder, plain_tokens)
    # Beginnings only: there are many pairs of drafters and trees, and what goes wrong with one does so soon.
    outputs = tokens(run(engine, [shortened(each, 6 + n) for n, each in enumerate(mixed_requests())]))
    assert outputs == {name: expected[name][: len(ids)] for name, ids in outputs.items()}
    assert [len(ids) for ids in outputs.values()] == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("folder", "drafter", "slots", "chunk"),
    [(N0, drafter, slots, chunk) for drafter in ("none", "moa") for slots, chunk in ((1, 512), (3, 7), (6, 16))]
    + [(N0, "paired block", 3, 7), (N0, "eagle3", 3, 7), (N1, "moa", 1, 512), (N1, "moa", 3, 7)],
)
def test_output_is_the_same_however_it_is_batched(make_engine, plain_tokens, folder, drafter, slots, chunk) -> None:
    engine = make_engine(folder, drafter, max_num_seqs=slots, prefill_chunk=chunk)
    assert tokens(run(engine, mixed_requests())) == alone(make_engine, folder, plain_tokens)


@pytest.mark.parametrize("folder", [N0, N1])
@pytest.mark.parametrize("window", [1, 4, 128])
def test_output_is_the_same_however_much_of_a_prompt_is_read(make_engine, plain_tokens, folder, window) -> None:
    engine = make_engine(folder, "moa", max_num_seqs=3, prefill_chunk=7, draft_window=window)
    assert tokens(run(engine, mixed_requests())) == alone(make_engine, folder, plain_tokens)


@pytest.mark.parametrize("folder", [N0, N1])
def test_drafts_are_accepted_when_sampling(make_engine, folder) -> None:
    outputs = run(make_engine(folder, "moa"), mixed_requests(temperature=1.0, top_k=0, top_p=1.0))
    accepted = sum(series[-1].stats.num_accepted_draft_tokens for series in outputs.values())
    # The drafter's weights are random: what agrees, agrees through the shared noise.
    assert accepted > 20


def test_outputs_say_which_of_their_tokens_were_drafted(make_engine) -> None:
    whole = run(make_engine(), mixed_requests())
    # Each text once more, ended by a token of it that was drafted.
    endings = {name: out.new_token_ids[0] for name, series in whole.items() for out in series if out.num_accepted}
    ended = [
        replace(each, request_id=f"ended {name}", params=replace(each.params, stop_token_ids=(endings[name],)))
        for each in mixed_requests()
        if (name := each.request_id) in endings
    ]
    outputs = whole | run(make_engine(), ended)
    assert any(series[-1].num_accepted == len(series[-1].new_token_ids) for series in outputs.values())
    for series in outputs.values():
        for output in series:
            # All but the target's own token, which an end among the drafted ones leaves out.
            kept = len(output.new_token_ids)
            assert output.num_accepted == kept - 1 or (output.finish_reason == "stop" and output.num_accepted == kept)
        assert sum(output.num_accepted for output in series) == series[-1].stats.num_accepted_draft_tokens
    plain = run(make_engine(drafter="none"), mixed_requests())
    assert not any(output.num_accepted for series in plain.values() for output in series)


@pytest.mark.parametrize("folder", [N0, N1])
def test_a_draft_vocabulary_and_texts_limit_what_is_proposed_and_nothing_else(make_engine, plain_tokens, folder, tmp_path) -> None:
    target, _ = load_target(folder / "target", dtype=torch.float32)
    drafter = load_drafter(folder / "drafter", target.config, dtype=torch.float32)
    allowed = [3, 150, *range(20, 60)]
    drafter.draft_vocabulary = torch.tensor(allowed)
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    engine = make_engine(folder, str(tmp_path), max_num_seqs=6)
    proposed: set[int] = set()
    rare: set[int] = set()
    assert engine.drafter is not None
    propose = engine.drafter.propose

    def spy(sequences: list[Sequence], *arguments: object) -> object:
        tree = propose(sequences, *arguments)
        for sequence, size, drafted in zip(sequences, tree.sizes, tree.tokens.tolist(), strict=True):
            assert set(drafted[:size]) <= {*allowed, *sequence.tokens}
            proposed.update(drafted[:size])
            rare.update(set(drafted[:size]) - set(allowed))
        return tree

    engine.drafter.propose = spy
    assert tokens(run(engine, mixed_requests())) == alone(make_engine, folder, plain_tokens)
    assert len(proposed - rare) > 10 and len(rare) > 10


def test_greedy_output_is_that_of_transformers(make_engine) -> None:
    model = AutoModelForCausalLM.from_pretrained(N0 / "target")
    engine = make_engine(N0, "moa")
    for prompt in PROMPTS:
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)
        assert (
            tokens(run(engine, [request("r", prompt, max_tokens=40, temperature=0.0)]))["r"] == expected[0, len(prompt) :].tolist()
        )


def test_accept_lengths_are_the_published_implementations(make_engine) -> None:
    reference = load_file(N0 / "greedy.safetensors")
    text, first = reference["greedy"][0].tolist(), reference["prompt"].shape[1]
    # The published loop gets its first token from the prompt's own pass; here it joins the prompt.
    engine = make_engine(N0, "moa", draft_depth=4, draft_breadth=4, draft_nodes=12)
    outputs = run(engine, [request("r", text[: first + 1], max_tokens=60, temperature=0.0)])["r"]
    gained = [len(output.new_token_ids) for output in outputs]
    expected = reference["accept_lengths"].tolist()
    assert gained[: len(expected)] == expected
    assert tokens({"r": outputs})["r"][: len(text) - first - 1] == text[first + 1 :]


def test_plain_and_speculative_requests_share_a_batch(make_engine, plain_tokens) -> None:
    expected = alone(make_engine, N0, plain_tokens)
    requests = mixed_requests(speculative=False)[::2] + mixed_requests()[1::2]
    outputs = run(make_engine(N0, "moa", max_num_seqs=6), requests)
    assert tokens(outputs) == expected
    assert all(outputs[name][-1].stats.num_draft_tokens == 0 for name in "024")
    assert all(outputs[name][-1].stats.num_draft_tokens > 0 for name in "135")


def test_a_seed_decides_and_no_seed_differs(make_engine) -> None:
    engine = make_engine()

    def draw(name: str, seed: int | None) -> list[int]:
        return tokens(run(engine, [request(name, [3, 1, 4], max_tokens=30, temperature=1.0, seed=seed)]))[name]

    assert draw("a", 1) == draw("b", 1) != draw("c", 2)
    assert draw("d", None) != draw("e", None)


def test_an_aborted_request_frees_its_slot_and_disturbs_nobody(make_engine, plain_tokens) -> None:
    expected = alone(make_engine, N0, plain_tokens)
    engine = make_engine(max_num_seqs=4, prefill_chunk=5)
    collected: dict[str, list[int]] = {name: [] for name in expected}
    for each in mixed_requests():
        engine.add(each)
    for _ in range(6):
        for output in engine.step():
            collected[output.request_id] += output.new_token_ids
    for name in ("0", "2", "5"):  # running, prefilling or running, waiting
        aborted = engine.abort(name)
        assert aborted is not None and aborted.finish_reason == "abort"
        engine.scheduler.check_integrity()
    assert engine.abort("0") is None
    while engine.has_work:
        for output in engine.step():
            collected[output.request_id] += output.new_token_ids
    assert {name: collected[name] for name in "134"} == {name: expected[name] for name in "134"}
    assert engine.status().num_running == engine.status().num_waiting == 0


def test_texts_may_fill_the_context_to_its_last_token(make_engine) -> None:
    engine = make_engine(max_model_len=48, max_num_seqs=3)
    requests = [request(str(i), list(range(5, 5 + size)), temperature=0.0) for i, size in enumerate((47, 46, 30))]
    outputs = run(engine, requests)
    assert [len(ids) for ids in tokens(outputs).values()] == [1, 2, 18]
    assert {series[-1].finish_reason for series in outputs.values()} == {"length"}
    plain = run(make_engine(drafter="none", max_model_len=48), requests)
    assert tokens(plain) == tokens(outputs)


def test_eos_and_stop_tokens_end_the_text_where_they_first_come(make_engine) -> None:
    engine = make_engine()
    prompt, sampling = [9, 9], {"max_tokens": 120, "temperature": 1.3, "seed": 3}
    free = tokens(run(engine, [request("r", prompt, **sampling)]))["r"]
    assert len(free) == 120
    eos = min(engine.eos_token_ids)
    for name, params, ends in (
        ("eos", SamplingParams(**sampling), {eos}),
        ("stop", SamplingParams(**sampling, ignore_eos=True, stop_token_ids=(free[10],)), {free[10]}),
    ):
        series = run(engine, [Request(name, tuple(prompt), params)])
        first = next(i for i, token in enumerate(free) if token in ends)
        assert tokens(series)[name] == free[: first + 1]
        assert series[name][-1].finish_reason == "stop"


def test_stats_add_up(make_engine) -> None:
    series = run(
        make_engine(N0, "moa", draft_depth=4, draft_nodes=9), [request("r", [1, 2, 3], max_tokens=40, temperature=0.8, seed=1)]
    )["r"]
    stats = series[-1].stats
    assert stats.prompt_tokens == 3
    assert stats.completion_tokens == 40 == sum(len(output.new_token_ids) for output in series)
    assert len(series[0].new_token_ids) == 1  # the prompt's pass gives the first token
    assert stats.num_drafts == len(series) - 1 == sum(stats.acceptance_histogram)
    assert stats.num_target_calls == len(series)
    assert stats.num_accepted_draft_tokens == sum(k * n for k, n in enumerate(stats.acceptance_histogram))
    assert stats.num_draft_tokens == 9 * stats.num_drafts


def test_what_was_drafted_beyond_the_end_of_a_text_is_no_gain() -> None:
    sequence = Texts(None, 160, {9}).begin(Request("r", (1, 2), SamplingParams(max_tokens=20)), 64)
    output = sequence.append((5, 9, 7, 8), 3, None, frozenset({9}))
    assert (output.new_token_ids, output.num_accepted, output.finish_reason) == ((5, 9), 2, "stop")
    assert output.stats.num_accepted_draft_tokens == 2 and output.stats.acceptance_histogram == (0, 0, 1)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, InvalidRequestError, "empty"),
        ([1, 160], {}, InvalidRequestError, "160 is outside"),
        ([-1], {}, InvalidRequestError, "-1 is outside"),
        ([1] * 128, {}, ContextLengthError, "prompt is too long: it has 128"),
        ([1] * 100, {"max_tokens": 29}, ContextLengthError, "^This model's maximum context length is 128 tokens.* at most 28"),
    ],
)
def test_impossible_requests_are_refused(make_engine, prompt, params, error, message) -> None:
    with pytest.raises(error, match=message):
        make_engine().add(request("r", prompt, **params))


def test_a_failed_step_costs_its_own_requests_only(make_engine, monkeypatch) -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(request(name, [1, 2, 3], max_tokens=10, temperature=0.0))
    engine.step()
    assert {output.request_id for output in engine.fail_active()} == {"a", "b"}
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].request_id == "c" and outputs[-1].finish_reason == "length"


def test_its_status_can_be_told_while_a_prompt_comes_to_its_end(make_engine, monkeypatch) -> None:
    engine = make_engine(prefill_chunk=4)
    engine.add(request("a", range(1, 20)))
    engine.step()
    looks = iter([engine.scheduler.prefilling])  # in the engine's thread it ends once it has been looked at
    monkeypatch.setattr(Scheduler, "prefilling", property(lambda self: next(looks, None)), raising=False)
    assert engine.status().num_running == 1


@pytest.mark.parametrize(("drafter", "kept"), [("ngram", "_indices"), ("moa", "_texts")])
def test_drafters_forget_sequences_that_end(make_engine, drafter: str, kept: str) -> None:
    engine = make_engine(N0, drafter, draft_lookup=2)
    for each in mixed_requests():
        engine.add(each)
    engine.step()  # reads a prompt
    engine.step()
    keeper = engine.drafter
    while not hasattr(keeper, kept):
        keeper = keeper.other
    assert getattr(keeper, kept)
    engine.abort("0")
    while engine.has_work:
        engine.step()
    assert not getattr(keeper, kept)


def test_slots_that_do_not_fit_into_memory_are_refused_by_their_options(make_engine) -> None:
    with pytest.raises(EngineLoadError, match=r"keys and values of 1000000000000 sequences .* lower --max-num-seqs or"):
        make_engine(max_num_seqs=10**12)
