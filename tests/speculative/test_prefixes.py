"""Texts that begin as others did: nothing is computed twice, and nothing changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from speculative.engine import Engine
from speculative.errors import InvalidBlockError
from speculative.kv_bytes import BlockFormat, Contents
from speculative.prefix_cache import BLOCK_TOKENS, extend_keys
from speculative.request import Request, RequestStats
from tests.speculative.conftest import DRAFTERS, N0, N1, MakeEngine, request, run, tokens

SYSTEM = list(range(3, 60))
SAMPLING = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95}]


def turns(engine: Engine, **params: object) -> tuple[list[list[int]], list[RequestStats]]:
    """A conversation of three turns, and another one that begins like it."""
    said, stats = [], []
    history = [*SYSTEM, 70]
    for turn in range(3):
        series = run(engine, [request(f"t{turn}", history, max_tokens=13, seed=turn, **params)])[f"t{turn}"]
        said.append(tokens({"": series})[""])
        stats.append(series[-1].stats)
        history = history + said[-1] + [80 + turn, 81]
    series = run(engine, [request("other", [*SYSTEM, 90, 91], max_tokens=13, seed=9, **params)])["other"]
    return [*said, tokens({"": series})[""]], [*stats, series[-1].stats]


def blocks(count: int) -> int:
    return count // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("folder", "drafter", "sampling"),
    [(N0, name, SAMPLING[n % 2]) for n, name in enumerate(("none", *DRAFTERS))] + [(N1, "moa", each) for each in SAMPLING],
)
def test_later_turns_are_the_same_and_begin_where_the_last_one_ended(make_engine: MakeEngine, folder, drafter, sampling) -> None:
    cold, plain_stats = turns(make_engine(folder, drafter, prefix_cache_tokens=0, prefill_chunk=20), **sampling)
    warm, stats = turns(make_engine(folder, drafter, prefix_cache_tokens=128, prefill_chunk=20), **sampling)
    assert warm == cold
    assert [each.cached_tokens for each in plain_stats] == [0, 0, 0, 0]
    # All but a text's newest token is known at its end.
    assert [each.cached_tokens for each in stats] == [0, blocks(58 + 12), blocks(58 + 15 + 12), blocks(57)]
    # The drafter has lost nothing either.
    assert [each.num_accepted_draft_tokens for each in stats] == [each.num_accepted_draft_tokens for each in plain_stats]


def test_a_drafter_with_a_window_knows_what_it_has_read_of_a_shared_beginning(make_engine: MakeEngine) -> None:
    cold, _ = turns(make_engine(N0, "moa", prefix_cache_tokens=0, draft_window=10), temperature=1.0)
    warm, stats = turns(make_engine(N0, "moa", prefix_cache_tokens=128, draft_window=10), temperature=1.0)
    assert warm == cold
    assert stats[-1].cached_tokens == blocks(57)


@pytest.mark.parametrize("drafter", ["moa", "eagle3", "independent"])
@pytest.mark.parametrize("drafted_first", [True, False])
def test_requests_with_and_without_drafts_share_beginnings(make_engine: MakeEngine, drafter: str, drafted_first: bool) -> None:
    engine, plain = make_engine(N0, drafter, max_num_seqs=1), make_engine(N0, "none", prefix_cache_tokens=0)
    for name, speculative in (("a", drafted_first), ("b", not drafted_first), ("c", True), ("d", True)):
        one = request(name, [*SYSTEM, 70], max_tokens=20, temperature=1.0, seed=5, speculative=speculative)
        assert tokens(run(engine, [one])) == tokens(run(plain, [one]))


def test_choices_of_one_prompt_read_it_once(make_engine: MakeEngine) -> None:
    engine = make_engine(N0, "moa", prefill_chunk=512)
    outputs = run(engine, [request(name, [*SYSTEM, 70], max_tokens=8, temperature=1.0, seed=ord(name)) for name in "abcd"])
    assert [series[-1].stats.cached_tokens for series in outputs.values()] == [0, *[blocks(57)] * 3]
    engine.prefixes.index.check_integrity()


def test_tenants_with_other_salts_share_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one = request("a", [*SYSTEM, 70], max_tokens=8, temperature=0.0)
    found = []
    for salt in ("mine", "yours", "mine", ""):
        salted = Request("a", one.prompt_token_ids, one.params, cache_salt=salt)
        found.append(run(engine, [salted])["a"][-1].stats.cached_tokens)
    assert found == [0, 0, blocks(57), 0]


def test_log_probabilities_of_a_prompt_are_of_all_of_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one = request("a", [*SYSTEM, 70], max_tokens=4, temperature=0.0, prompt_logprobs=2)
    first, again = (run(engine, [one])["a"] for _ in range(2))
    assert again[-1].stats.cached_tokens == 0
    assert first[0].prompt_logprobs is not None and len(first[0].prompt_logprobs) == len(SYSTEM)
    assert [each.token_id for each in again[0].prompt_logprobs or ()] == [*SYSTEM[1:], 70]


def test_an_aborted_text_is_known_as_far_as_it_got(make_engine: MakeEngine) -> None:
    engine = make_engine(N0, "moa", prefill_chunk=32)
    one = request("a", [*SYSTEM, 70], max_tokens=8, temperature=0.0)
    engine.add(one)
    engine.step()
    engine.abort("a")
    assert run(engine, [one])["a"][-1].stats.cached_tokens == 32


def test_a_failed_step_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine(N0, "moa", prefill_chunk=512)
    one = request("a", [*SYSTEM, 70], max_tokens=8, temperature=0.0)
    engine.add(one)
    chunk = next(iter(engine.scheduler.schedule()))
    chunk.sequence.num_computed = chunk.end  # as if the pass had failed after that
    engine.fail_active()
    assert len(engine.prefixes.index) == 0


@pytest.mark.parametrize("capacity", [16, 48, 96])
def test_little_room_changes_nothing(make_engine: MakeEngine, capacity: int) -> None:
    texts = [[1, 2, 3], [*SYSTEM, 5], [*SYSTEM, 6, 7], list(range(40, 100)), [*SYSTEM, 5, 9], [*SYSTEM[:30], 1]]
    requests = [request(str(i), text, max_tokens=25, temperature=0.7, seed=i) for i, text in enumerate(texts * 2)]
    requests = [Request(str(i), each.prompt_token_ids, each.params) for i, each in enumerate(requests)]
    expected = tokens(run(make_engine(N0, "none", prefix_cache_tokens=0), requests))
    engine = make_engine(N0, "moa", max_num_seqs=3, prefill_chunk=24, prefix_cache_tokens=capacity)
    assert tokens(run(engine, requests)) == expected
    engine.prefixes.index.check_integrity()


def copied(source: Engine, destination: Engine, text: list[int]) -> None:
    """What one engine knows of a text, by way of bytes, in another."""
    keys: list[bytes] = []
    extend_keys(keys, text, "")
    contents = destination.prefixes.format.unpack(source.prefixes.format.pack(source.prefixes.read(keys)))
    destination.prefixes.add(keys[: len(contents.drafted)], contents)


@pytest.mark.parametrize("drafter", ["none", "moa", "entry and block", "paired", "paired block", "eagle3", "independent"])
def test_another_engine_goes_on_with_a_conversation(make_engine: MakeEngine, drafter: str) -> None:
    first, second, alone = (make_engine(N0, drafter) for _ in range(3))
    said = tokens(run(first, [request("a", SYSTEM, max_tokens=30, temperature=1.0, seed=1)]))["a"]
    following = request("b", [*SYSTEM, *said, 9], max_tokens=20, temperature=1.0, seed=2)
    copied(first, second, list(following.prompt_token_ids))
    there, anew = run(second, [following])["b"], run(alone, [following])["b"]
    assert tokens({"": there}) == tokens({"": anew})
    assert there[-1].stats.cached_tokens == blocks(len(SYSTEM) + 29)
    assert there[-1].stats.num_accepted_draft_tokens == anew[-1].stats.num_accepted_draft_tokens
    second.prefixes.index.check_integrity()


def test_blocks_of_another_kind_of_engine_are_refused(make_engine: MakeEngine) -> None:
    first = make_engine(N0, "moa")
    run(first, [request("a", SYSTEM, max_tokens=2, temperature=0.0)])
    for other in (make_engine(N0, "entry"), make_engine(N0, "none")):
        with pytest.raises(InvalidBlockError):
            copied(first, other, SYSTEM)


def test_a_fingerprint_names_target_and_drafter(make_engine: MakeEngine) -> None:
    pairs = [(N0, "moa"), (N1, "moa"), (N0, "eagle3"), (N0, "none"), (N0, "entry")]
    prints = [make_engine(*pair).info.fingerprint for pair in pairs]
    assert len(set(prints)) == len(prints)
    assert make_engine(N0, "moa", max_num_seqs=2, draft_window=7).info.fingerprint == prints[0]


@pytest.mark.parametrize("drafter", ["none", "entry"])
def test_a_fingerprint_names_what_else_keys_and_values_depend_on(make_engine: MakeEngine, tmp_path: Path, drafter: str) -> None:
    """Weights stay as they are; a bundle's name, which stands for these alone, does too."""
    infos = []
    for name, change in (("same", {}), ("rope", {"rope_theta": 5e5}), ("norm", {"rms_norm_eps": 1e-3})):
        shutil.copytree(N0 / "target", tmp_path / name / "target")
        config = tmp_path / name / "target" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
        infos.append(make_engine(tmp_path / name, drafter).info)
    same = make_engine(N0, drafter).info
    for of in (lambda info: info.fingerprint, lambda info: info.target):
        assert of(infos[0]) == of(same)
        assert len({of(info) for info in infos}) == 3
    assert {info.pair for info in infos} == {same.pair}


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: b"", lambda data: b"\x00" * 64, lambda data: data[::-1]])
def test_garbage_is_not_a_block(spoil) -> None:
    format_ = BlockFormat([torch.zeros(2, 16, 4)])
    (data,) = format_.pack(Contents((torch.zeros(1, 2, 16, 4),), (True,)))
    assert format_.unpack([data]).drafted == (True,)
    with pytest.raises(InvalidBlockError):
        format_.unpack([data, spoil(data)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_a_safetensors_file_and_comes_back_as_it_was(dtype: torch.dtype) -> None:
    rows = tuple(torch.randn(3, layers, 16, width).to(dtype) for layers, width in ((2, 5), (1, 7)))
    format_ = BlockFormat([each[0] for each in rows])
    data = format_.pack(Contents(rows, (True, False, True)))
    assert torch.equal(load(data[1])["1"], rows[1][1])
    back = format_.unpack(data)
    assert back.drafted == (True, False, True)
    assert all(torch.equal(one, other) for one, other in zip(back.rows, rows, strict=True))


def test_blocks_whose_beginning_is_gone_are_not_kept(make_engine: MakeEngine) -> None:
    first, second = make_engine(), make_engine()
    run(first, [request("a", SYSTEM, max_tokens=2, temperature=0.0)])
    keys: list[bytes] = []
    extend_keys(keys, SYSTEM, "")
    second.prefixes.add(keys, first.prefixes.read(keys, 1))
    assert second.prefixes.index.known(keys) == 0
