"""ResponseStore: where responses are kept between requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was told, and the items that it answered, those of earlier turns included: nothing but JSON.

    ``continues``: it goes on with the last of these in the same breath, where that is an assistant's message.
    """

    document: dict[str, Any]
    items: list[dict[str, Any]]
    continues: bool = False


class ResponseStore(Protocol):
    """Keeps responses, each for its owner: what one owner has put, no other finds.

    It may forget whatever it likes, and a store that fails forgets: it raises nothing, as no answer is to be lost with it.
    """

    async def put(self, owner: str, response_id: str, stored: StoredResponse, lease: float | None = None) -> None:
        """Keep a response, in place of what was kept under this id.

        With a ``lease`` a store that outlives this server keeps it for at most so many seconds: for what is only true while
        this server works at it.
        """

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response, if it is there."""

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; False if it was not there."""
