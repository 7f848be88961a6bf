"""A request's outputs -> the events of its response, and the response as it stands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Literal

from app.chat import content_logprob
from app.errors import to_api_error
from app.generation import finish_reason
from app.responses import ContentLogprob, EdgeNote
from app.responses_api.bodies import (
    IncompleteDetails,
    ItemStatus,
    OutputItem,
    ResponseBody,
    ResponseError,
    ResponseUsage,
    Status,
)
from app.responses_api.calls import CallWriter
from app.responses_api.events import ArgumentsDelta, Event, ResponseEvent, TextDelta
from app.responses_api.items import item_id
from app.responses_api.message import MessageWriter
from app.responses_api.reasoning import ReasoningWriter
from app.thoughts import Thought
from app.tokens import TokenTexts
from app.tools.parsing import CallDelta
from app.tools.pieces import Pieces
from app.tools.splitting import Split, Splitter
from app.usage import ResponseMetrics
from speculative.request import RequestOutput, Written

Ending = Literal["response.completed", "response.incomplete", "response.failed"]


class ResponseWriter:
    """Words one response.

    ``tokens`` are given where log-probabilities are asked for, ``pieces`` splits the answer, and ``namespaces`` (with the names
    there) are of those tools that the model calls by another name. A response that does not stream is told from the same events, so
    that it cannot differ from one that does.
    """

    def __init__(
        self,
        response: ResponseBody,
        tokens: TokenTexts | None,
        pieces: Pieces,
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        self.response, self._namespaces = response, namespaces
        self._tokens, self._splitter = tokens, Splitter(pieces, ordered=True)
        self._numbers = count()
        self._answering = False
        self._untold: list[ContentLogprob] = []
        self._done: list[OutputItem] = []
        self._open: MessageWriter | CallWriter | ReasoningWriter | None = None

    def begin(self) -> list[Event]:
        """The response is there, and being worked at."""
        self._become("in_progress")
        created = ResponseEvent(type="response.created", sequence_number=next(self._numbers), response=self.response)
        running = ResponseEvent(type="response.in_progress", sequence_number=next(self._numbers), response=self.response)
        return [created, running]

    def step(self, output: RequestOutput) -> list[Event]:
        """What an output adds; the last one ends the response."""
        events: list[Event] = []
        split = self._splitter.feed(output)
        logprobs = self._logprobs(output)
        pieces, note = split.pieces, None
        if output.written is not None:
            note = self._note(output.written, split)
        if (logprobs or (note is not None and note.replace_from is not None)) and not (pieces and isinstance(pieces[0], str)):
            pieces = ["", *pieces]  # of tokens that are no whole text yet, or in whose place there is none
        for piece in pieces:
            match piece:
                case str():
                    events += self._text(piece, logprobs)
                case Thought():
                    events += self._thought(piece)
                case CallDelta():
                    events += self._call(piece)
        if note is not None:
            _annotate(events, note)
        if output.finish_reason is not None:
            events += self._finish(output)
        return events

    def _logprobs(self, output: RequestOutput) -> list[ContentLogprob]:
        """Those of the answer's tokens, once it has begun: of thoughts there are none."""
        if self._tokens is None:
            return []
        self._untold += [content_logprob(self._tokens, each) for each in output.logprobs or ()]
        if not self._splitter.answering:
            return []
        told = self._untold if self._answering else self._untold[output.stats.num_reasoning_tokens :]
        self._answering, self._untold = True, []
        return told

    def _note(self, written: Written, split: Split) -> EdgeNote | None:
        """What is said of what an edge writes; what it takes back is always of the message that is being written."""
        if written.offline:
            return EdgeNote(offline=True)
        message = self._open
        if not isinstance(message, MessageWriter) or not (split.dropped or self._tokens):
            return None
        stands = message.num_characters - split.dropped
        message.cut(stands, written.first_token)
        return EdgeNote.of(written, stands, written.first_token)

    def fail(self, error: Exception) -> list[Event]:
        """It ends by an error, with what there is."""
        known = to_api_error(error)
        code: Literal["server_error", "rate_limit_exceeded"] = "rate_limit_exceeded" if known.status == 429 else "server_error"
        self._become("failed", error=ResponseError(code=code, message=known.message), output=self._unfinished())
        return [self._end("response.failed")]

    def cancel(self) -> ResponseBody:
        """Its caller ends it; the response with what there is."""
        self._become("cancelled", output=self._unfinished())
        return self.response

    def _text(self, text: str, logprobs: list[ContentLogprob]) -> list[Event]:
        events: list[Event] = []
        message = self._open
        if not isinstance(message, MessageWriter):
            events += self._close("completed")
            message = self._open = self._message()
            events += message.begin()
        return events + message.text(text, logprobs)

    def _thought(self, thought: Thought) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, ReasoningWriter):
            self._open = ReasoningWriter(self._item_id("rs"), len(self._done), self._numbers)
            events += self._open.begin()
        return events + self._open.text(thought.text)

    def _call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.id is not None and delta.name is not None:
            events += self._close("completed")
            namespace, name = self._namespaces.get(delta.name, (None, delta.name))
            self._open = CallWriter(self._item_id("fc"), len(self._done), self._numbers, delta.id, name, namespace)
            events += self._open.begin()
        assert isinstance(self._open, CallWriter)  # a call goes on until the next begins
        return events + (self._open.arguments(delta.arguments) if delta.arguments else [])

    def _message(self) -> MessageWriter:
        return MessageWriter(self._item_id("msg"), len(self._done), self._numbers)

    def _item_id(self, kind: str) -> str:
        return item_id(kind, self.response.id, str(len(self._done)))

    def _close(self, status: ItemStatus) -> list[Event]:
        """End the item that is being written, if there is one."""
        if (item := self._open) is None:
            return []
        self._open = None
        self._done.append(item.item(status))
        return item.finish(status)

    def _finish(self, output: RequestOutput) -> list[Event]:
        complete = finish_reason(output) == "stop"
        status: Literal["completed", "incomplete"] = "completed" if complete else "incomplete"
        events: list[Event] = []
        if self._open is None:  # nothing was said: that is an empty message
            self._open = self._message()
            events += self._open.begin()
        events += self._close(status)
        self._become(
            status,
            completed_at=int(time.time()) if complete else None,
            incomplete_details=None if complete else IncompleteDetails(reason="max_output_tokens"),
            output=list(self._done),
            usage=ResponseUsage.of(output.stats),
            metrics=ResponseMetrics.of([output.stats]),
        )
        end = self._end("response.completed" if complete else "response.incomplete")
        if note := EdgeNote.of_end(output):
            end.edge = note
        return [*events, end]

    def _unfinished(self) -> list[OutputItem]:
        return [*self._done, self._open.item("incomplete")] if self._open else list(self._done)

    def _become(self, status: Status, **changes: Any) -> None:
        self.response = self.response.model_copy(update={"status": status, **changes})

    def _end(self, kind: Ending) -> ResponseEvent:
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), response=self.response)


def _annotate(events: Sequence[Event], note: EdgeNote) -> None:
    """Mark what was written alone, all of it, or the first that comes in the place of something else."""
    deltas = [event for event in events if isinstance(event, TextDelta | ArgumentsDelta)]
    for event in deltas if note.offline else deltas[:1]:
        event.edge = note
