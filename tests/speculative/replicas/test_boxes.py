"""How messages travel: gathered where they can wait, and each to its own text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from speculative.errors import ReplicaLostError
from speculative.replicas.inboxes import Inboxes
from speculative.replicas.messages import Told
from speculative.replicas.outboxes import Outboxes
from speculative.request import RequestOutput, RequestStats

FOR_EVER = 3600.0


def told(request_id: str, token: int, *, can_wait: bool = True, last: bool = False, replica: str = "a") -> Told:
    output = RequestOutput(request_id, (token,), "x", "length" if last else None, RequestStats())
    return Told(request_id, replica, 0.0, output, can_wait=can_wait and not last)


def tokens(messages: tuple[Told, ...]) -> list[int]:
    return [message.output.new_token_ids[0] for message in messages if message.output is not None]


async def test_what_can_wait_leaves_with_what_cannot() -> None:
    boxes = Outboxes(gather_s=FOR_EVER)
    async with aclosing(boxes.listen("ingress")) as gathered:
        assert await anext(gathered) == ()
        for message in (told("x", 1), told("y", 2), told("x", 3, last=True)):
            boxes.put("ingress", message)
        assert tokens(await anext(gathered)) == [1, 2, 3]
        boxes.put("ingress", told("z", 4, can_wait=False))
        assert tokens(await anext(gathered)) == [4]


async def test_what_can_wait_leaves_alone_in_the_end() -> None:
    boxes = Outboxes(gather_s=0.001)
    async with aclosing(boxes.listen("ingress")) as gathered:
        await anext(gathered)
        boxes.put("ingress", told("x", 1))
        assert tokens(await asyncio.wait_for(anext(gathered), 30)) == [1]


async def test_messages_wait_for_an_ingress_that_comes_to_listen() -> None:
    boxes = Outboxes(gather_s=0)
    boxes.put("ingress", told("x", 1))
    boxes.put("other", told("y", 2))
    async with aclosing(boxes.listen("ingress")) as gathered:
        assert await anext(gathered) == ()
        assert tokens(await anext(gathered)) == [1]


async def test_one_that_listens_again_takes_over() -> None:
    boxes = Outboxes(gather_s=FOR_EVER)
    async with aclosing(boxes.listen("ingress")) as before, aclosing(boxes.listen("ingress")) as now:
        await anext(before)
        waiting = asyncio.create_task(_next(before))
        await asyncio.sleep(0)
        boxes.put("ingress", told("x", 1))
        assert await anext(now) == ()
        boxes.put("ingress", told("x", 2, last=True))
        assert tokens(await anext(now)) == [1, 2], "nothing was told to the one before that only this one is to hear"
        assert await waiting is None, "and that one ends"


async def test_boxes_go_with_those_who_listen() -> None:
    boxes = Outboxes(gather_s=0, keep_s=-1.0)
    async with aclosing(boxes.listen("ingress")) as gathered:
        await anext(gathered)
        boxes.put("gone", told("x", 1))
        boxes.put("gone too", told("x", 1))
        assert len(boxes) == 2, "what nobody has come for makes room for others"
    boxes.put("another", told("x", 1))
    assert len(boxes) == 1


async def _next(messages: AsyncGenerator[tuple[Told, ...], None]) -> tuple[Told, ...] | None:
    async for each in messages:
        return each
    return None


async def test_each_text_gets_its_own_messages_until_its_end() -> None:
    inboxes = Inboxes()
    with inboxes.opened("x") as x, inboxes.opened("y") as y:
        inboxes.deal((told("x", 1), told("y", 2, replica="b"), told("z", 9), told("x", 3, last=True), told("x", 4)))
        assert tokens(tuple([message async for message in x.messages()])) == [1, 3]
        assert x.has_ended.is_set() and not y.has_ended.is_set()
        inboxes.lost("b")
        heard = []
        with pytest.raises(ReplicaLostError):
            async for message in y.messages():
                heard.append(message)
        assert tokens(tuple(heard)) == [2], "what was said before comes first"


async def test_a_replica_is_listened_to_while_a_text_may_be_there() -> None:
    inboxes = Inboxes()
    with inboxes.opened("x") as x:
        assert inboxes.expect("a", since=x.began + 1.0), "it may have been sent there before"
        assert not inboxes.expect("a", since=x.began - 1.0), "it was not: Serve knew before"
        inboxes.deal((told("x", 1, replica="b"),))
        assert not inboxes.expect("a", since=x.began + 1.0) and inboxes.expect("b", since=x.began - 1.0)
    assert not inboxes.expect("b", since=x.began + 1.0)


async def test_one_text_can_fail_alone() -> None:
    inboxes = Inboxes()
    with inboxes.opened("x") as x, inboxes.opened("y") as y:
        inboxes.deal((told("x", 1), told("y", 2, last=True)))
        inboxes.fail("x", ReplicaLostError("gone", "a"))
        inboxes.fail("nobody", ReplicaLostError("gone", "a"))
        heard = []
        with pytest.raises(ReplicaLostError):
            async for message in x.messages():
                heard.append(message)
        assert tokens(tuple(heard)) == [1], "what was said before comes first"
        assert tokens(tuple([message async for message in y.messages()])) == [2]
