"""What processes that share a target start with, and what happens where one of them ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.config import MoAConfig
from models.loader import load_target
from models.moa import MoA
from models.saving import save_drafter
from speculative import ranks
from speculative.async_engine import AsyncEngine
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.errors import EngineError, EngineLoadError, EngineLostError, EngineNotReadyError
from speculative.memory import MemoryLimit
from tests.models.test_llama_parity import SIZES, Pair
from tests.speculative.conftest import N0, request, run, tokens
from tests.speculative.shared.conftest import LoadEngine, other
from tests.speculative.test_engine import mixed_requests

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("family", ["llama-biases", "qwen2-tied", "qwen3-tied", "mistral-head-dim"])
def test_logits_of_all_kinds_of_targets_are_close(load: LoadEngine, family: str, tmp_path: Path) -> None:
    Pair(family, tmp_path)
    asked = [
        request("greedy", [5, 9, 5, 9, 5, 9, 11], max_tokens=20, temperature=0.0, logprobs=5, prompt_logprobs=3),
        request("drawn", list(range(3, 30)), max_tokens=20, temperature=1.0, seed=1, logprobs=5),
    ]
    told = []
    for size in (1, 2):
        engine = load(tmp_path, "ngram", size)
        try:
            outputs = run(engine, asked)
        finally:
            engine.close()
        told.append((tokens(outputs), [each for series in outputs.values() for output in series for each in output.logprobs or ()]))
    assert told[0][0] == told[1][0]
    assert [each.token_id for each in told[0][1]] == [each.token_id for each in told[1][1]]
    probabilities = [[each.logprob for each in logprobs] for _, logprobs in told]
    assert probabilities[1] == pytest.approx(probabilities[0], abs=1e-4)


def test_three_processes_share_what_is_not_even(load: LoadEngine, tmp_path: Path) -> None:
    # Three groups of two query heads, 97 tokens as 33, 33 and 31, and a drafter that reads all heads in their order.
    sizes = {**SIZES, "num_key_value_heads": 3, "intermediate_size": 81, "tie_word_embeddings": True}
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "target")
    target = load_target(tmp_path / "target", dtype=torch.float32)[0]
    save_drafter(MoA(MoAConfig.from_target(target.config)), tmp_path / "drafter", dtype=torch.float32)
    written, remembered = [], []
    asked = [request("a", [5, 9, 5, 9, 11], max_tokens=20, temperature=0.0), request("b", [96, 3], max_tokens=30, seed=1)]
    for size in (1, 3):
        engine = load(tmp_path / "target", "moa", size)
        try:
            for cache in engine._drafter_caches:
                cache.data.zero_()  # measuring has left made-up texts
            written.append(tokens(run(engine, asked)))
            remembered.append([cache.data for cache in engine._drafter_caches])
        finally:
            engine.close()
    assert written[0] == written[1]
    for one, three in zip(*remembered, strict=True):
        torch.testing.assert_close(one, three, rtol=1e-3, atol=1e-4)


def test_a_memory_limit_resizes_all_processes(load: LoadEngine) -> None:
    # What fits is known once there are caches: they are made for one text first, and then for as many as there may be.
    free = load(N0 / "target", "moa", 1, max_num_seqs=6)
    engine = load(N0 / "target", "moa", 2, max_num_seqs=6, memory_limit=MemoryLimit(2**40))
    try:
        assert engine.cache.num_slots == 6
        assert tokens(run(engine, mixed_requests())) == tokens(run(free, mixed_requests()))
    finally:
        engine.close()


def test_a_process_that_is_killed_while_nothing_runs_is_noticed(shared: Engine, caplog: pytest.LogCaptureFixture) -> None:
    assert shared.ranks is not None and shared.lost is None
    other(shared).kill()
    assert shared.ranks._noticed.wait(30)
    assert shared.lost is not None
    assert "tensor-parallel rank 1 of 2" in shared.lost and "ended by SIGKILL" in shared.lost
    assert "start anew" in caplog.text
    shared.add(request("a", [1, 2, 3], max_tokens=4))
    with pytest.raises(EngineLostError, match="SIGKILL"):
        run(shared, [])


def test_a_process_that_is_killed_in_the_middle_of_a_step_ends_it(shared: Engine) -> None:
    shared.before_pass = other(shared).kill
    with pytest.raises(EngineLostError, match=r"rank 1 of 2.*SIGKILL"):
        run(shared, [request("a", [1, 2, 3], max_tokens=4)])


def test_a_process_that_does_not_answer_is_not_waited_for_for_ever(load: LoadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE", timedelta(seconds=1))
    monkeypatch.setattr(ranks, "_ENDING_S", 0.1)
    engine = load(N0 / "target", "none", 2)
    process = other(engine)
    try:
        engine.before_pass = lambda: process.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineLostError, match="--tensor-parallel-size"):
            run(engine, [request("a", [1, 2, 3], max_tokens=4)])
        assert engine.lost
    finally:
        engine.close()
    assert process.returncode == -signal.SIGKILL  # it cannot end by itself


def test_an_exception_in_the_middle_of_a_pass_is_the_engines_end(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(ranks, "_NOTICED_S", 0.0)
    monkeypatch.setattr(shared.target.layers[1], "forward", fail)
    with pytest.raises(EngineLostError, match="no memory left"):
        run(shared, [request("a", [1, 2, 3], max_tokens=4)])
    assert shared.lost


async def test_streams_end_and_probes_fail_where_a_process_is_killed(load: LoadEngine) -> None:
    engine = AsyncEngine(lambda: load(N0 / "target", "moa", 2))
    await engine.start()
    await engine.wait_ready()
    assert engine.alive and engine.ready and engine._engine is not None
    process = other(engine._engine)
    stream = engine.generate(request("a", [1, 2, 3], max_tokens=100))
    with pytest.raises(EngineError, match="failed while working"):
        async for output in stream:
            if len(output.new_token_ids):
                process.kill()
    assert not engine.alive and not engine.ready
    with pytest.raises(EngineNotReadyError, match="not running"):
        await anext(engine.generate(request("b", [1, 2, 3], max_tokens=4)))
    await asyncio.wait_for(engine.stop(), 30)
    assert process.returncode == -signal.SIGKILL


def test_processes_end_with_the_first_however_that_ends() -> None:
    program = (
        "import sys; from speculative.config import EngineConfig; from speculative.loading import load_engine\n"
        f"config = EngineConfig({str(N0 / 'target')!r}, 'none', 'float32', 'cpu', 64, 1, tensor_parallel_size=2)\n"
        "load_engine(config)\n"
        "print('loaded', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"loaded\n"
        process.kill()
        # The other process has the same standard output: it is at its end when both are.
        process.communicate(timeout=30)


def test_a_process_that_cannot_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    started = ranks.Ranks.start(2, tmp_path / "nothing", dtype=torch.float32, device=torch.device("cpu"), num_threads=1)
    try:
        with pytest.raises(EngineLostError, match=r"rank 1 of 2 .*: .*nothing has no config\.json"):
            started.join()
    finally:
        started.close()


def test_a_failed_start_leaves_no_process(load: LoadEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(N0 / "drafter", tmp_path / "drafter")
    for weights in (tmp_path / "drafter").glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:5000])
    started: list[ranks.Ranks] = []
    begin = ranks.Ranks.start.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(ranks.Ranks, "start", classmethod(lambda *a, **k: started.append(begin(*a, **k)) or started[-1]))
    with pytest.raises(EngineLoadError, match="is damaged"):  # the drafter, which is read once the target is there
        load(N0 / "target", str(tmp_path / "drafter"), 2)
    assert [rank.process.returncode for rank in started[0]._others] == [0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 3}, r"--tensor-parallel-size 3 does not divide the model's num_key_value_heads \(2\); it can be 1, 2"),
        ({"size": 2, "compile": "on"}, "--compile on: with --tensor-parallel-size 2"),
    ],
)
def test_what_cannot_be_shared_is_refused(load: LoadEngine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineLoadError, match=message):
        load(N0 / "target", "none", **settings)


def test_drafters_are_of_the_first_process_alone(shared: Engine) -> None:
    drafter: Any = innermost(shared.drafter)
    assert drafter.target is shared.target
    assert shared.target.embeddings.shape == (160, 64)
