"""What a model thinks -> a reasoning item and its events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from app.responses_api.bodies import ItemStatus, Reasoning, ReasoningText
from app.responses_api.events import Event, ItemEvent, PartEvent, ReasoningDelta, ReasoningDone

PART = 0  # it has one part


class ReasoningWriter:
    """The thoughts before an output, at ``index`` in it; ``numbers`` count the events of the whole stream."""

    def __init__(self, item_id: str, index: int, numbers: Iterator[int]) -> None:
        self._id, self._index, self._numbers = item_id, index, numbers
        self._texts: list[str] = []

    def item(self, status: ItemStatus) -> Reasoning:
        """The thoughts as they stand."""
        content = [self._part()] if self._texts else []
        return Reasoning(id=self._id, type="reasoning", status=status, summary=[], content=content)

    def begin(self) -> list[Event]:
        """The item and its part appear, both empty."""
        added = self._item_event("response.output_item.added", "in_progress")
        return [added, self._part_event("response.content_part.added")]

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
        part_done = self._part_event("response.content_part.done")
        return [done, part_done, self._item_event("response.output_item.done", status)]

    def _part(self) -> ReasoningText:
        return ReasoningText(type="reasoning_text", text="".join(self._texts))

    def _part_event(self, kind: Literal["response.content_part.added", "response.content_part.done"]) -> PartEvent:
        return PartEvent(
            type=kind,
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            content_index=PART,
            part=self._part(),
        )

    def _item_event(
        self, kind: Literal["response.output_item.added", "response.output_item.done"], status: ItemStatus
    ) -> ItemEvent:
        return ItemEvent(type=kind, sequence_number=next(self._numbers), output_index=self._index, item=self.item(status))
