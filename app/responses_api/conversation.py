"""What a response answers: the conversation of an earlier response, and what the caller says now."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from app.errors import InvalidParameterError, NotFoundError
from app.responses_api.bodies import RUNNING
from app.responses_api.items import Item, ItemReference, kept, own_id, response_of
from app.responses_api.schemas import ResponseRequest
from app.sessions.encoding import is_larger
from app.sessions.store import ResponseStore, StoredResponse

MOST_BYTES: Final = 16 * 2**20
"""Of a conversation that is kept, as JSON: what a request's body may have by default. Each turn keeps all of those before."""


async def conversation(store: ResponseStore, owner: str, body: ResponseRequest, response_id: str) -> list[Item]:
    """All items that response ``response_id`` is to answer, the oldest first.

    Raises InvalidParameterError for a previous response that is not there and where they are too much to be kept, as the
    request wants, and NotFoundError for an item that is not there.
    """
    items = await _previous(store, owner, body.previous_response_id) if body.previous_response_id is not None else []
    known = {item["id"]: item for item in items}
    wanted = {given.id for given in body.input or () if isinstance(given, ItemReference)} - known.keys()
    elsewhere = await _referenced(store, owner, wanted)
    for place, given in enumerate(body.input or ()):
        if isinstance(given, ItemReference):
            found = known.get(given.id) or elsewhere.get(given.id)
            if found is None:
                message = f"Item with id '{given.id}' not found. Items are not kept when store is false."
                raise NotFoundError(message, code="item_not_found", param=f"input[{place}].id")
            item = found
        else:
            item = kept(given, response_id, place)
        if item["id"] in known:  # said again: pages of items need ids that differ
            item = item | {"id": own_id(item["type"], response_id, place)}
        known[item["id"]] = item
        items.append(item)
    if body.store is not False and await is_larger(items, MOST_BYTES):
        raise InvalidParameterError(
            f"The conversation has more than the {MOST_BYTES} bytes that are kept of one, earlier turns included. "
            "Begin a new one with less input, or send 'store': false.",
            param="input" if body.previous_response_id is None else "previous_response_id",
            code="conversation_too_large",
        )
    return items


async def _previous(store: ResponseStore, owner: str, response_id: str) -> list[Item]:
    """A response's conversation with its own output."""
    param = "previous_response_id"
    if (stored := await store.get(owner, response_id)) is None:
        message = f"Previous response with id '{response_id}' not found."
        raise InvalidParameterError(message, param=param, code="previous_response_not_found")
    if stored.document["status"] in RUNNING:
        raise InvalidParameterError(f"Previous response with id '{response_id}' is not complete yet.", param=param)
    return _whole(stored)


async def _referenced(store: ResponseStore, owner: str, item_ids: Set[str]) -> dict[str, Item]:
    """Those of the items that are in stored responses, each of which is read once, however many of its items are wanted."""
    found: dict[str, Item] = {}
    for response_id, own_ids in _by_response(item_ids).items():
        if (stored := await store.get(owner, response_id)) is not None:
            found |= {item["id"]: item for item in _whole(stored) if item["id"] in own_ids}
    return found


def _by_response(item_ids: Set[str]) -> dict[str, set[str]]:
    grouped: dict[str, set[str]] = {}
    for item_id in item_ids:
        if (response_id := response_of(item_id)) is not None:
            grouped.setdefault(response_id, set()).add(item_id)
    return grouped


def _whole(stored: StoredResponse) -> list[Item]:
    """A conversation with the response at its end: of an assistant's message and its continuation the message that they are."""
    items, output = list(stored.items), list(stored.document["output"])
    told = [place for place, item in enumerate(items) if item["type"] != "reasoning"]  # the model goes on with the last of these
    goes_on = stored.continues and told and output and output[0]["type"] == "message"
    if goes_on and items[told[-1]].get("role") == "assistant":  # what others said, or a function gave, stays theirs
        begun, (part, *parts) = items.pop(told[-1]), output[0]["content"]
        text = "".join(each["text"] for each in begun["content"]) + part["text"]
        output[0] = output[0] | {"content": [part | {"text": text}, *parts]}
    return [*items, *output]
