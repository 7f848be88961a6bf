"""What a response answers: the conversation of an earlier response, and what the caller says now."""

from __future__ import annotations

from app.errors import InvalidParameterError, NotFoundError
from app.responses_api.bodies import RUNNING
from app.responses_api.items import Item, ItemReference, kept, own_id, response_of
from app.responses_api.schemas import ResponseRequest
from app.sessions.store import ResponseStore, StoredResponse


async def conversation(store: ResponseStore, owner: str, body: ResponseRequest, response_id: str) -> list[Item]:
    """All items that response ``response_id`` is to answer, the oldest first.

    Raises InvalidParameterError for a previous response that is not there, NotFoundError for such an item.
    """
    items = await _previous(store, owner, body.previous_response_id) if body.previous_response_id is not None else []
    known = {item["id"]: item for item in items}
    for place, given in enumerate(body.input or ()):
        if isinstance(given, ItemReference):
            item = known.get(given.id) or await _referenced(store, owner, given.id, place)
        else:
            item = kept(given, response_id, place)
        if item["id"] in known:  # said again: pages of items need ids that differ
            item = item | {"id": own_id(item["type"], response_id, place)}
        known[item["id"]] = item
        items.append(item)
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


async def _referenced(store: ResponseStore, owner: str, item_id: str, place: int) -> Item:
    response_id = response_of(item_id)
    stored = await store.get(owner, response_id) if response_id is not None else None
    for item in _whole(stored) if stored is not None else ():
        if item["id"] == item_id:
            return item
    message = f"Item with id '{item_id}' not found. Items are not kept when store is false."
    raise NotFoundError(message, code="item_not_found", param=f"input[{place}].id")


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
