"""What an engine takes, and what fits a limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from speculative import loading, memory_measuring
from speculative.errors import EngineLoadError
from speculative.memory import MemoryLimit, MemoryNeeds, parse_size
from tests.speculative.conftest import MOA_KINDS, N0, N1, MakeEngine, request, run, tokens

MIB = 2**20
NEEDS = MemoryNeeds(
    process=300 * MIB,
    weights=60 * MIB,
    drafter_weights=10 * MIB,
    copies=20 * MIB,
    working=10 * MIB,
    working_sequence=1 * MIB,
    sequence=7 * MIB,
    drafter_sequence=2 * MIB,
    kept_token=MIB // 4,
)
"""400 MiB, 10 for each text and a quarter for each token kept."""


def fitted(size: int, num_seqs: int = 10, kept: int = 400, *, lowers: bool = True, keeps: bool = False) -> tuple[int, int]:
    plan = NEEDS.plan(num_seqs, kept).within(size * MIB, lowers_num_seqs=lowers, keeps_tokens=keeps)
    assert plan.total <= size * MIB
    return plan.num_seqs, plan.kept_tokens


def test_parts_add_up() -> None:
    plan = NEEDS.plan(10, 400)
    assert plan.total == sum(plan.parts.values()) == 600 * MIB
    assert "600.0 MiB in full use by 10 texts at once and 400 kept tokens" in plan.describe()
    assert "kv cache 70.0 MiB" in plan.describe()


def test_what_fits_stays_as_it_is() -> None:
    assert fitted(600) == (10, 400)


def test_first_less_is_kept_and_then_fewer_texts_run() -> None:
    assert fitted(550) == (10, 200)
    assert fitted(500) == (10, 0)
    assert fitted(499) == (9, 36)  # what a text less leaves over is kept
    assert fitted(410) == (1, 0)


def test_what_was_asked_for_is_not_lowered() -> None:
    assert fitted(550, lowers=False) == (10, 200)
    assert fitted(550, keeps=True) == (5, 400)
    with pytest.raises(
        EngineLoadError, match=r"--memory-limit 480.0 MiB: .* take 400.0 MiB, each of 10 texts .* 10.0 MiB; at most 8 fit"
    ):
        fitted(480, lowers=False)
    with pytest.raises(EngineLoadError, match=r"--prefix-cache-tokens 400 100.0 MiB; at most 5 fit: lower --max-num-seqs"):
        fitted(550, lowers=False, keeps=True)


def test_where_not_one_text_fits_the_least_limit_is_told() -> None:
    with pytest.raises(EngineLoadError, match=r"not even one fits: lower --max-model-len, or allow 410.0 MiB or more"):
        fitted(405)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31),
        ("1500MB", 1_500_000_000),
        ("1.5g", 1_500_000_000),
        ("512 MiB", 2**29),
        ("1000000", 1_000_000),
        ("7 kib", 7168),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 elephants", "1e9"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="2GiB, 1500MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("folder", "drafter"), [*((N0, name) for name in ("none", *MOA_KINDS, "eagle3", "independent")), (N1, "moa")]
)
def test_an_engine_with_other_numbers_of_slots_and_kept_tokens_says_the_same(make_engine: MakeEngine, folder, drafter: str) -> None:
    asked = [request(str(number), [*range(5, 30), number], max_tokens=12, temperature=0.8, seed=number) for number in range(5)]
    whole, fitted = (make_engine(folder, drafter, prefix_cache_tokens=64) for _ in range(2))
    parts = whole.info.memory
    assert parts["kv_cache"] == pytest.approx(whole.cache.nbytes, rel=0.01)
    assert parts["drafter_cache"] == pytest.approx(sum(cache.nbytes for cache in whole._drafter_caches), rel=0.01, abs=0)
    assert parts["prefix_cache"] == whole.prefixes._blocks.nbytes
    fitted.resize(2, 32)
    assert (fitted.cache.num_slots, fitted.scheduler.num_slots, fitted.prefixes.index.num_blocks) == (2, 2, 2)
    assert fitted.cache.nbytes == pytest.approx(whole.cache.nbytes / 2, rel=0.01)
    assert tokens(run(fitted, asked)) == tokens(run(whole, asked))


def test_an_engine_fits_its_limit(make_engine: MakeEngine) -> None:
    long = {"max_model_len": 128, "max_num_seqs": 2000}
    parts = make_engine(max_num_seqs=1, max_model_len=128).info.memory
    limit = MemoryLimit(sum(parts.values()) + 1500 * (parts["kv_cache"] + parts["drafter_cache"]), lowers_num_seqs=True)
    engine = make_engine(**long, memory_limit=limit)
    assert 1 < engine.cache.num_slots < 2000
    assert limit.size is not None and sum(engine.info.memory.values()) <= limit.size
    with pytest.raises(EngineLoadError, match=r"--memory-limit .* at most \d+ fit: lower --max-num-seqs to that"):
        make_engine(**long, memory_limit=replace(limit, lowers_num_seqs=False))
    with pytest.raises(EngineLoadError, match=r"--memory-limit 1.0 MiB: .* not even one fits"):
        make_engine(**long, memory_limit=MemoryLimit(MIB, lowers_num_seqs=True))


def test_an_engine_fits_what_is_free(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_model_len": 128, "max_num_seqs": 200, "memory_limit": MemoryLimit(None, lowers_num_seqs=True)}
    parts = make_engine(max_num_seqs=1, max_model_len=128).info.memory
    free = sum(parts.values()) + 100 * (parts["kv_cache"] + parts["drafter_cache"])
    monkeypatch.setattr(loading, "free_bytes", lambda device, resident: free)
    engine = make_engine(**settings)
    slots = engine.cache.num_slots
    assert 1 < slots < 200 and sum(engine.info.memory.values()) <= free
    assert f"{slots} texts at once instead of 200 (--max-num-seqs" in caplog.text
    caplog.clear()
    monkeypatch.setattr(loading, "free_bytes", lambda device, resident: MIB)
    assert make_engine(**settings).cache.num_slots == 1, "it is loaded all the same"
    assert "one text of full length may need more" in caplog.text
    caplog.clear()
    monkeypatch.setattr(loading, "free_bytes", lambda device, resident: None)
    assert make_engine(**settings).cache.num_slots == 200
    assert not caplog.text


def test_what_is_free_is_what_the_machine_or_the_container_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_measuring, "_available_bytes", lambda: 6 * 2**30)
    monkeypatch.setattr(memory_measuring, "_container_bytes", lambda: None)
    cpu = torch.device("cpu")
    assert memory_measuring.free_bytes(cpu, 4 * 2**30) == 9 * 2**30
    monkeypatch.setattr(memory_measuring, "_container_bytes", lambda: 5 * 2**30)
    assert memory_measuring.free_bytes(cpu, 4 * 2**30) == 5 * 2**30 * 9 // 10
    assert memory_measuring.free_bytes(cpu, None) is None
    monkeypatch.undo()
    resident = memory_measuring.resident_bytes()
    free = memory_measuring.free_bytes(cpu, resident)
    assert free is None or 0 < free < 2**50
