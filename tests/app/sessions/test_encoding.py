"""Responses as JSON: whole, read off the event loop where they are large, and nothing else taken for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from app.sessions.encoding import decode, decode_foreign, encode, is_larger
from app.sessions.memory import MemoryStore
from app.sessions.store import StoredResponse
from tests.app.sessions.stored import response

USER: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "ü\ud800\0"}]}
SAID: dict[str, Any] = {"id": "msg_2", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}
CALL: dict[str, Any] = {"id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"}
GAVE: dict[str, Any] = {"id": "fco_1", "type": "function_call_output", "call_id": "c", "output": "fine", "name": "f"}
THOUGHT: dict[str, Any] = {"id": "rs_1", "type": "reasoning", "summary": [{}], "encrypted_content": "x"}
EVERY = [USER, SAID, CALL, GAVE, THOUGHT]
WHOLE = response(*EVERY, output=[SAID, CALL])
LARGE = THOUGHT | {"encrypted_content": "x" * 2**19}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done in a thread of its own."""
    done: list[str] = []
    to_thread = asyncio.to_thread

    async def noted(work: Callable[[], Any]) -> Any:
        done.append("work")
        return await to_thread(work)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    return done


@pytest.mark.parametrize(
    "stored", [response(), response(id="a"), WHOLE, StoredResponse(WHOLE.document, EVERY, continues=True), response(LARGE)]
)
async def test_it_is_one_json_list_and_read_as_it_was(stored: StoredResponse) -> None:
    data = await encode(stored)
    assert json.loads(data) == [stored.document, stored.items, stored.continues]
    assert await decode(data) == await decode_foreign(data) == stored


async def test_what_was_kept_before_it_was_noted_whether_it_goes_on_is_read_too() -> None:
    assert await decode_foreign(json.dumps([WHOLE.document, EVERY]).encode()) == WHOLE


@pytest.mark.parametrize(
    "large",
    [
        response(LARGE),
        response(instructions="x" * 2**19),
        response(*[USER] * 4000),
        response(THOUGHT | {"summary": [{} for _ in range(20_000)]}),
        response(THOUGHT | {"summary": [{"x" * 2**19: 1}]}),
    ],
)
async def test_large_ones_leave_the_event_loop_to_others(large: StoredResponse, threads: list[str]) -> None:
    store = MemoryStore(10, 2**24, 60)
    await store.put("", "small", WHOLE)
    assert await store.get("", "small") == WHOLE
    assert threads == []
    await store.put("", "large", large)
    assert len(threads) == 1
    data = await encode(large)
    if len(data) > 2**18:
        threads.clear()
        assert await store.get("", "large") == large
        assert len(threads) == 1


async def test_larger_is_what_takes_more_bytes() -> None:
    size = sum(len(json.dumps(item)) for item in EVERY)
    assert not await is_larger(EVERY, size)
    assert await is_larger(EVERY, size - 1)
    assert not await is_larger([], 0)
    assert await is_larger([{"id": "\N{GRINNING FACE}" * 100}], 1200)
    assert await is_larger([{"id": 10**4000}] * 10, 40_000)


async def test_no_more_is_written_than_it_takes_to_know_what_is_larger(threads: list[str]) -> None:
    unwritable = {"id": object()}
    assert await is_larger([LARGE, unwritable], 2**19)
    assert len(threads) == 1


@pytest.mark.parametrize(
    "foreign",
    [
        [{}, []],
        {"a": 1},
        {},
        [],
        None,
        "text",
        [WHOLE.document],
        [WHOLE.document, EVERY, 1],
        [WHOLE.document, EVERY, False, False],
        [WHOLE.document, {}],
        [[WHOLE.document], EVERY],
        *([{**WHOLE.document, name: value}, EVERY] for name in ("status", "background", "output") for value in (None, 1, {})),
        *([WHOLE.document | {"output": [item]}, []] for item in (None, {}, SAID | {"content": []})),
        *([WHOLE.document, [item]] for item in (None, [], {}, {"id": "a"}, {"id": "a", "type": "image"}, {"type": "reasoning"})),
        *([WHOLE.document, [{**item, name: 1}]] for item in EVERY for name in ("id", "type")),
        *([WHOLE.document, [USER | {"content": content}]] for content in ("Hi", [], ["Hi"], [{}], [{"text": None}])),
        *([WHOLE.document, [USER | {"role": role}]] for role in ("tool", None)),
        *([WHOLE.document, [CALL | {name: 1}]] for name in ("call_id", "name", "arguments", "namespace")),
        *([WHOLE.document, [GAVE | {name: 1}]] for name in ("call_id", "name", "output")),
    ],
)
async def test_json_of_another_shape_is_no_response(foreign: Any) -> None:
    assert await decode_foreign(json.dumps(foreign).encode()) is None


@pytest.mark.parametrize("foreign", [b"", b"[", b"[{}", b"[{}, [}", b"not JSON", b"[\xff]", b"[" * 100_000, b"[1] 2", b"\0\1"])
async def test_what_is_no_json_is_no_response(foreign: bytes) -> None:
    assert await decode_foreign(foreign) is None
