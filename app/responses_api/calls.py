"""A call in an answer -> a function_call item and its events."""

from __future__ import annotations

from collections.abc import Iterator

from app.responses_api.bodies import FunctionToolCall, ItemStatus
from app.responses_api.events import ArgumentsDelta, ArgumentsDone, Event
from app.responses_api.item_writer import ItemWriter


class CallWriter(ItemWriter):
    """One call of the output."""

    def __init__(
        self, item_id: str, index: int, numbers: Iterator[int], call_id: str, name: str, namespace: str | None = None
    ) -> None:
        super().__init__(item_id, index, numbers)
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
        return [self._item_event("response.output_item.added", self.item("in_progress"))]

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
        return [done, self._item_event("response.output_item.done", self.item(status))]
