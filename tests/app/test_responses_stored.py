"""What is kept of responses: turns of a conversation, look-ups, and the store."""

import asyncio
from typing import Any

import httpx
import pytest

from app.responses_api import conversation
from app.sessions.memory import MemoryStore
from app.sessions.store import StoredResponse
from tests.app.asking import URL, body_of, client_of, created
from tests.app.fakes import FakeEngine
from tests.app.test_errors import assert_error

THOUGHT = {"type": "reasoning", "encrypted_content": "x" * 700}
ASKED = {"role": "user", "content": "And?"}


class TestTurns:
    async def test_a_conversation_goes_on_without_its_instructions(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        first = await created(client, instructions="Be brief.")
        second = await created(client, input="And?", previous_response_id=first["id"])
        third = await created(client, input=[{"role": "user", "content": "So?"}], previous_response_id=second["id"])
        said = ["Hi", "Hello, world", "And?", "Hello, world", "So?"]
        assert [message["content"] for message in engine.tokenizer.conversations[-1]] == said
        assert [message["role"] for message in engine.tokenizer.conversations[-1]] == ["user", "assistant"] * 2 + ["user"]
        assert third["previous_response_id"] == second["id"]

    async def test_the_input_may_be_left_out_when_there_is_something_to_go_on_with(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        first = await created(client)
        response = await client.post(URL, json={"previous_response_id": first["id"]})
        assert response.status_code == 200
        assert [message["content"] for message in engine.tokenizer.conversations[-1]] == ["Hi", "Hello, world"]

    async def test_items_may_be_referred_to(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        first = await created(client)
        asked = (await client.get(f"{URL}/{first['id']}/input_items")).json()["data"][0]
        references = [{"type": "item_reference", "id": asked["id"]}, {"type": None, "id": first["output"][0]["id"]}]
        await created(client, input=[*references, {"role": "user", "content": "And?"}])
        assert [message["content"] for message in engine.tokenizer.conversations[-1]] == ["Hi", "Hello, world", "And?"]

    async def test_a_response_is_read_once_however_many_of_its_items_are_referred_to(
        self, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = await created(client, input=[{"role": "user", "content": letter} for letter in "abc"])
        items = (await client.get(f"{URL}/{first['id']}/input_items?order=asc")).json()["data"]
        asked: list[str] = []
        get = MemoryStore.get

        async def noted(store: MemoryStore, owner: str, response_id: str) -> StoredResponse | None:
            asked.append(response_id)
            return await get(store, owner, response_id)

        monkeypatch.setattr(MemoryStore, "get", noted)
        await created(client, input=[{"id": item["id"]} for item in (*items, *first["output"], *items)])
        assert [message["content"] for message in engine.tokenizer.conversations[-1]] == [*"abc", "Hello, world", *"abc"]
        assert asked == [first["id"]]

    async def test_a_message_and_its_continuation_are_one(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, I: "}]
        first = await created(client, input=begun, continue_final_message=True)
        second = await created(client, input="And?", previous_response_id=first["id"])
        said = ["Hi", "Hello, I: Hello, world", "And?"]
        assert [message["content"] for message in engine.tokenizer.conversations[-1]] == said
        items = (await client.get(f"{URL}/{second['id']}/input_items?order=asc")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == said
        await created(client, input=begun)  # whose answer is a message of its own
        assert first["output"][0]["content"][0]["text"] == "Hello, world"

    async def test_only_an_assistants_message_is_one_with_its_continuation(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        gave = {"type": "function_call_output", "call_id": "call_1", "output": "fine"}
        thought = {"type": "reasoning", "summary": []}
        for begun, role in (("I would like a", "user"), ([gave], "tool"), ([{"role": "user", "content": "Hi"}, thought], "user")):
            first = await created(client, input=begun, continue_final_message=True)
            assert engine.tokenizer.options[-1]["continue_final_message"]
            second = await created(client, input="And?", previous_response_id=first["id"])
            *_, last, answer, _ = engine.tokenizer.conversations[-1]
            assert (last["role"], answer) == (role, {"role": "assistant", "content": "Hello, world"})
            items = (await client.get(f"{URL}/{second['id']}/input_items?order=asc")).json()["data"]
            answered = (await client.get(f"{URL}/{first['id']}/input_items?order=asc")).json()["data"]
            assert items[:-1] == [*answered, *first["output"]]

    async def test_a_thought_does_not_come_between_a_message_and_its_continuation(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        begun = [{"role": "assistant", "content": "Hello, I: "}, {"type": "reasoning", "summary": []}]
        first = await created(client, input=begun, continue_final_message=True)
        await created(client, input="And?", previous_response_id=first["id"])
        said = [message["content"] for message in engine.tokenizer.conversations[-1]]
        assert said == ["Hello, I: Hello, world", "And?"]

    async def test_what_is_said_again_gets_an_id_of_its_own(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        first = await created(client)
        again = [{"id": first["output"][0]["id"]}, *first["output"]]
        second = await created(client, previous_response_id=first["id"], input=again)
        items = (await client.get(f"{URL}/{second['id']}/input_items?order=asc")).json()["data"]
        assert [item["content"][0]["text"] for item in items] == ["Hi"] + ["Hello, world"] * 3
        assert len({item["id"] for item in items}) == 4

    async def test_what_is_not_there_is_named(self, client: httpx.AsyncClient) -> None:
        response = await client.post(URL, json=body_of(previous_response_id="resp_x"))
        assert_error(response, 400, "previous_response_id", "previous_response_not_found")
        for item in ("msg_x", f"msg_{'0' * 32}_0"):
            response = await client.post(URL, json=body_of(input=[{"type": "item_reference", "id": item}]))
            assert_error(response, 404, "input[0].id", "item_not_found")

    async def test_what_was_not_to_be_stored_is_not(self, client: httpx.AsyncClient) -> None:
        document = await created(client, store=False)
        assert_error(await client.get(f"{URL}/{document['id']}"), 404, "response_id", "response_not_found")


class TestLimit:
    @pytest.fixture(autouse=True)
    def _most(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conversation, "MOST_BYTES", 2000)

    async def test_a_conversation_grows_no_further_than_what_is_kept_of_one(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        more: dict[str, Any] = {"input": [THOUGHT, ASKED]}
        more["previous_response_id"] = (await created(client, **more))["id"]
        for path in ("", "/input_tokens"):
            response = await client.post(f"{URL}{path}", json=body_of(**more))
            assert_error(response, 400, "previous_response_id", "conversation_too_large")
            assert "Begin a new one" in response.text and "'store': false" in response.text
        assert len(engine.requests) == 1  # nothing was generated
        await created(client, **more, store=False)
        await created(client, input="And?", previous_response_id=more["previous_response_id"])
        await created(client, input=more["input"])

    @pytest.mark.parametrize("extra", [{}, {"background": True}, {"stream": True}])
    async def test_what_alone_is_too_large_to_be_kept_is_refused_unless_it_is_not_to_be(
        self, client: httpx.AsyncClient, engine: FakeEngine, extra: dict[str, Any]
    ) -> None:
        large = [THOUGHT, THOUGHT, THOUGHT, ASKED]
        assert_error(await client.post(URL, json=body_of(input=large, **extra)), 400, "input", "conversation_too_large")
        assert engine.requests == []
        await created(client, input=large, store=False)

    async def test_references_count_as_what_they_refer_to(self, client: httpx.AsyncClient) -> None:
        first = await created(client, input=[THOUGHT, ASKED])
        thought, _ = (await client.get(f"{URL}/{first['id']}/input_items?order=asc")).json()["data"]
        references = [{"type": "item_reference", "id": thought["id"]}] * 3
        assert_error(await client.post(URL, json=body_of(input=references)), 400, "input", "conversation_too_large")


class TestInputTokens:
    async def test_they_are_those_that_an_answer_reads(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        first = await created(client)
        more = {"input": "And?", "previous_response_id": first["id"], "instructions": "Be brief."}
        counted = await client.post(f"{URL}/input_tokens", json=more)
        assert len(engine.requests) == 1
        await created(client, **more)
        assert counted.json() == {
            "object": "response.input_tokens",
            "input_tokens": len(engine.requests[1].prompt_token_ids),
        }
        assert engine.tokenizer.conversations[-2] == engine.tokenizer.conversations[-1]

    async def test_what_is_wrong_is_named_as_where_it_would_be_answered(self, client: httpx.AsyncClient) -> None:
        url = f"{URL}/input_tokens"
        assert_error(await client.post(url, json={}), 400, "input", "missing_required_parameter")
        assert_error(await client.post(url, json={"input": "Hi", "model": "gpt-4"}), 404, "model", "model_not_found")
        gone = {"previous_response_id": "resp_gone", "input": "Hi"}
        assert_error(await client.post(url, json=gone), 400, "previous_response_id", "previous_response_not_found")


class TestStored:
    async def test_retrieve_and_delete(self, client: httpx.AsyncClient) -> None:
        document = await created(client)
        url = f"{URL}/{document['id']}"
        assert (await client.get(url)).json() == document
        assert (await client.delete(url)).json() == {"id": document["id"], "object": "response", "deleted": True}
        for response in (await client.get(url), await client.delete(url), await client.get(f"{url}/input_items")):
            assert_error(response, 404, "response_id", "response_not_found")
        assert_error(await client.post(f"{url}/cancel"), 404, "response_id", "response_not_found")

    async def test_what_would_be_ignored_is_refused(self, client: httpx.AsyncClient) -> None:
        url = f"{URL}/{(await created(client))['id']}"
        for path, name in (("", "include"), ("", "starting_after"), ("/input_items", "include[]")):
            assert_error(await client.get(url + path, params={name: "1"}), 400, name, "unsupported_parameter")

    async def test_input_items_come_in_pages(self, client: httpx.AsyncClient) -> None:
        first = await created(client, input=[{"role": "user", "content": letter} for letter in "abc"])
        second = await created(client, input="d", previous_response_id=first["id"])
        url = f"{URL}/{second['id']}/input_items"
        said: list[str] = []
        page = (await client.get(url, params={"limit": 2, "order": "asc"})).json()
        while True:
            said += [item["content"][0]["text"] for item in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            page = (await client.get(url, params={"limit": 2, "order": "asc", "after": page["last_id"]})).json()
        assert said == ["a", "b", "c", "Hello, world", "d"]
        newest = (await client.get(url, params={"limit": 1})).json()
        assert (newest["data"][0]["content"][0]["text"], newest["has_more"]) == ("d", True)
        assert_error(await client.get(url, params={"after": "x"}), 400, "after", "invalid_value")
        assert_error(await client.get(url, params={"limit": 0}), 400, "limit", "invalid_value")

    async def test_each_key_has_its_own(self, engine: FakeEngine) -> None:
        async with client_of(engine, api_key="sk-one,sk-two") as client:
            one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
            document = (await client.post(URL, json=body_of(), headers=one)).json()
            url = f"{URL}/{document['id']}"
            for response in (
                await client.get(url, headers=two),
                await client.get(f"{url}/input_items", headers=two),
                await client.post(f"{url}/cancel", headers=two),
                await client.delete(url, headers=two),
            ):
                assert_error(response, 404, "response_id", "response_not_found")
            body = body_of(previous_response_id=document["id"])
            response = await client.post(URL, json=body, headers=two)
            assert_error(response, 400, "previous_response_id", "previous_response_not_found")
            body = body_of(input=[{"type": "item_reference", "id": document["output"][0]["id"]}])
            assert_error(await client.post(URL, json=body, headers=two), 404, "input[0].id", "item_not_found")
            assert (await client.get(url, headers=one)).json() == document
            assert (await client.get(url)).status_code == 401

    async def test_the_oldest_give_way(self, engine: FakeEngine) -> None:
        async with client_of(engine, store_max_responses=2) as client:
            ids = [(await created(client))["id"] for _ in range(3)]
            assert [(await client.get(f"{URL}/{id_}")).status_code for id_ in ids] == [404, 200, 200]


class TestMemoryStore:
    async def test_bytes_and_time_are_limits_too(self) -> None:
        now = 0.0
        store = MemoryStore(most=10, most_bytes=100, seconds=60, clock=lambda: now)

        async def put(name: str, size: int) -> None:
            await store.put("", name, StoredResponse({"text": "x" * size}, []))

        async def there() -> list[str]:
            return [name for name in "abc" if await store.get("", name) is not None]

        await put("a", 20)
        await put("b", 20)
        assert await there() == ["a", "b"]
        await put("a", 25)  # in its own place, and the newest now
        await put("c", 20)
        assert await there() == ["a", "c"]
        await put("c", 200)  # larger than the whole store: not kept, and nobody gives way
        assert await there() == ["a"]
        now = 60.0
        assert await there() == []
        assert await store.delete("", "a") is False

    async def test_who_floods_it_with_bytes_loses_his_own(self) -> None:
        store = MemoryStore(most=1000, most_bytes=10_000, seconds=60)
        await store.put("small", "a", StoredResponse({"text": "x" * 1000}, []))
        await store.put("large", "b", StoredResponse({"text": "x" * 4000}, []))
        for number in range(20):
            await store.put("flood", str(number), StoredResponse({"text": "x" * 1500}, []))
        assert await _there(store, "small", "large") == ["a", "b"]
        assert await _there(store, "flood") == ["17", "18", "19"]  # the newest

    async def test_who_floods_it_with_many_loses_his_own(self) -> None:
        store = MemoryStore(most=10, most_bytes=10_000, seconds=60)
        await store.put("other", "a", StoredResponse({"text": "x" * 4000}, []))  # most bytes, but few
        for number in range(20):
            await store.put("flood", str(number), StoredResponse({}, []))
        assert await _there(store, "other") == ["a"]
        assert await _there(store, "flood") == [str(number) for number in range(11, 20)]
        for name in "bcd":
            await store.put("other", name, StoredResponse({}, []))
        assert await _there(store, "other") == ["a", "b", "c", "d"]
        assert await _there(store, "flood") == [str(number) for number in range(14, 20)]

    async def test_of_owners_who_have_equally_much_the_one_who_has_put_something_last_keeps_it(self) -> None:
        store = MemoryStore(most=2, most_bytes=10_000, seconds=60)
        for owner in ("one", "two", "three"):
            await store.put(owner, "a", StoredResponse({}, []))
        assert (await _there(store, "one"), await _there(store, "two", "three")) == ([], ["a", "a"])

    async def test_what_has_ended_gives_way_first(self) -> None:
        now = 0.0
        store = MemoryStore(most=2, most_bytes=10_000, seconds=60, clock=lambda: now)
        await store.put("one", "a", StoredResponse({}, []))
        now = 30.0
        await store.put("two", "b", StoredResponse({}, []))
        now = 60.0
        await store.put("two", "c", StoredResponse({}, []))
        assert (await _there(store, "one"), await _there(store, "two")) == ([], ["b", "c"])

    async def test_many_may_put_large_ones_at_once(self) -> None:
        store = MemoryStore(most=100, most_bytes=2**24, seconds=60)
        large = StoredResponse({}, [{"text": "x" * 2**19}])
        await asyncio.gather(*(store.put(owner, name, large) for name in "abcd" for owner in ("one", "two")))
        assert await _there(store, "one", "two") == [*"abcd", *"abcd"]
        assert await store.get("one", "d") == large

    async def test_what_was_put_cannot_be_changed_from_outside(self) -> None:
        store = MemoryStore(1, 1000, 60)
        stored = StoredResponse({"status": "completed"}, [])
        await store.put("", "a", stored)
        stored.document["status"] = "failed"
        for _ in range(2):
            found = await store.get("", "a")
            assert found is not None and found.document == {"status": "completed"}
            found.document.clear()


async def _there(store: MemoryStore, *owners: str) -> list[str]:
    names = [*"abcd", *map(str, range(20))]
    return [name for owner in owners for name in names if await store.get(owner, name) is not None]
