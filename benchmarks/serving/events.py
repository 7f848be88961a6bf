"""What a stream of server-sent events says, and when: read as it comes, and no more of it than is measured."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import xxhash

_DATA, _DONE = b"data:", b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def said(self) -> bytes:
        if self.delta is None:
            return (self.text or "").encode()
        delta = self.delta
        calls = b"" if bytes(delta.tool_calls) in (b"null", b"[]") else bytes(delta.tool_calls)
        return (delta.content or delta.reasoning_content or delta.reasoning or "").encode() + calls


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens, as OpenAI counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt; 0 where the server does not tell."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class Speculation(msgspec.Struct):
    """What our servers tell of an answer: verifications that carried a draft, tokens that they accepted, passes of the target."""

    num_spec_steps: int = 0
    num_accepted_draft_tokens: int = 0
    num_target_calls: int = 0


class _Metrics(msgspec.Struct):
    speculative_decoding: Speculation | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    metrics: _Metrics | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


class EventReader:
    """One answer's stream.

    ``first`` is when its first text came (None: there was none), ``last`` when its last text or its end was told, ``gaps`` the
    seconds between texts, and ``text`` a hash of them all. Raises nothing: ``error`` says what is wrong.
    """

    _decode = msgspec.json.Decoder(_Chunk).decode

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.gaps: list[float] = []
        self.usage: Usage | None = None
        self.speculation: Speculation | None = None
        self.error: str | None = None
        self._finished = False
        self._hash = xxhash.xxh3_64()
        self._begun = b""
        self._said_at = 0.0

    @property
    def text(self) -> str:
        """Hash of all that was said."""
        return self._hash.hexdigest()

    def feed(self, now: float, data: bytes) -> None:
        """Take what came ``now``; an event that is not whole yet comes when its rest does."""
        for line in self._lines(data):
            if not line.startswith(_DATA):
                continue
            event = line[len(_DATA) :].strip()
            if event == _DONE:
                self._finished = True
                continue
            try:
                self._take(now, self._decode(event))
            except msgspec.MsgspecError as error:
                self.error = self.error or f"an event that cannot be read: {error}"

    def end(self) -> str | None:
        """The stream is over: what is wrong with it, if anything is."""
        if self.error is None:
            if not self._finished or self.last is None:
                self.error = "the stream broke off" if self.last is not None else "the answer is no stream of events"
            elif self.usage is None:
                self.error = "the answer came without usage: the server must know stream_options.include_usage"
        return self.error

    def _lines(self, data: bytes) -> Iterator[bytes]:
        *whole, self._begun = (self._begun + data).split(b"\n")
        yield from whole

    def _take(self, now: float, chunk: _Chunk) -> None:
        if bytes(chunk.error) not in (b"", b"null"):
            self.error = self.error or bytes(chunk.error).decode(errors="replace")
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.metrics is not None and chunk.metrics.speculative_decoding is not None:
            self.speculation = chunk.metrics.speculative_decoding
        for choice in chunk.choices:
            if said := choice.said:
                self._hash.update(said)
                if self.first is None:
                    self.first = now
                else:
                    self.gaps.append(now - self._said_at)
                self._said_at = self.last = now
            if choice.finish_reason is not None:
                self._finished = True
                self.last = now
