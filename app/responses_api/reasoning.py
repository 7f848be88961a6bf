"""What a model thinks -> a reasoning item and its events."""

from __future__ import annotations

from collections.abc import Iterator

from app.responses_api.bodies import ItemStatus, Reasoning, ReasoningText
from app.responses_api.events import Event, ReasoningDelta, ReasoningDone
from app.responses_api.item_writer import PART, ItemWriter


class ReasoningWriter(ItemWriter):
    """The thoughts before an answer."""

    def __init__(self, item_id: str, index: int, numbers: Iterator[int]) -> None:
        super().__init__(item_id, index, numbers)
        self._texts: list[str] = []

    def item(self, status: ItemStatus) -> Reasoning:
        """The thoughts as they stand."""
        content = [self._part()] if self._texts else []
        return Reasoning(id=self._id, type="reasoning", status=status, summary=[], content=content)

    def begin(self) -> list[Event]:
        """The item and its part appear, both empty."""
        added = self._item_event("response.output_item.added", self.item("in_progress"))
        return [added, self._part_event("response.content_part.added", self._part())]

    def text(self, text: str) -> list[Event]:
        """More thoughts."""
        self._texts.append(text)
        delta = ReasoningDelta(
            type="response.reasoning_text.delta",
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            content_index=PART,
            delta=text,
        )
        return [delta]

    def finish(self, status: ItemStatus) -> list[Event]:
        """Text, part and item are complete."""
        done = ReasoningDone(
            type="response.reasoning_text.done",
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            content_index=PART,
            text="".join(self._texts),
        )
        part_done = self._part_event("response.content_part.done", self._part())
        return [done, part_done, self._item_event("response.output_item.done", self.item(status))]

    def _part(self) -> ReasoningText:
        return ReasoningText(type="reasoning_text", text="".join(self._texts))
