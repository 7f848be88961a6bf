"""Text of an answer -> a message item and its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.responses import ContentLogprob
from app.responses_api.bodies import ItemStatus, OutputMessage, OutputText
from app.responses_api.events import Event, TextDelta, TextDone
from app.responses_api.item_writer import PART, ItemWriter


class MessageWriter(ItemWriter):
    """One message of the output."""

    def __init__(self, item_id: str, index: int, numbers: Iterator[int]) -> None:
        super().__init__(item_id, index, numbers)
        self._texts: list[str] = []
        self._logprobs: list[ContentLogprob] = []
        self.num_characters = 0

    def item(self, status: ItemStatus) -> OutputMessage:
        """The message as it stands."""
        return OutputMessage(id=self._id, type="message", status=status, role="assistant", content=[self._part()])

    def begin(self) -> list[Event]:
        """The message and its part appear, both empty."""
        empty = OutputMessage(id=self._id, type="message", status="in_progress", role="assistant", content=[])
        added = self._item_event("response.output_item.added", empty)
        return [added, self._part_event("response.content_part.added", self._part())]

    def text(self, text: str, logprobs: Sequence[ContentLogprob]) -> list[Event]:
        """More text."""
        self.num_characters += len(text)
        self._texts.append(text)
        self._logprobs += logprobs
        delta = TextDelta(
            type="response.output_text.delta",
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            content_index=PART,
            delta=text,
            logprobs=list(logprobs),
        )
        return [delta]

    def cut(self, num_characters: int, num_logprobs: int) -> None:
        """Take back all text and log-probabilities but so many of the first."""
        self._texts = ["".join(self._texts)[:num_characters]]
        self.num_characters = len(self._texts[0])
        del self._logprobs[num_logprobs:]

    def finish(self, status: ItemStatus) -> list[Event]:
        """Text, part and message are complete."""
        part = self._part()
        done = TextDone(
            type="response.output_text.done",
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            content_index=PART,
            text=part.text,
            logprobs=part.logprobs,
        )
        part_done = self._part_event("response.content_part.done", part)
        return [done, part_done, self._item_event("response.output_item.done", self.item(status))]

    def _part(self) -> OutputText:
        return OutputText(type="output_text", text="".join(self._texts), annotations=[], logprobs=list(self._logprobs))
