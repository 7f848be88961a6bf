"""Measuring what steps cost, by taking some on made-up texts before the first request comes."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import accumulate, count
from math import inf
from typing import NamedTuple

import torch

from models.kv_cache import KVCache
from speculative.costs import MeasuredCosts, StepTimes, doubling
from speculative.drafters.base import Drafter
from speculative.drafters.wrapper import DrafterWrapper, innermost
from speculative.engine import Engine
from speculative.policy import DraftShape, FixedPolicy
from speculative.prefill_budget import LEAST, ReadingCosts
from speculative.request import Request, SamplingParams
from speculative.sequence import Sequence
from speculative.timing import StepClock
from speculative.tree import DraftTree

ENOUGH_SECONDS = 3.0
"""Batch sizes that would not be measured by then are calculated: of large models all but one text."""

ENOUGH_SIZE_SECONDS = 0.25
"""After so long with one batch size a few steps of each kind are enough: of long steps a disturbance is a small part."""

ENOUGH_LENGTHS_SECONDS = 1.0
"""After so long with texts of two lengths there is no further round of them."""

ENOUGH_READING_SECONDS = 0.05
"""A prompt that takes so long to read is long enough to tell what its tokens cost."""

_PROMPT_TOKENS = 64
_LONG_PROMPT_TOKENS = 512
_LONG_PROMPTS = 8
_LONG_PROMPT_NODES = 4
_LONG_PROMPT_SECONDS = 0.5
"""What reading long prompts once may take: of large models the lengths of texts are left to the pace that steps have."""

_LONG_PROMPT_ROUNDS = 3

_WORDS = 32
"""Different tokens of which the made-up texts consist."""

_LEVELS = 3
_REPEATS = 5
_FEW = 2
_READINGS = 3
_STEPS_UNTIL_DRAFTED = 50
_NUMBERS = count()
_RANDOM = torch.Generator().manual_seed(0)


class _TextsTooShortError(Exception):
    """No step of the kind that was wanted: texts end with the context before it comes."""


def measure_costs(engine: Engine) -> MeasuredCosts:
    """Take steps of an engine that nobody uses yet, and leave it as it was; of steps of a kind the shortest counts."""
    assert engine.drafter is not None
    script, stand_in = _Script(engine.largest_shape), _StandIn(engine.drafter)
    policy, drafter = engine.policy, engine.drafter
    engine.policy, engine.drafter, engine.prefixes.paused = script, stand_in, True
    engine.clock = _undisturbed(engine)
    try:
        return _measured(engine, script, stand_in)
    finally:
        _abort_all(engine)
        engine.policy, engine.drafter, engine.prefixes.paused = policy, drafter, False
        engine.clock = StepClock()


def _measured(engine: Engine, script: _Script, stand_in: _StandIn) -> MeasuredCosts:
    length = _short_length(engine)
    costs = MeasuredCosts(length=length)
    begun, latest = time.perf_counter(), 0.0
    shape = engine.largest_shape
    levels = min(_LEVELS, shape.depth)
    for size in doubling(engine.scheduler.num_slots):
        size_begun = time.perf_counter()
        if size_begun - begun + 2 * latest > ENOUGH_SECONDS:
            break
        kinds = [*map(_verifying, (0, *doubling(shape.nodes))), _Kind(None, 1), _Kind(None, levels)]
        try:
            *steps, first, more = _shortest(engine, script, stand_in, size, length, kinds)
        except _TextsTooShortError:
            break  # they are expected to cost as the sizes before do
        costs.steps[size] = _rising({kind.nodes or 0: step.rest for kind, step in zip(kinds, steps, strict=False)})
        further = max(0.0, more.draft - first.draft)
        costs.drafts[size] = first.draft, further / (levels - 1) if levels > 1 else first.draft
        latest = time.perf_counter() - size_begun
    costs.prompt = min(script.prompts, default=0.0)
    costs.tokens.update(_token_costs(engine, script, stand_in))
    return costs


def _token_costs(engine: Engine, script: _Script, stand_in: _StandIn) -> dict[int, float]:
    """Seconds for each token more that texts hold, by nodes; nothing where it takes too long to find out."""
    short, long = _short_length(engine), min(_LONG_PROMPT_TOKENS, engine.info.max_model_len // 2)
    reading = engine.scheduler.budget.costs
    if reading is None or long < 2 * short:
        return {}
    size = min(_LONG_PROMPTS, engine.scheduler.num_slots, int(_LONG_PROMPT_SECONDS / reading.seconds(0, long)))
    if size < 1:
        return {}
    counts = (0, min(_LONG_PROMPT_NODES, engine.largest_shape.nodes))
    seconds = {length: dict.fromkeys(counts, inf) for length in (short, long)}
    # In turns: what disturbs the machine for a while would look like what lengths cost.
    begun = time.perf_counter()
    for number in range(_LONG_PROMPT_ROUNDS):
        if number and time.perf_counter() - begun > ENOUGH_LENGTHS_SECONDS:
            break
        for length in (short, long):
            _abort_all(engine)
            try:
                steps = _shortest(engine, script, stand_in, size, length, [*map(_verifying, counts)])
            except _TextsTooShortError:
                return {}
            for nodes, step in zip(counts, steps, strict=True):
                seconds[length][nodes] = min(seconds[length][nodes], step.rest)
    # Noise must not make it nothing: what steps take corrects it.
    return {
        nodes: max(seconds[long][nodes] - least, 0.01 * least) / (size * (long - short)) for nodes, least in seconds[short].items()
    }


def _rising(seconds: dict[int, float]) -> dict[int, float]:
    """By nodes: fewer of them do not take longer, so that a measurement that was disturbed does not stay."""
    least = list(accumulate(reversed(seconds.values()), min))
    return dict(zip(seconds, reversed(least), strict=True))


def _undisturbed(engine: Engine) -> StepClock:
    """The processor's time instead of the wall's, where steps are this thread's work: that of others must not look like costs."""
    alone = engine.target.device.type == "cpu" and engine.ranks is None  # other ranks are waited for
    return StepClock(now=time.thread_time) if alone else StepClock()


def _short_length(engine: Engine) -> int:
    return min(_PROMPT_TOKENS, engine.info.max_model_len // 2)


def measure_reading(engine: Engine) -> ReadingCosts | None:
    """Read prompts with an engine that nobody uses yet, and leave it as it was; None where chunks are as short as can be anyway."""
    most = min(engine.scheduler.budget.most, (engine.info.max_model_len - 1) // 2)
    if most <= LEAST:
        return None
    engine.prefixes.paused, engine.clock = True, _undisturbed(engine)
    try:
        few, _ = _reading(engine, LEAST)
        count, first, second = LEAST, 0.0, 0.0
        while count < most and first + second < ENOUGH_READING_SECONDS:
            count = min(4 * count, most)
            first, second = _reading(engine, count)
    finally:
        engine.prefixes.paused = False
        engine.clock = StepClock()
    # Three readings and three unknowns: run + n·token + n·(start + n)·position. Noise must not make any of them nothing.
    least = 0.01 * few
    position = max(second - first, least) / count**2
    token = max(first - few - (count**2 - LEAST**2) * position, least) / (count - LEAST)
    return ReadingCosts(max(few - LEAST * (token + LEAST * position), least), token, position)


def _reading(engine: Engine, count: int) -> tuple[float, float]:
    """Seconds for a prompt's first ``count`` tokens, and for as many behind them; of some readings the shortest."""
    taken: list[list[float]] = []
    budget = engine.scheduler.budget
    most, budget.most = budget.most, count
    try:
        while len(taken) < _READINGS and sum(map(sum, taken)) < _READINGS * ENOUGH_READING_SECONDS:
            _begin(engine, 2 * count, max_tokens=0)
            taken.append([])
            while engine.has_work:
                engine.step()
                taken[-1].append(engine.clock.of_step["prefill"])
    finally:
        budget.most = most
    first, second = (min(times) for times in zip(*taken, strict=True))
    return first, second


def _shortest(engine: Engine, script: _Script, stand_in: _StandIn, size: int, length: int, kinds: Many[_Kind]) -> list[StepTimes]:
    """Of some steps of each kind, with ``size`` texts of ``length`` tokens, the shortest of each part.

    The kinds take turns: what disturbs the machine for a while meets all of them alike, and none at every turn.
    """
    taken: list[list[StepTimes]] = [[] for _ in kinds]
    begun = time.perf_counter()
    while len(taken[0]) <= _FEW or (len(taken[0]) <= _REPEATS and time.perf_counter() - begun < ENOUGH_SIZE_SECONDS):
        for kind, steps in zip(kinds, taken, strict=True):
            stand_in.nodes, script.levels = kind
            steps.append(_step(engine, script, size, length))
    # The first of a kind finds nothing prepared.
    return [
        replace(first, draft=min(step.draft for step in steps), rest=min(step.rest for step in steps)) for first, *steps in taken
    ]


def _step(engine: Engine, script: _Script, size: int, length: int) -> StepTimes:
    """One step as the script says; before a drafter drafts anew it may take some others to be told what it has missed."""
    for _ in range(_STEPS_UNTIL_DRAFTED):
        _fill(engine, size, length)
        script.latest = None
        engine.step()
        if script.latest is not None and script.latest.drafted == (script.levels is not None):
            return script.latest
    raise _TextsTooShortError


def _abort_all(engine: Engine) -> None:
    for sequence in engine.scheduler.active:
        engine.abort(sequence.request.request_id)


def _fill(engine: Engine, size: int, length: int) -> None:
    """Begin texts until so many run; raises _TextsTooShortError where the first end before the last begin."""
    budget = engine.scheduler.budget
    most, costs = budget.most, budget.costs
    budget.most, budget.costs = max(most, length), None  # a prompt in each step
    try:
        for _ in range(2 * size + 2):
            if len(engine.scheduler.running) >= size:
                return
            for _ in range(size - len(engine.scheduler.active)):
                _begin(engine, length)
            engine.step()
    finally:
        budget.most, budget.costs = most, costs
    raise _TextsTooShortError


def _begin(engine: Engine, length: int, max_tokens: int | None = None) -> None:
    # Of few tokens, as texts repeat themselves: what a drafter works out once for each must not look like what drafts cost.
    words = torch.randint(engine.info.vocab_size, (_WORDS,), generator=torch.Generator().manual_seed(0))
    prompt = words[torch.randint(_WORDS, (length,), generator=_RANDOM)].tolist()
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    engine.add(Request(f"cost-{next(_NUMBERS)}", tuple(prompt), sampling))


class _Kind(NamedTuple):
    """Steps that verify so many nodes of each text, None: those that the drafter proposes, of so many levels; None: no draft."""

    nodes: int | None
    levels: int | None


def _verifying(nodes: int) -> _Kind:
    """Steps that verify so many nodes of each text, which nobody has drafted."""
    return _Kind(nodes, 1 if nodes else None)


class _Script(FixedPolicy):
    """A policy that does as it is told, and keeps the times of the latest step."""

    def __init__(self, largest: DraftShape) -> None:
        super().__init__(largest)
        self.levels: int | None = None
        self.latest: StepTimes | None = None
        self.prompts: list[float] = []

    def shape(self, batch: Many[Sequence], *, reading: bool = False) -> DraftShape | None:
        """So many levels, whatever the drafter thinks of them; None: no draft."""
        return None if self.levels is None else replace(self._shape, depth=self.levels, min_reach=0.0)

    def observe(self, step: StepTimes, tree: DraftTree, batch: Many[Sequence], gained: Many[int]) -> None:
        """Keep its times."""
        self.latest = step

    def observe_prompt(self, seconds: float) -> None:
        """Keep them."""
        self.prompts.append(seconds)


class _StandIn(DrafterWrapper):
    """Proposes ``nodes`` nodes at once that are hardly ever right; None: asks the drafter behind all that may spare it the work."""

    def __init__(self, other: Drafter) -> None:
        super().__init__(other)
        self.nodes: int | None = None
        self._inner = innermost(other)

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """As in Drafter."""
        if self.nodes is None:
            return self._inner.propose(sequences, shape, target_cache)
        size = len(sequences), self.nodes
        return DraftTree(torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long), (self.nodes,) * len(sequences))
