"""A call in an answer -> a function_call item and its events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from app.responses_api.bodies import FunctionToolCall, ItemStatus
from app.responses_api.events import ArgumentsDelta, ArgumentsDone, Event, ItemEvent


class CallWriter:
    """One call of the output, at ``index`` in it; ``numbers`` count the events of the whole stream."""

    def __init__(
        self, item_id: str, index: int, numbers: Iterator[int], call_id: str, name: str, namespace: str | None = None
    ) -> None:
        self._id, self._index, self._numbers = item_id, index, numbers
        self._call_id, self._name, self._namespace = call_id, name, namespace
        self._arguments: list[str] = []

    def item(self, status: ItemStatus) -> FunctionToolCall:
        """The call as it stands."""
        call = FunctionToolCall(
            id=self._id,
            type="function_call",
            status=status,
            call_id=self._call_id,
            name=self._name,
            arguments="".join(self._arguments),
        )
        if self._namespace is not None:
            call.namespace = self._namespace
        return call

    def begin(self) -> list[Event]:
        """The call appears, without arguments."""
        return [self._item_event("response.output_item.added", "in_progress")]

    def arguments(self, text: str) -> list[Event]:
        """More of the arguments' text."""
        self._arguments.append(text)
        delta = ArgumentsDelta(
            type="response.function_call_arguments.delta",
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            delta=text,
        )
        return [delta]

    def finish(self, status: ItemStatus) -> list[Event]:
        """Arguments and call are complete."""
        done = ArgumentsDone(
            type="response.function_call_arguments.done",
            sequence_number=next(self._numbers),
            item_id=self._id,
            output_index=self._index,
            name=self._name,
            arguments="".join(self._arguments),
        )
        return [done, self._item_event("response.output_item.done", status)]

    def _item_event(
        self, kind: Literal["response.output_item.added", "response.output_item.done"], status: ItemStatus
    ) -> ItemEvent:
        return ItemEvent(type=kind, sequence_number=next(self._numbers), output_index=self._index, item=self.item(status))
