"""The server's side of one connection: who may do what when, until either side has had enough."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from speculative.config import MemoryFormat
from speculative.errors import EngineError, ProtocolError
from speculative.remote.faults import error_frame, to_protocol_error
from speculative.remote.frames import Cancel, ClientFrame, Hello, Model, Open, Ping, Pong, Resume, Verify, Welcome
from speculative.remote.host import Generate
from speculative.remote.limits import Limits
from speculative.remote.line import Line
from speculative.remote.outgoing import Outgoing
from speculative.remote.packing import MOST_ROWS, pack_tokens, unpack_tokens
from speculative.remote.protocol import agree, decode_client, frame_name
from speculative.remote.registry import FLUSH_SECONDS, SessionRegistry
from speculative.remote.served import ServedSession
from speculative.request import Request

HELLO_SECONDS = 30.0
"""What a peer gets to introduce itself."""


class Verifier:
    """One connection of ``owner``, whose texts ``generate`` runs; ``run`` is called once."""

    def __init__(self, registry: SessionRegistry, generate: Generate, owner: str) -> None:
        self._registry, self._generate, self._owner = registry, generate, owner
        self._host = registry.host
        self._limits: Limits = self._host.limits
        self._format: MemoryFormat | None = None
        self._pair = ""
        self._row_bytes = 0
        self._sessions: dict[int, ServedSession] = {}
        self._used: set[int] = set()
        self._serving: asyncio.Task[None] | None = None

    async def run(self, receive: Callable[[], Awaitable[bytes | None]], send: Callable[[bytes], Awaitable[None]]) -> None:
        """Serve until ``receive`` gives None, the peer is told an error that ends the connection, or `stop` is called.

        ``send`` returns when there is room for more, and raises what it likes once the connection is lost.
        """
        observer = self._host.observer
        self._outgoing = Outgoing(send, lambda size: observer.carried("sent", size))
        writer = asyncio.create_task(self._outgoing.run())
        writer.add_done_callback(lambda _: self.stop())
        self._serving = asyncio.create_task(self._serve(receive))
        self._registry.connected(self)
        try:
            await asyncio.wait([self._serving])
        finally:
            self._serving.cancel()
            for session in list(self._sessions.values()):
                session.detach()
            self._sessions.clear()
            self._outgoing.finish()
            try:
                await asyncio.wait([writer], timeout=FLUSH_SECONDS)
            finally:  # who cancelled this may do so again
                writer.cancel()
                self._registry.disconnected(self)
            with suppress(asyncio.CancelledError, Exception):  # what ``send`` raised: the connection is lost
                await writer
        if not self._serving.cancelled():
            self._serving.result()

    def stop(self) -> None:
        """Send what there is, and end."""
        if self._serving is not None:
            self._serving.cancel()

    async def _serve(self, receive: Callable[[], Awaitable[bytes | None]]) -> None:
        loop = asyncio.get_running_loop()
        impatient = loop.call_later(HELLO_SECONDS, self._hello_is_due)
        try:
            while (data := await receive()) is not None:
                self._host.observer.carried("received", len(data))
                try:
                    self._take(decode_client(data, self._limits))
                except EngineError as error:
                    if not self._tell(to_protocol_error(error)):
                        return
                if not self._outgoing.has_room:
                    await self._outgoing.room()
        finally:
            impatient.cancel()

    def _hello_is_due(self) -> None:
        if self._format is None:
            self._tell(ProtocolError("out_of_order", "a connection begins with hello"))
            self.stop()

    def _take(self, frame: ClientFrame) -> None:
        """Do what a frame says; raises EngineError where that cannot be."""
        if isinstance(frame, Ping):
            self._outgoing.put_urgent(Pong(frame.number))
        elif isinstance(frame, Hello):
            self._welcome(frame)
        elif self._format is None:
            raise ProtocolError("out_of_order", f"{frame_name(type(frame))}: a connection begins with hello")
        elif isinstance(frame, Verify):
            if (session := self._session(frame)) is not None:
                session.verify(frame)
        elif isinstance(frame, Open):
            self._open(frame, self._format)
        elif isinstance(frame, Resume):
            self._resume(frame)
        elif (session := self._session(frame)) is not None:
            session.cancel()

    def _tell(self, error: ProtocolError) -> bool:
        """Tell the peer of a fault; False where it ends the connection."""
        number, step = error.session, error.step
        self._host.observer.refused(error.code)
        if number is None:
            self._outgoing.put(error_frame(error, None))
        elif step is not None:
            self._outgoing.put(error_frame(error, number, step))
        elif (session := self._sessions.get(number)) is not None:
            session.abandon(error)
        else:
            self._outgoing.put(error_frame(error, number))
        return number is not None

    def _welcome(self, frame: Hello) -> None:
        if self._format is not None:
            raise ProtocolError("out_of_order", "hello: once is enough")
        host = self._host
        self._registry.check_open(None)
        info, remote = host.engine.info, host.engine.remote
        if not remote.memory_bytes:
            raise ProtocolError(
                "unsupported_format",
                f"this server's drafter ({info.drafter}) has no memory to send: start it with a MoA drafter of N = 0 (--drafter)",
            )
        version, self._format = agree(frame, info.pair)
        self._pair = info.pair
        self._row_bytes, newest_bytes = remote.memory_bytes[self._format]
        self._limits = replace(
            self._limits,
            tree_nodes=max(1, min(remote.tree_nodes, MOST_ROWS)),
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            row_bytes=self._row_bytes,
            newest_bytes=newest_bytes,
        )
        self._outgoing.agreed(frame, self._row_bytes)
        ends = pack_tokens(remote.eos_token_ids)
        model = Model(host.model_name()[:256], info.max_model_len, info.vocab_size, ends, self._row_bytes, newest_bytes)
        self._outgoing.put(Welcome(version, self._format, self._limits.told(host.idle_seconds), model))

    def _open(self, frame: Open, format: MemoryFormat) -> None:
        self._check_free(frame)
        self._check_pair(frame.session)
        params = frame.sampling.params()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(
            f"session-{secrets.token_hex(12)}",
            tuple(unpack_tokens(frame.prompt)),
            replace(params, seed=seed),
            frame.priority,
            tuple(unpack_tokens(frame.prediction)),
            frame.cache_salt,
            remote=True,
            memory=format if params.speculative else None,
            memory_from=frame.memory_from if params.speculative else 0,
            output_token_ids=tuple(unpack_tokens(frame.output)),
            text_length=frame.text_length,
        )
        line = self._line(frame.session)
        session = self._registry.open(request, seed, self._row_bytes, self._owner, line, self._generate)
        self._sessions[frame.session] = session

    def _resume(self, frame: Resume) -> None:
        self._check_free(frame)
        session = self._registry.find(frame.resume_token, self._owner)
        if session is None:
            message = "no session has this token here: it is too old, another key's or another server's; open anew"
            raise ProtocolError("cannot_resume", message, session=frame.session)
        session.resume(self._line(frame.session), frame)
        self._sessions[frame.session] = session

    def _check_free(self, frame: Open | Resume) -> None:
        if frame.session in self._sessions:
            message = f"{frame_name(type(frame))}: session {frame.session} is taken: cancel it first, or use another number"
            raise ProtocolError("session_in_use", message, session=frame.session)
        self._used.add(frame.session)

    def _check_pair(self, number: int) -> None:
        """Replicas may have given way to others since the greeting, and memory means something to one drafter alone."""
        self._registry.check_open(number)  # while there is no model, there is no pair to ask for
        if self._host.engine.info.pair != self._pair:
            message = "this server runs another target or drafter by now: export the bundle from it anew"
            raise ProtocolError("wrong_model", message, session=number)

    def _line(self, number: int) -> Line:
        return Line(number, self._outgoing, self._release)

    def _release(self, number: int) -> None:
        self._sessions.pop(number, None)

    def _session(self, frame: Verify | Cancel) -> ServedSession | None:
        """The session that a frame speaks of; None for one that has just ended, which its edge may not have known."""
        session = self._sessions.get(frame.session)
        if session is None and frame.session not in self._used:
            name, step = frame_name(type(frame)), frame.step if isinstance(frame, Verify) else None
            message = f"{name}: session {frame.session} was never opened on this connection"
            raise ProtocolError("unknown_session", message, session=frame.session, step=step)
        return session
