"""Edges and servers under faults, at random moments: every answer ends, and no token is lost, doubled or wrong.

Two servers of a tiny pair share a Redis. An edge reaches one of them at a time, over a line that is cut, goes silent or leads to
the other one; servers are killed and started anew, and so is Redis.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import pytest
import uvicorn

from app.main import create_app
from app.settings import Settings
from models.loader import PRETRAINED
from speculative.async_engine import AsyncEngine
from speculative.config import EngineConfig
from speculative.edge.config import EdgeConfig, Offline
from speculative.edge.engine import EdgeEngine
from speculative.edge.opening import Server as Address
from speculative.edge_export import export_edge
from speculative.engine import Engine
from speculative.loading import load_engine
from speculative.request import Grammar, Request, RequestOutput, SamplingParams, TokenLogprob
from tests.app.sessions.redis_server import RedisServer, redis_server
from tests.integration.wire import Wire
from tests.speculative.conftest import N0

pytestmark = pytest.mark.integration

FAULTS = 100
FEWER = 40
"""With the bundled pair, whose drafts come true: trees in flight are followed, which a tiny drafter's hardly ever are."""
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3}
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 30, "logprobs": 2},
    {"temperature": 0.7, **PENALTIES},
    {"temperature": 1.0, "grammar": Grammar("regex", "(ab|ba|cde|[0-9]{3}){30,40}")},
    {"temperature": 0.5, "stop": ("qz", "7k")},
]


class Replica:
    """A server with HTTP and WebSocket, in this process and on a port that it keeps when it is started anew."""

    def __init__(self, model: str, drafter: str, redis: RedisServer) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._settings = Settings(
            model=model, drafter=drafter, dtype="float32", device="cpu", compile="off", max_model_len=256,
            max_num_seqs=8, draft_nodes=16, redis_url=redis.url, remote_idle_seconds=1.0, num_threads=1,
        )  # fmt: skip

    async def start(self) -> None:
        self.engine = AsyncEngine.from_config(self._settings.engine_config())
        self.app = create_app(self._settings, self.engine)
        self._server = _Uvicorn(
            uvicorn.Config(self.app, log_config=None, ws="websockets-sansio", lifespan="on", timeout_graceful_shutdown=0)
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener.dup()]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        await self.engine.wait_ready()

    async def kill(self) -> None:
        """Nobody is told, and nothing is finished."""
        await self.engine.stop()
        self._server.should_exit = True
        await self._serving

    @property
    def num_sessions(self) -> int:
        return len(self.app.state.serving.remote)

    def close(self) -> None:
        self._listener.close()


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # this process's are pytest's
        yield


@dataclass
class Text:
    """An answer as its reader has it: tokens, which of them a drafter wrote alone, characters, and how it ended.

    Where answers are ``corrected``, what a server says comes only once it has verified all before it.
    """

    corrected: bool = False

    tokens: list[int] = field(default_factory=list)
    alone: list[bool] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: RequestOutput | None = None
    revisions: int = 0

    def take(self, output: RequestOutput) -> None:
        assert self.last is None or self.last.finish_reason is None
        written = output.written
        if written is not None and not written.offline:
            self.revisions += 1
            assert all(self.alone[written.first_token :]), "what was verified is never taken back"
            for series in (self.tokens, self.alone, self.logprobs):
                del series[written.first_token :]  # type: ignore[attr-defined]
            self.text = self.text[: written.first_character]
        if self.corrected and (written is None or not written.offline) and (output.new_token_ids or output.finish_reason):
            self.alone = [False] * len(self.alone)
        self.tokens += output.new_token_ids
        self.alone += [written is not None and written.offline] * len(output.new_token_ids)
        self.text += output.text_delta
        self.logprobs += output.logprobs or ()
        self.last = output


def asked(number: int) -> Request:
    params = SamplingParams(max_tokens=90, seed=number, **KINDS[number % len(KINDS)])  # type: ignore[arg-type]
    ignored = params.grammar is None
    prompt = tuple(random.Random(number).randrange(3, 90) for _ in range(5 + 7 * (number % 5)))
    return Request(f"text-{number}", prompt, replace(params, ignore_eos=ignored))


def plainly(engine: Engine, requests: list[Request]) -> dict[str, Text]:
    texts = {each.request_id: Text() for each in requests}
    for each in requests:
        engine.add(replace(each, params=replace(each.params, speculative=False)))
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id].take(output)
    return texts


@dataclass
class Scene:
    wire: Wire
    replicas: tuple[Replica, Replica]
    redis: RedisServer
    edge: EdgeEngine
    corrects: bool
    faults: Counter[str] = field(default_factory=Counter)

    async def befall(self, chance: random.Random) -> None:
        """One fault, and its end."""
        (kind,) = chance.choices(("cut", "elsewhere", "silence", "restart", "redis"), (70, 20, 3, 3, 4))
        self.faults[kind] += 1
        if kind == "cut":
            self.wire.cut()
            await asyncio.sleep(chance.choice((0.0, 0.01, 0.05)))
        elif kind == "silence":
            self.wire.silence()
            await asyncio.sleep(chance.choice((0.1, 1.2)))
        elif kind == "elsewhere":
            self.wire.to = next(each.port for each in self.replicas if each.port != self.wire.to)
            self.wire.cut()
        elif kind == "restart":
            replica = chance.choice(self.replicas)
            await replica.kill()
            await replica.start()
        else:
            self.redis.kill()
            await asyncio.sleep(chance.choice((0.0, 0.1)))
            self.redis.start()
        self.wire.mend()

    async def write(self, request: Request) -> Text:
        text = Text(self.corrects)
        async for output in self.edge.generate(request):
            text.take(output)
        return text

    async def suffer(self, requests: list[Request], seed: int, faults: int, at_once: int = 4) -> dict[str, Text]:
        """Write all texts, over and over until there were so many faults."""
        chance, texts, over = random.Random(seed), {}, False

        async def writer(mine: list[Request]) -> None:
            rounds = 0
            while not over or not rounds:
                for each in mine:
                    name = f"{each.request_id} {rounds}"
                    texts[name] = await self.write(replace(each, request_id=name))
                    if over and rounds:
                        return
                rounds += 1

        writers = [asyncio.create_task(writer(requests[first::at_once])) for first in range(at_once)]
        try:
            while self.faults.total() < faults and not any(each.done() for each in writers):
                while not self.edge.status().edge.server_up:  # type: ignore[union-attr]
                    await asyncio.sleep(0.005)
                await asyncio.sleep(chance.expovariate(1 / 0.05))
                await self.befall(chance)
            over = True
            await asyncio.gather(*writers)
        finally:
            for each in writers:
                each.cancel()
        return texts

    async def assert_nothing_is_left(self) -> None:
        """Sessions that nobody has come for go within a second and a look at the clock."""
        with anyio.fail_after(20):
            while any(each.num_sessions or each.engine.status().num_running for each in self.replicas):
                await asyncio.sleep(0.05)
        assert self.edge.status().num_running == self.edge.status().num_waiting == 0


@pytest.fixture(scope="module")
def bundle(spelling: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "edge"
    export_edge(str(spelling), str(N0 / "drafter"), folder, dtype="float32")
    return folder


@pytest.fixture(params=["patient", "correct", "keep", "far"])
async def scene(
    request: pytest.FixtureRequest, spelling: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    """An edge that waits for its server as long as it takes, or does not wait and writes on alone; or waits, and drafts ahead."""
    model, drafter, delay = str(spelling), str(N0 / "drafter"), 0.0
    if request.param == "far":
        model, drafter = str(PRETRAINED / "concierge"), str(PRETRAINED / "concierge-moa")
        bundle, delay = tmp_path / "edge", 0.05
        export_edge(model, drafter, bundle, dtype="float32")
        monkeypatch.setattr("speculative.edge.policy.EdgePolicy.ahead", lambda self, largest: largest)
    monkeypatch.setattr("speculative.edge.link.FIRST_S", 0.01)  # after hundreds of faults nobody else would try again so soon
    monkeypatch.setattr("speculative.edge.link.MOST_S", 0.1)
    with redis_server() as redis:
        replicas = (Replica(model, drafter, redis), Replica(model, drafter, redis))
        for each in replicas:
            await each.start()
        wire = Wire(replicas[0].port, delay)
        patience, offline = (1000.0, "stop") if request.param in ("patient", "far") else (0.0, request.param)
        edge = EdgeEngine(
            EdgeConfig(
                Address(f"ws://127.0.0.1:{wire.port}"),
                bundle,
                reconnect_timeout=patience,
                offline=offline,
                compile="off",
                num_threads=1,
            )
        )
        await edge.start()
        await edge.wait_ready()
        yield Scene(wire, replicas, redis, edge, offline == "correct")
        await edge.stop()
        wire.close()
        for each in replicas:
            with suppress(Exception):
                await each.kill()
            each.close()


async def test_every_answer_ends_with_the_tokens_that_it_should_have(scene: Scene, make_speller, request) -> None:
    requests = [replace(asked(number), revisable=True) for number in range(24)]
    offline: Offline | str = request.node.callspec.params["scene"]
    if far := offline == "far":
        requests = requests[:6]
        engine = load_engine(
            EngineConfig(str(PRETRAINED / "concierge"), "none", dtype="float32", compile="off", max_model_len=256, max_num_seqs=8)
        )
    else:
        engine = make_speller("none", max_model_len=256, max_num_seqs=8)
    expected = plainly(engine, requests)
    faults, at_once = (FEWER, 1) if far else (FAULTS, 4)
    texts = await scene.suffer(requests, seed=1, faults=faults, at_once=at_once)
    assert scene.faults.total() >= faults
    for name, text in texts.items():
        plain = expected[name.split()[0]]
        assert text.last is not None and text.last.finish_reason in ("stop", "length")
        assert text.last.stats.completion_tokens == len(text.tokens)
        alone = text.alone.index(True) if True in text.alone else len(text.tokens)
        assert text.tokens[:alone] == plain.tokens[:alone], name
        if offline in ("patient", "far"):
            assert not any(text.alone)
        if alone == len(text.tokens):
            assert (text.text, text.last.finish_reason) == (plain.text, plain.last.finish_reason)  # type: ignore[union-attr]
            assert len(text.logprobs) == len(plain.logprobs)
        elif offline == "correct":
            assert all(text.alone[alone:]), "only an end that no server has seen is left uncorrected"
        else:
            assert_follows(engine, next(each for each in requests if each.request_id == name.split()[0]), text)
    num_alone, revisions = sum(sum(text.alone) for text in texts.values()), sum(text.revisions for text in texts.values())
    if offline == "keep":
        assert num_alone and not revisions
    elif offline == "correct":
        assert revisions
    elif far:
        assert sum(text.last.stats.edge.num_calls_ahead for text in texts.values())  # type: ignore[union-attr]
    await scene.assert_nothing_is_left()


def assert_follows(engine: Engine, request: Request, text: Text) -> None:
    """Where the server has written behind the drafter's own tokens, it has written what it would have behind these."""
    place = 0
    while place < len(text.tokens):
        if text.alone[place]:
            place += 1
            continue
        end = text.alone.index(True, place) if True in text.alone[place:] else len(text.tokens)
        if place:
            rest = replace(request, request_id=f"{request.request_id} from {place}", output_token_ids=tuple(text.tokens[:place]))
            (written,) = plainly(engine, [rest]).values()
            assert written.tokens[: end - place] == text.tokens[place:end]
        place = end
