"""What a model thinks is told apart from its answer, however it comes and whoever asks."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from app.commands import backends
from app.main import create_app
from app.revising import Outputs
from app.settings import Settings
from app.thinking import Thinking, counted, thinking
from app.thoughts import Thought, ThoughtParser
from models.loader import BUNDLED, load_tokenizer
from speculative.grammar import Grammars
from speculative.request import RequestOutput, RequestStats
from tests.app.asking import URL as RESPONSES
from tests.app.asking import client_of, created, events_of, text_of
from tests.app.fakes import FakeEngine, FakeTokenizer, chat_body, events
from tests.app.reassembly import reassembled, without_times

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


class ThinkingTokenizer(FakeTokenizer):
    """Its template speaks of thoughts and calls, and writes ``end`` where the answer begins."""

    chat_template = "… </think> … <tool_call> …"

    def __init__(self, end: str = "\n") -> None:
        super().__init__()
        self.end = end

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return super().apply_chat_template(messages, **options).removesuffix("\0") + self.end


def engine_of(*script: str, end: str = "\n", finish: str = "stop") -> FakeEngine:
    engine = FakeEngine(script=script, finish=finish)
    engine.tokenizer = ThinkingTokenizer(end)
    return engine


async def asked(engine: FakeEngine, settings: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """The one choice of a chat, which is the same with a stream and without."""
    async with client_of(engine, **settings or {}) as client:
        whole = (await client.post(CHAT, json=chat_body(**extra))).json()
        streamed = await client.post(CHAT, json=chat_body(**extra, stream=True, stream_options={"include_usage": True}))
    together = reassembled(events(streamed))
    message = together["choices"][0]["message"]
    if message.get("tool_calls"):
        message["content"] = message["content"] or None
    told = without_times(whole)
    assert together == told
    return {**told["choices"][0], "usage": told["usage"]}


@pytest.mark.parametrize(
    ("begun", "text", "thought", "rest"),
    [
        (True, "\nHm, so.\n</think>\n\nYes.", "Hm, so.", "Yes."),
        (False, "<think>\nHm, so.\n</think>\n\nYes.", "Hm, so.", "Yes."),
        (False, "\n<think></think>Yes </think> <think>", "", "Yes </think> <think>"),
        (True, "</think>\n\nYes.\n", "", "Yes.\n"),
        (False, "Yes, I <think>.</think> ", "", "Yes, I <think>.</think> "),
        (False, "  <thin", "", "  <thin"),
        (False, " <b>bold</b>", "", " <b>bold</b>"),
        (True, "a < b </thin\n x ", "a < b </thin\n x", ""),
        (True, "endless </thi", "endless </thi", ""),
        (False, "<think>  \n ", "", ""),
        (True, "a</think>", "a", ""),
        (False, "", "", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_thoughts_are_the_same_however_their_text_is_cut(size: int, *, begun: bool, text: str, thought: str, rest: str) -> None:
    parser = ThoughtParser(begun=begun)
    told = [parser.feed(text[start : start + size]) for start in range(0, len(text), size)] + [parser.feed("", final=True)]
    assert ("".join(each for each, _ in told), "".join(each for _, each in told)) == (thought, rest)


@pytest.mark.parametrize("end", ["<think>\n", "\n"])
async def test_a_message_has_thoughts_and_answer_apart(end: str) -> None:
    opener = "" if end.strip() else "<think>"
    answer = await asked(engine_of(opener, "Hm", ", so.\n</th", "ink>\n\nIt is", " 4.", end=end))
    message = answer["message"]
    assert (message["reasoning_content"], message["content"], answer["finish_reason"]) == ("Hm, so.", "It is 4.", "stop")


async def test_thoughts_come_as_they_are_thought() -> None:
    engine = engine_of("Hm", ", so.", "</think>", "Yes", end="<think>")
    async with client_of(engine) as client:
        chunks = events(await client.post(CHAT, json=chat_body(stream=True)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"reasoning_content": ", so."},
        {"content": "Yes"},
        {},
    ]


async def test_what_is_cut_off_amid_thoughts_has_no_answer() -> None:
    answer = await asked(engine_of("Hm", ", so", end="<think>", finish="length"))
    assert (answer["message"]["reasoning_content"], answer["message"]["content"]) == ("Hm, so", "")
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("end", ["<think>\n\n</think>\n\n", "\n"])
async def test_where_nothing_is_thought_nothing_is_taken_away(end: str) -> None:
    answer = await asked(engine_of("Yes", ": </think>", " is a mark.", end=end))
    assert "reasoning_content" not in answer["message"]
    assert answer["message"]["content"] == "Yes: </think> is a mark."


@pytest.mark.parametrize(
    ("setting", "template", "apart"), [("none", "</think>", False), ("think", "…", True), ("auto", "…", False)]
)
async def test_the_server_may_be_told_whether_its_model_thinks(setting: str, template: str, *, apart: bool) -> None:
    engine = engine_of("<think>Hm</think>", "Yes")
    engine.tokenizer.chat_template = template  # type: ignore[misc]
    message = (await asked(engine, {"reasoning_format": setting}))["message"]
    assert (message.get("reasoning_content"), message["content"]) == (("Hm", "Yes") if apart else (None, "<think>Hm</think>Yes"))


async def test_a_call_in_thoughts_is_a_thought() -> None:
    engine = engine_of("Shall I write ", CALL, "? Yes.</think>\n\n", CALL, end="<think>")
    answer = await asked(engine, tools=[TOOL])
    assert answer["message"]["reasoning_content"] == f"Shall I write {CALL}? Yes."
    assert [call["function"] for call in answer["message"]["tool_calls"]] == [{"name": "look", "arguments": '{"at": 1}'}]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None


@pytest.mark.parametrize(
    ("begun", "thought", "content"),
    [("Yes, it", None, "Hm</think> x"), ("<think>I", "Hm", "x"), ("<think>I</think> it", None, "Hm</think> x")],
)
async def test_a_continued_answer_goes_on_with_what_it_was_at(begun: str, thought: str | None, content: str) -> None:
    messages = [{"role": "user", "content": "<think>?"}, {"role": "assistant", "content": begun}]
    answer = await asked(engine_of("Hm</think>", " x"), messages=messages, continue_final_message=True)
    assert (answer["message"].get("reasoning_content"), answer["message"]["content"]) == (thought, content)


@pytest.mark.parametrize("end", ["<think>", "\n", "</think>"])
async def test_the_form_of_an_answer_is_not_that_of_its_thoughts(end: str) -> None:
    engine = engine_of("Hm</think>", "7", end=end)
    await asked(engine, structured_outputs={"regex": "[0-9]"})
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and grammar in engine.grammars
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None

    def fits(text: str) -> bool:
        matcher = Grammars(tokenizer, 8192, [0]).follow(grammar)
        return all(matcher.accept(token) for token in tokenizer.encode(text, add_special_tokens=False)) and matcher.allows(0)

    texts = ["7", "x", "Hm {x}</think>\n\n7", "Hm</think>x", "<think>Hm</think>7"]
    fitting = {"<think>": [False, False, True, False, True], "\n": [True, False, False, False, True]}
    assert [fits(text) for text in texts] == fitting.get(end, [True, False, False, False, False])


async def test_forced_calls_come_after_thoughts() -> None:
    engine = engine_of("Hm</think>", CALL, end="<think>")
    await asked(engine, tools=[TOOL], tool_choice="required")
    grammar = engine.requests[0].params.grammar
    assert grammar is not None
    parts = json.loads(grammar.source)["grammars"]
    assert [part.get("name") for part in parts] == [None, "answer", "arguments_0"]
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    matcher = Grammars(tokenizer, 8192, [0]).follow(grammar)
    text = tokenizer.encode(f"Hm, {{x}}: <tool_call> or not?</think>\n\n{CALL}", add_special_tokens=False)
    assert all(matcher.accept(token) for token in text) and matcher.allows(0)


async def outputs_of(*outputs: tuple[Sequence[int], str]) -> Outputs:
    tokens = 0
    for place, (ids, text) in enumerate(outputs, 1):
        tokens += len(ids)
        finish = "stop" if place == len(outputs) else None
        yield 0, RequestOutput("r", tuple(ids), text, finish, RequestStats(completion_tokens=tokens))


@pytest.mark.parametrize(
    ("begun", "outputs", "count"),
    [
        (False, [([1, 5, 5], "<think>a b"), ([5, 2, 6], " c</think>Yes"), ([6], ".")], 5),
        (True, [([5, 5], "a b"), ([2, 6, 6, 6], "</think>Yes")], 3),
        (False, [([6, 6], "Yes"), ([2], "</think>"), ([6], ".")], 0),
        (False, [([3], "<th"), ([3], "ink>"), ([5], "a"), ([2], "</think>")], 4),
        (False, [([3], "<th"), ([6], "orn>"), ([6], "s")], 0),
        (True, [([5, 5], "a"), ([5], " b")], 3),
    ],
)
async def test_the_tokens_of_thoughts_are_counted(begun: bool, outputs: list[tuple[list[int], str]], count: int) -> None:
    told = [output async for _, output in counted(outputs_of(*outputs), Thinking(begun, closer=2))]
    assert told[-1].stats.num_reasoning_tokens == count
    assert [output.text_delta for output in told] == [text for _, text in outputs]


def test_a_tokenizers_own_mark_is_known() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    tokenizer.add_tokens(["</think>"])
    own = tokenizer.convert_tokens_to_ids("</think>")
    assert thinking("think", tokenizer, tokenizer.encode("Hi<think>\n"), None) == Thinking(begun=True, closer=own)


def test_a_mark_that_texts_do_not_hold_ends_no_thoughts() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    assert thinking("think", tokenizer, tokenizer.encode("Hi<think>\n"), None) is None


async def test_usage_says_how_many_tokens_were_thoughts() -> None:
    answer = await asked(engine_of("Hm", ", so.", "</think>", "Yes", end="<think>"))
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    async with client_of(engine_of("Hm", ", so.", "</think>", "Yes", end="<think>")) as client:
        assert (await created(client))["usage"]["output_tokens_details"]["reasoning_tokens"] == 3


async def test_a_response_has_an_item_of_thoughts_before_its_message() -> None:
    engine = engine_of("Hm", ", so.</think>", "\nYes", ".", end="<think>")
    async with client_of(engine) as client:
        document = await created(client)
        streamed = events_of(await client.post(RESPONSES, json={"model": "tiny", "input": "Hi", "stream": True}))
        kept = (await client.get(f"{RESPONSES}/{document['id']}")).json()
    thought, message = document["output"]
    assert thought["id"].startswith("rs_") and thought["status"] == "completed"
    assert (thought["summary"], thought["content"]) == ([], [{"type": "reasoning_text", "text": "Hm, so."}])
    assert message["type"] == "message" and text_of(document) == "Yes."
    assert kept == document
    kinds = [event["type"].removeprefix("response.") for event in streamed]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["output_index"] for event in streamed if "output_index" in event] == [0] * 7 + [1] * 7


async def test_log_probabilities_are_of_the_answer() -> None:
    engine = engine_of("Hm", "</think>", "Y", "es", end="<think>")
    async with client_of(engine) as client:
        document = await created(client, include=["message.output_text.logprobs"])
    assert [one["token"] for one in document["output"][1]["content"][0]["logprobs"]] == ["d", "e"]


async def test_a_response_that_is_cut_off_amid_thoughts_is_incomplete() -> None:
    async with client_of(engine_of("Hm", ", so", end="<think>", finish="length")) as client:
        document = await created(client)
    (thought,) = document["output"]
    assert (document["status"], thought["type"], thought["status"]) == ("incomplete", "reasoning", "incomplete")


async def test_thoughts_before_calls_are_told_to_the_template_at_the_next_turn() -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    engine = engine_of("I must look.</think>", CALL, end="<think>")
    async with client_of(engine) as client:
        first = await created(client, tools=[tool])
        call = first["output"][1]
        seen = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
        await created(client, tools=[tool], input=[seen], previous_response_id=first["id"])
    said = engine.tokenizer.conversations[-1][1]
    assert (said["role"], said["reasoning_content"]) == ("assistant", "I must look.")
    assert said["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("local", [False, True])
async def test_the_command_line_tells_thoughts_apart_here_and_from_a_server(local: bool) -> None:
    engine = engine_of("Hm", ", so.</think>", "\nYes", ".", end="<think>")
    backend: backends.Backend
    if local:
        backend = backends.LocalBackend(Settings(), engine)  # type: ignore[arg-type]
    else:
        backend = backends.ServerBackend("http://test")
        transport = httpx.ASGITransport(create_app(Settings(), engine))
        backend._client = httpx.AsyncClient(transport=transport)
    told = [piece async for piece in backend.answer(chat_body())]
    pieces = [piece for piece in told if piece and not isinstance(piece, backends.AnswerStats)]
    assert pieces == [Thought("Hm"), Thought(", so."), "Yes", "."]


@pytest.mark.parametrize(
    ("settings", "asked_for", "told"),
    [
        ({}, {}, None),
        ({}, {"reasoning_effort": "none"}, False),
        ({}, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "none"}, False),
        ({}, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
async def test_thinking_is_turned_off_by_callers_and_by_the_server(
    settings: dict[str, Any], asked_for: dict[str, Any], told: bool | None
) -> None:
    engine = engine_of("Yes")
    async with client_of(engine, **settings) as client:
        assert (await client.post(CHAT, json=chat_body(**asked_for))).status_code == 200
        effort = asked_for.get("reasoning_effort")
        others = {name: value for name, value in asked_for.items() if name != "reasoning_effort"}
        document = await created(client, **others, reasoning={"effort": effort})
        if effort is None:  # /tokenize has no word for it
            assert (await client.post("/tokenize", json={"messages": chat_body()["messages"], **others})).status_code == 200
    assert {options.get("enable_thinking") for options in engine.tokenizer.options} == {told}
    assert document["reasoning"]["effort"] == effort
