"""What a replica's engine costs: a plain or drafted step by batch, and reading prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from benchmarks.capacity.costs import EngineCosts, Step
from benchmarks.prompts import Prompt
from speculative.config import EngineConfig
from speculative.engine import Engine
from speculative.request import Request, SamplingParams


def measure_engine(
    engine: Engine,
    config: EngineConfig,
    prompts: Sequence[Prompt],
    *,
    batches: Sequence[int],
    steps: int,
    lengths: Sequence[int],
    repeats: int,
    speculative: bool,
    progress: Callable[[], None],
) -> EngineCosts:
    """Run ``prompts`` in each of ``batches`` for ``steps`` steps, and read prompts of ``lengths`` tokens; ``repeats`` times each.

    Batches and lengths are measured in turn, so that a busy moment of the machine does not fall on one of them, and each repeat
    runs other prompts. On one thread of a CPU processor time counts, which nobody else can take; otherwise the clock, in those
    runs, half of them, that had the processor most of the time.
    """
    alone = config.num_threads == 1 and engine.info.device == "cpu"
    decoded: dict[int, list[tuple[Timed, float]]] = {batch: [] for batch in batches}
    read: dict[int, list[Timed]] = {length: [] for length in lengths}
    for repeat in range(repeats):
        for batch in batches:
            chosen = [prompts[(repeat * batch + number) % len(prompts)] for number in range(batch)]
            decoded[batch].append(_decode(engine, chosen, steps, f"{repeat}-{batch}", speculative))
            progress()
        for length in lengths:
            read[length].append(_read(engine, prompts, length, f"{repeat}-{length}"))
            progress()
    found = [
        Step(batch, undisturbed([timed for timed, _ in runs], alone), mean(tokens for _, tokens in runs))
        for batch, runs in sorted(decoded.items())
    ]
    seconds = {length: undisturbed(times, alone) for length, times in read.items()}
    per_pass, token, pair = fit_reading(seconds, config.prefill_chunk)
    slots, length = config.max_num_seqs, engine.info.max_model_len
    # A server keeps half of what its slots hold unless told otherwise; here nothing is kept, as nothing may be known.
    return EngineCosts(tuple(found), per_pass, token, pair, slots, length, slots * length // 2, config.prefill_chunk)


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds by the clock, and those of the processor that this process had in them."""

    seconds: float
    cpu: float


def undisturbed(times: Sequence[Timed], alone: bool) -> float:
    """Median processor time of work that is one thread's ``alone``; else the clock's, of the half that was disturbed least."""
    if alone:
        return median(each.cpu for each in times)
    best = sorted(times, key=lambda each: each.cpu / each.seconds, reverse=True)[: (len(times) + 1) // 2]
    return median(each.seconds for each in best)


def fit_reading(seconds: dict[int, float], chunk: int) -> tuple[float, float, float]:
    """Least squares of the relative errors: seconds for a pass, a token, and a token and position that it sees; none below 0."""
    lengths = np.array(sorted(seconds), dtype=float)
    taken = np.array([seconds[int(length)] for length in lengths])
    terms = np.stack([np.ceil(lengths / chunk), lengths, lengths**2 / 2], axis=1)
    used = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(terms[:, used] / taken[:, None], np.ones(len(taken)), rcond=None)[0]
        if found.min() >= 0 or len(used) == 1:
            break
        used.pop(int(found.argmin()))
    solved = np.zeros(3)
    solved[used] = np.maximum(found, 0.0)
    return float(solved[0]), float(solved[1]), float(solved[2])


def _decode(engine: Engine, prompts: Sequence[Prompt], steps: int, name: str, speculative: bool) -> tuple[Timed, float]:
    """A step, and the tokens that a text gains by it, while these texts run and nothing is read."""
    # Room for what drafts gain: all run until the last step has been timed.
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True, speculative=speculative)
    names = [f"{name}-{number}" for number in range(len(prompts))]
    for each, prompt in zip(names, prompts, strict=True):
        engine.add(Request(each, prompt.token_ids, params, cache_salt=each))
    begun: set[str] = set()
    while len(begun) < len(prompts):
        begun |= {output.request_id for output in engine.step() if output.new_token_ids}
    tokens = 0
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        tokens += sum(len(output.new_token_ids) for output in engine.step())
    taken = Timed((time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps)
    for each in names:
        engine.abort(each)
    return taken, tokens / steps / len(prompts)


def _read(engine: Engine, prompts: Sequence[Prompt], length: int, salt: str) -> Timed:
    """From a prompt of ``length`` tokens to its first token, on an engine that does nothing else."""
    ids = [token for prompt in prompts for token in prompt.token_ids]
    ids = (ids * (length // len(ids) + 1))[:length]
    engine.add(Request(f"read-{salt}", tuple(ids), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), cache_salt=salt))
    began, cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
    return Timed(time.perf_counter() - began, time.process_time() - cpu)
