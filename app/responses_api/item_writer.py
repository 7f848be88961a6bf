"""What the writers of all items share: their place in the output, and the events in which they come and end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final, Literal

from app.responses_api.bodies import ItemStatus, OutputItem, OutputText, ReasoningText
from app.responses_api.events import ItemEvent, PartEvent

PART: Final = 0
"""Items of text have one part."""


class ItemWriter(ABC):
    """One item of the output, at ``index`` in it; ``numbers`` count the events of the whole stream."""

    def __init__(self, item_id: str, index: int, numbers: Iterator[int]) -> None:
        self._id, self._index, self._numbers = item_id, index, numbers

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it stands."""

    def _item_event(self, kind: Literal["response.output_item.added", "response.output_item.done"], item: OutputItem) -> ItemEvent:
        return ItemEvent(type=kind, sequence_number=next(self._numbers), output_index=self._index, item=item)

    def _part_event(
        self, kind: Literal["response.content_part.added", "response.content_part.done"], part: OutputText | ReasoningText
    ) -> PartEvent:
        return PartEvent(
            type=kind,
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            content_index=PART,
            part=part,
        )
