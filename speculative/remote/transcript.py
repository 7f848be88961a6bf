"""What a session has written so far, to be told again from wherever an edge has lost it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from speculative.remote.frames import Logprob
from speculative.remote.packing import pack_tokens
from speculative.request import Request, RequestOutput, TokenLogprob


class Transcript:
    """Tokens, text, log-probabilities, and the memory that the edge may not have yet.

    ``tokens`` begin with the ``given`` ones that are read and not written. Text is counted from the output's first character, and
    known from ``text_first`` on. Memory is known from ``memory_first`` up to ``memory_end``, in rows of ``row_bytes``.
    """

    def __init__(self, request: Request, row_bytes: int) -> None:
        self.tokens = list(request.given_token_ids)
        self.given = len(self.tokens)
        self.text_first = self.text_end = request.text_length
        self.memory_first: int | None = None
        self.memory_end = 0
        self._memory_begin = 0
        self._row_bytes = row_bytes
        self._text: list[str] = []
        self._logprobs: list[Logprob] | None = [] if request.params.logprobs is not None else None
        self._prompt_logprobs: list[Logprob] = []
        self._rows = bytearray()
        self._newest = b""

    def add(self, output: RequestOutput) -> None:
        """Take note of a step's gain."""
        self.tokens += output.new_token_ids
        if output.text_delta:
            self._text.append(output.text_delta)
            self.text_end += len(output.text_delta)
        if self._logprobs is not None and output.logprobs:
            self._logprobs += logprobs(output.logprobs)
        if output.prompt_logprobs:
            self._prompt_logprobs += logprobs(output.prompt_logprobs)
        if output.finish_reason is not None:
            self._rows.clear()  # nobody drafts any more
            self.memory_first, self._newest = None, b""
        elif (memory := output.memory) is not None:
            if self.memory_first is None:
                self.memory_first = self._memory_begin = memory.first
            self._rows += memory.rows
            self._newest = memory.newest
            self.memory_end = self.memory_first + len(self._rows) // self._row_bytes

    def forget_memory(self, until: int) -> None:
        """The edge has memory up to that position."""
        first = self.memory_first
        if first is not None and first < until <= self.memory_end:
            del self._rows[: (until - first) * self._row_bytes]
            self.memory_first = until

    def missing(self, length: int, text_length: int, memory_from: int) -> str | None:
        """Why it cannot be told from there on; None if it can."""
        if length > len(self.tokens):
            return f"the text has {len(self.tokens)} tokens, not {length}"
        if text_length > self.text_end:
            return f"the text has {self.text_end} characters, not {text_length}"
        if length < self.given or text_length < self.text_first:
            return f"what is known begins at token {self.given} and character {self.text_first}"
        if self.memory_first is not None and memory_from < self.memory_first != self._memory_begin:
            return f"memory is known from position {self.memory_first} on"
        return None

    def since(self, length: int, text_length: int, memory_from: int) -> dict[str, Any]:
        """The fields of a result that tells what follows there."""
        text = "".join(self._text)
        told: dict[str, Any] = {
            "first": length,
            "tokens": pack_tokens(self.tokens[length:]),
            "text_delta": text[text_length - self.text_first :],
        }
        if self._logprobs is not None:
            told["logprobs"] = tuple(self._logprobs[length - self.given :])
        if length == self.given and self._prompt_logprobs:
            told["prompt_logprobs"] = tuple(self._prompt_logprobs)
        if self.memory_first is not None and memory_from < self.memory_end:
            first = max(memory_from, self.memory_first)
            rows = bytes(self._rows[(first - self.memory_first) * self._row_bytes :])
            told |= {"memory_first": first, "memory": rows, "newest": self._newest}
        return told


def logprobs(told: Iterable[TokenLogprob]) -> tuple[Logprob, ...]:
    """As they stand in frames."""
    return tuple(Logprob(each.token_id, each.logprob, each.top) for each in told)
