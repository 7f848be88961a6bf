"""Replicas are killed at random moments: every text is what an engine writes that nobody disturbs."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from models.loader import load_tokenizer
from speculative.async_engine import AsyncEngine
from speculative.engine import Engine
from speculative.errors import EngineLoadError, EngineNotReadyError, EngineStepError, InvalidRequestError
from speculative.replicas.engine import MOST_LOSSES, ReplicatedEngine
from speculative.replicas.messages import ReplicaState
from speculative.replicas.models import ServedModel
from speculative.request import Grammar, Request, RequestOutput, SamplingParams, TokenLogprob
from tests.speculative.conftest import run
from tests.speculative.replicas.fleets import LocalFleet

FAULTS = 200
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_k": 30, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": ((40, 2.0),)},
    {"temperature": 1.0, "grammar": Grammar("regex", "(ab|ba|cde|[0-9]{3}){18,24}")},
    {"temperature": 0.8, "stop": ("qz", "7k", "e"), "min_tokens": 30},
    {"temperature": 0.5, "speculative": False},
]

MakeSpeller = Callable[..., Engine]


@dataclass
class Text:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    last: RequestOutput | None = None

    @classmethod
    def of(cls, outputs: list[RequestOutput]) -> Text:
        text = cls()
        for output in outputs:
            text.take(output)
        return text

    def take(self, output: RequestOutput) -> None:
        self.tokens += output.new_token_ids
        self.text += output.text_delta
        self.logprobs += output.logprobs or ()
        assert not (output.prompt_logprobs and self.prompt_logprobs), "a prompt is told once"
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.last = output


def assert_same(text: Text, expected: Text) -> None:
    assert text.last is not None and expected.last is not None
    assert (text.tokens, text.text, text.last.finish_reason) == (expected.tokens, expected.text, expected.last.finish_reason)
    for ours, theirs in ((text.logprobs, expected.logprobs), (text.prompt_logprobs, expected.prompt_logprobs)):
        assert [each.token_id for each in ours] == [each.token_id for each in theirs]
        assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-3)
    stats = text.last.stats
    assert (stats.prompt_tokens, stats.completion_tokens) == (expected.last.stats.prompt_tokens, len(expected.tokens))
    assert stats.num_accepted_prediction_tokens == expected.last.stats.num_accepted_prediction_tokens
    assert stats.first_token_time is not None and stats.last_token_time is not None
    assert stats.arrival_time <= stats.first_token_time <= stats.last_token_time


def asked(number: int, seeded: bool = True) -> Request:
    params = SamplingParams(max_tokens=70, seed=number if seeded else None, **KINDS[number % len(KINDS)])  # type: ignore[arg-type]
    prompt = tuple(random.Random(number).randrange(3, 90) for _ in range(5 + 7 * (number % 5)))
    prediction = tuple(random.Random(number).randrange(3, 90) for _ in range(20)) if number % 3 == 0 else ()
    return Request(f"text-{number}", prompt, replace(params, ignore_eos=params.grammar is None), prediction=prediction)


@asynccontextmanager
async def replicated(
    make: MakeSpeller, spelling: Path, count: int = 3, patience: float = 20.0
) -> AsyncIterator[tuple[ReplicatedEngine, LocalFleet]]:
    # Small trees: what is drafted is other tests' matter.
    engines = [AsyncEngine(lambda: make("moa", max_num_seqs=4, draft_depth=2, draft_nodes=5)) for _ in range(count)]
    fleet = LocalFleet(engines)
    engine = ReplicatedEngine(fleet, patience, lambda state: ServedModel.of(state, load_tokenizer(spelling)))
    await engine.start()
    await engine.wait_ready()
    try:
        yield engine, fleet
    finally:
        await engine.stop()


async def written(engine: ReplicatedEngine, request: Request, took: Callable[[], None] = lambda: None) -> Text:
    text = Text()
    async for output in engine.generate(request):
        assert output.request_id == request.request_id
        text.take(output)
        took()
    return text


async def test_garbage_is_not_looked_for_in_what_an_ingress_has_loaded(make_speller: MakeSpeller, spelling: Path) -> None:
    def load(state: ReplicaState) -> ServedModel:
        gc.unfreeze()  # what the replica, which is in this process too, has set aside
        return ServedModel.of(state, load_tokenizer(spelling))

    engine = ReplicatedEngine(LocalFleet([AsyncEngine(lambda: make_speller("moa"))]), load=load)
    await engine.start()
    await engine.wait_ready()
    assert gc.get_freeze_count() > 0
    await engine.stop()


@pytest.mark.integration
async def test_every_text_is_as_if_nobody_had_died(
    make_speller: MakeSpeller, spelling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Replicas die faster here than a text in a queue gets its turn.
    monkeypatch.setattr("speculative.replicas.engine.MOST_LOSSES", FAULTS)
    chance = random.Random(8)
    plain = make_speller("none", max_num_seqs=1)
    expected = {number: Text.of(run(plain, [asked(number)])[f"text-{number}"]) for number in range(2 * len(KINDS))}
    killed = 0
    # Where so many die a text may wait for its turn longer than users are asked to.
    async with replicated(make_speller, spelling, patience=300.0) as (engine, fleet):

        def maybe_kill() -> None:
            nonlocal killed
            if killed < FAULTS and fleet.replicas and chance.random() < 0.06:
                killed += 1
                revived = fleet.kill(chance.choice(list(fleet.replicas)))
                reviving.append(asyncio.create_task(fleet.add(revived)))

        reviving: list[asyncio.Task[str]] = []
        rounds = 0
        while killed < FAULTS:
            rounds += 1
            requests = [replace(asked(number), request_id=f"{rounds}-{number}") for number in expected]
            texts = await asyncio.gather(*(written(engine, each, maybe_kill) for each in requests))
            for number, text in zip(expected, texts, strict=True):
                assert_same(text, expected[number])
        await asyncio.gather(*reviving)
        assert engine.num_failovers >= FAULTS / 2


async def test_texts_without_a_seed_go_on_with_the_one_that_was_drawn(make_speller: MakeSpeller, spelling: Path) -> None:
    async with replicated(make_speller, spelling, 2) as (engine, fleet):
        outputs = 0

        def kill_once() -> None:
            nonlocal outputs
            outputs += 1
            if outputs == 3:
                fleet.kill(fleet.placed[0][1])

        text = await written(engine, asked(1, seeded=False), kill_once)
    first, second = fleet.asked
    assert first.params.seed is not None and first.params.seed == second.params.seed
    assert second.output_token_ids and second.request_id != first.request_id
    assert second.priority < first.priority, "who has begun to read is not to wait for who has not"
    assert_same(text, Text.of(run(make_speller("none"), [first])[first.request_id]))


async def test_a_replica_may_be_lost_before_it_says_anything(make_speller: MakeSpeller, spelling: Path) -> None:
    async with replicated(make_speller, spelling, 2) as (engine, fleet):
        text = asyncio.create_task(written(engine, asked(1)))
        while not fleet.placed:
            await asyncio.sleep(0)
        fleet.kill(fleet.placed[0][1])
        assert_same(await text, Text.of(run(make_speller("none"), [asked(1)])["text-1"]))


async def test_a_replica_that_stops_in_order_is_left_for_another(make_speller: MakeSpeller, spelling: Path) -> None:
    expected = Text.of(run(make_speller("none"), [asked(1)])["text-1"])
    async with replicated(make_speller, spelling, 2) as (engine, fleet):
        stream = engine.generate(asked(1))
        text = Text.of([await anext(stream)])
        await fleet.replicas[fleet.placed[0][1]].engine.stop()
        async for output in stream:
            text.take(output)
    assert_same(text, expected)
    assert {name for _, name in fleet.placed} == set(fleet.replicas)


async def test_a_request_waits_for_a_replica_and_not_for_ever(make_speller: MakeSpeller, spelling: Path) -> None:
    async with replicated(make_speller, spelling, 1) as (engine, fleet):
        kept = fleet.kill("replica-0")
        assert engine.ready, "another one is to be expected"
        waiting = asyncio.create_task(written(engine, asked(0)))
        await asyncio.sleep(0)
        await fleet.add(kept)
        assert len((await waiting).tokens) == 70
        fleet.kill("replica-1")
        engine._patience = 0.01
        with pytest.raises(EngineNotReadyError, match=r"within 0\.01 seconds"):
            await written(engine, replace(asked(0), request_id="again"))


async def test_a_request_that_ends_replicas_is_given_up(make_speller: MakeSpeller, spelling: Path) -> None:
    async with replicated(make_speller, spelling, 1) as (engine, fleet):
        original = fleet.generate

        async def deadly(request, wish):
            async for told in original(request, wish):
                yield told
                if told.replica in fleet.replicas:  # what it said last may still be under way
                    reviving.append(asyncio.create_task(fleet.add(fleet.kill(told.replica))))

        reviving: list[asyncio.Task[str]] = []
        fleet.generate = deadly  # type: ignore[method-assign]
        with pytest.raises(EngineStepError, match=f"{MOST_LOSSES + 1} replicas were lost"):
            await written(engine, asked(0))
        await asyncio.gather(*reviving)


async def test_a_failed_step_is_tried_once_elsewhere(
    make_speller: MakeSpeller, spelling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Text.of(run(make_speller("none"), [asked(1)])["text-1"])
    async with replicated(make_speller, spelling, 3) as (engine, fleet):

        def fail(_engine: Engine, *_: object) -> object:
            raise RuntimeError("a fault")

        def fail_once(_engine: Engine, *_: object) -> object:
            monkeypatch.undo()
            raise RuntimeError("a fault")

        monkeypatch.setattr(Engine, "_verify", fail_once)
        assert_same(await written(engine, asked(1)), expected)
        assert engine.num_failovers == 1
        monkeypatch.setattr(Engine, "_verify", fail)
        with pytest.raises(EngineStepError):
            await written(engine, replace(asked(1), request_id="again"))
    assert len({name for _, name in fleet.placed[-2:]}) == 2


async def test_a_failed_step_is_told_at_once_where_there_is_no_other(
    make_speller: MakeSpeller, spelling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_engine: Engine, *_: object) -> object:
        raise RuntimeError("a fault")

    async with replicated(make_speller, spelling, 1, patience=1000.0) as (engine, _):
        monkeypatch.setattr(Engine, "_verify", fail)
        with pytest.raises(EngineStepError):
            await asyncio.wait_for(written(engine, asked(1)), 60)


async def test_whatever_keeps_a_tokenizer_from_being_loaded_is_reported(make_speller: MakeSpeller) -> None:
    def load(state: ReplicaState) -> ServedModel:
        raise ValueError("of no use")

    engine = ReplicatedEngine(LocalFleet([AsyncEngine(lambda: make_speller("moa"))]), load=load)
    await engine.start()
    with pytest.raises(EngineLoadError, match="of no use"):
        await asyncio.wait_for(engine.wait_ready(), 60)
    assert not engine.alive
    await engine.stop()


async def test_who_goes_away_ends_the_request_at_its_replica(make_speller: MakeSpeller, spelling: Path) -> None:
    async with replicated(make_speller, spelling, 1) as (engine, fleet):
        stream = engine.generate(asked(0))
        await anext(stream)
        await stream.aclose()
        while engine.status().num_running:
            await asyncio.sleep(0.01)
        assert fleet.loads.of("replica-0") == 0


@pytest.mark.parametrize("replicas_lost", [False, True])
async def test_texts_that_outlast_a_drain_are_told_so(make_speller: MakeSpeller, spelling: Path, replicas_lost: bool) -> None:
    async with replicated(make_speller, spelling, 1) as (engine, fleet):
        stream = engine.generate(asked(0))
        await anext(stream)
        if replicas_lost:  # it waits for another one then
            fleet.kill("replica-0")
        assert not await engine.drain(0)
        with pytest.raises(EngineNotReadyError, match="shutting down"):
            async for _ in stream:
                pass
        assert fleet.loads.of("replica-0") == 0
        with pytest.raises(EngineNotReadyError, match="shutting down"):
            engine.validate(asked(1))
        assert await engine.drain(0)


async def test_bad_requests_are_refused_here(make_speller: MakeSpeller, spelling: Path) -> None:
    async with replicated(make_speller, spelling, 1) as (engine, fleet):
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            engine.validate(Request("a", ()))
        with pytest.raises(InvalidRequestError, match="token 0 of the output cannot follow"):
            engine.validate(replace(asked(4), output_token_ids=(9,)))
        with pytest.raises(InvalidRequestError):
            engine.check_grammar(Grammar("regex", "(("))
        assert not fleet.placed


async def test_a_text_with_memory_stays_with_its_pair(make_speller: MakeSpeller, spelling: Path) -> None:
    async with replicated(make_speller, spelling, 2) as (engine, fleet):
        other = fleet.engines[1]._engine
        assert other is not None
        other.info = replace(other.info, pair="another drafter")
        for number in range(6):
            remote = replace(asked(0), request_id=f"remote-{number}", remote=True, memory="int8")
            stream = engine.generate(remote)
            await anext(stream)
            if number < 5:
                await stream.aclose()
        assert {name for _, name in fleet.placed} == {"replica-0"}, "the other one cannot make its memory"
        fleet.kill("replica-0")
        with pytest.raises(EngineNotReadyError, match="another target or drafter"):
            await asyncio.wait_for(anext(stream), 30)
        assert len((await written(engine, asked(0))).tokens) == 70, "without memory any drafter will do"
