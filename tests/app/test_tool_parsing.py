"""Content and calls out of generated text, however it is cut into pieces."""

import json
import random
from collections.abc import Iterable, Sequence

import pytest

from app.tools.formats import HERMES, LLAMA3_JSON, Format
from app.tools.parsing import CallDelta, ToolParser
from app.tools.reading import CallReader

Written = list[str | tuple[str, str]]
Result = tuple[str, list[tuple[str, str]]]
NAMES = {"f", "g"}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parsed(format: Format, pieces: Iterable[str]) -> Result:
    """Content and (name, arguments) of the calls, put together as a client does."""
    parser = ToolParser(format, NAMES)
    content, calls, ids = "", [], set()
    pieces = list(pieces)
    for place, piece in enumerate(pieces):
        part = parser.feed(piece, final=place == len(pieces) - 1)
        content += part.content
        for delta in part.calls:
            if delta.name is not None:
                assert delta.index == len(calls) and delta.id is not None and delta.id.startswith("call_")
                ids.add(delta.id)
                calls.append((delta.name, ""))
            assert delta.index == len(calls) - 1
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + delta.arguments)
    assert len(ids) == len(calls) == parser.num_calls
    return content, calls


def in_order(format: Format, pieces: Sequence[str]) -> Written:
    """Texts and calls (name, arguments) as they follow each other, put together as a client does."""
    parser = ToolParser(format, NAMES)
    found: Written = []
    for place, piece in enumerate(pieces):
        for new in parser.feed(piece, final=place == len(pieces) - 1).pieces:
            match found[-1] if found else None, new:
                case str(last), str():
                    found[-1] = last + new
                case (str(name), str(arguments)), CallDelta(name=None):
                    found[-1] = (name, arguments + new.arguments)
                case _, str():
                    found.append(new)
                case _, CallDelta():
                    assert new.name is not None, "a call goes on after something else"
                    found.append((new.name, new.arguments))
    return found


def cuts(text: str, sizes: Sequence[int]) -> list[str]:
    """The text in pieces of the given sizes over and over, and an empty last one, as a stream ends."""
    pieces, place, turn = [], 0, 0
    while place < len(text):
        size = sizes[turn % len(sizes)]
        pieces.append(text[place : place + size])
        place, turn = place + size, turn + 1
    return [*pieces, ""]


TRICKY = {"quote": 'he said "</tool_call>" and \\', "deep": {"a": [{"b": "}"}, "{"]}, "text": "naïve ☃ 𝄞\n\t<tool_call>"}
HERMES_CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("", "", []),
    ("Hello there.\n", "Hello there.\n", []),
    (call("f", "{}"), "", [("f", "{}")]),
    (call("f", '{"a": 1}') + "\n" + call("g", "{}"), "", [("f", '{"a": 1}'), ("g", "{}")]),
    (call("f", "{}") + call("f", "{}"), "", [("f", "{}"), ("f", "{}")]),
    ("Let me see.\n\n" + call("f", "{}"), "Let me see.", [("f", "{}")]),
    (f"One {call('f', '{}')} two {call('g', '{}')} three \n", "One two three \n", [("f", "{}"), ("g", "{}")]),
    (call("f", json.dumps(TRICKY)), "", [("f", json.dumps(TRICKY))]),
    (call("f", json.dumps(TRICKY, ensure_ascii=False, indent=2)), "", [("f", json.dumps(TRICKY, ensure_ascii=False, indent=2))]),
    ('<tool_call>{"name":"f","arguments":{"a":"b"}}</tool_call>', "", [("f", '{"a":"b"}')]),
    ('<tool_call> {"arguments": {"a": [1, 2]}, "name": "f"} </tool_call>', "", [("f", '{"a": [1, 2]}')]),
    ('<tool_call>{"id": 3, "x": [{}, "]"], "name": "f", "parameters": {"a": null}}</tool_call>', "", [("f", '{"a": null}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "not_given", "arguments": {}}</tool_call>', "", [("not_given", "{}")]),
    ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    # cut off by max_tokens
    (call("f", '{"a": "some te')[: -len("}\n</tool_call>")], "", [("f", '{"a": "some te')]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool', "</tool", [("f", '{"a": 1}')]),
    ('Well:\n<tool_call>\n{"name": "f", "argum', 'Well:\n<tool_call>\n{"name": "f", "argum', []),
    ("Well: <tool_", "Well: <tool_", []),
    # what is no call is content
    ("a < b </tool_call> c", "a < b </tool_call> c", []),
    ("x \n<tool_call>\nnone\n</tool_call> ", "x \n<tool_call>\nnone\n</tool_call> ", []),
    ("<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>", []),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "", "arguments": {}}</tool_call>', '<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
    (
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        [],
    ),
    ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', []),
    ('<tool_call>{"x": 1], "name": "f"}</tool_call>', '<tool_call>{"x": 1], "name": "f"}</tool_call>', []),
    ("<tool_call>{<tool_call>" + call("f", "{}"), "<tool_call>{<tool_call>", [("f", "{}")]),
    ('<tool_call>{"a": [' + call("f", "{}"), '<tool_call>{"a": [', [("f", "{}")]),
    # arguments that are no JSON stay what the model wrote, and end where they are closed
    (call("f", "{'a': 1, b}"), "", [("f", "{'a': 1, b}")]),
    (call("f", '{"a": "line\nline"}'), "", [("f", '{"a": "line\nline"}')]),
    (call("f", '{"a": "x}') + call("g", "{}"), "", [("f", '{"a": "x}}\n'), ("g", "{}")]),
    (call("f", '{"a": [1}') + call("g", "{}"), "", [("f", '{"a": [1}}'), ("g", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call>', "", [("f", '{"a": <b>}')]),
    # a call that was told cannot be taken back: what follows its arguments is content
    (call("f", "{}}") + " Done.", "} Done.", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {} oops</tool_call>', "oops", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1] is done', "is done", [("f", '{"a": 1]')]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f" oops', "oops", [("f", '{"a": 1}')]),
]


def bare(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


LLAMA_CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("", "", []),
    (" \n", " \n", []),
    ("Hello {x}", "Hello {x}", []),
    (bare("f", '{"a": {"b": "}; {"}}'), "", [("f", '{"a": {"b": "}; {"}}')]),
    ("\n\n" + bare("f", "{}"), "", [("f", "{}")]),
    ("<|python_tag|>" + bare("f", "{}") + "; " + bare("g", '{"a": 1}'), "", [("f", "{}"), ("g", '{"a": 1}')]),
    (bare("f", "{}") + "\n" + bare("f", "{}") + " Done; really.", "Done; really.", [("f", "{}"), ("f", "{}")]),
    ('{"type": "function", "name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("I call <|python_tag|> " + bare("f", "{}"), "I call", [("f", "{}")]),
    (bare("f", '{"a": "cut o')[:-1], "", [("f", '{"a": "cut o')]),
    # JSON that calls no given tool is an answer
    (bare("Bob", '{"age": 3}'), bare("Bob", '{"age": 3}'), []),
    ('{"name": "f"}', '{"name": "f"}', []),
    ('{"a": 1}', '{"a": 1}', []),
    ("Look: " + bare("f", "{}"), "Look: " + bare("f", "{}"), []),
    ('<|python_tag|>print("hi")', '<|python_tag|>print("hi")', []),
    ("[" + bare("f", "{}") + "]", "[" + bare("f", "{}") + "]", []),
]
CASES = [(HERMES, *case) for case in HERMES_CASES] + [(LLAMA3_JSON, *case) for case in LLAMA_CASES]


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_content_and_calls(format: Format, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for sizes in ([1], [2], [3], [5, 1], [8], [max(1, len(text))]):
        assert parsed(format, cuts(text, sizes)) == (content, calls)
    assert parsed(format, [text]) == (content, calls)


@pytest.mark.parametrize(
    ("format", "text", "written"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1] is done', [("f", '{"a": 1]'), "is done"]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f" oops', [("f", '{"a": 1}'), "oops"]),
        (LLAMA3_JSON, '{"parameters": {}, "name": "f" oops', [("f", "{}"), "oops"]),
        (HERMES, f"One {call('f', '{}')} two {call('g', '{}')} three", ["One", ("f", "{}"), " two", ("g", "{}"), " three"]),
    ],
)
def test_content_and_calls_come_in_the_order_in_which_they_were_written(format: Format, text: str, written: Written) -> None:
    for pieces in (cuts(text, [1]), cuts(text, [3]), [text, ""], [text]):
        assert in_order(format, pieces) == written


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "<|python_tag|>", "<", "</", "tool_call>"),
    *('{"name": "f", "arguments": ', '{"name": "g", "parameters": ', '{"name": "', '"arguments": {', '"name": "f"', '"name":'),
    *("{", "}", "}}", "[", "]", '"', '\\"', "\\", ",", ":", ";", "; ", " ", "\n", "a", "é☃", "1.5", "null", '{"a": "b"}', "{}"),
    *(call("f", '{"a": "b"}'), bare("g", "{}"), "1] is done", '{"arguments": {}, "name": "f"', " oops"),
]


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
def test_the_size_of_the_pieces_changes_nothing(format: Format) -> None:
    draw = random.Random(0)
    with_calls = 0
    for _ in range(1000):
        text = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 14)))
        if format.bare and draw.random() < 0.5:
            text = bare("f", "{}") + text
        whole = parsed(format, [text])
        with_calls += bool(whole[1])
        assert parsed(format, cuts(text, [1])) == whole, text
        assert parsed(format, cuts(text, [draw.randint(1, 9) for _ in range(5)])) == whole, text
        assert whole[1] or whole[0] == text, text
        assert in_order(format, [text]) == in_order(format, cuts(text, [1])), text
    assert with_calls > 100


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
@pytest.mark.parametrize("unit", ['<tool_call>{"x": [', '<tool_call>{"x": "', "<tool_call> ", '{"a": ', "<|python_tag|>{", "{"])
def test_a_model_that_begins_one_call_after_another_does_not_keep_the_server_busy(
    monkeypatch: pytest.MonkeyPatch, format: Format, unit: str
) -> None:
    count = 0
    read = CallReader.read

    def counting(reader: CallReader, char: str) -> None:
        nonlocal count
        count += 1
        read(reader, char)

    monkeypatch.setattr(CallReader, "read", counting)
    text = unit * 300
    assert parsed(format, cuts(text, [4])) == (text, [])
    assert count <= 2 * len(text)


def test_content_and_arguments_come_as_soon_as_they_are_certain() -> None:
    parser = ToolParser(HERMES, NAMES)
    assert parser.feed("Hi ").content == "Hi"
    assert parser.feed("there <").content == " there"
    assert parser.feed("b>").content == " <b>"
    assert parser.feed('\n<tool_call>\n{"name": "f", "arguments": ') == parser.feed("")
    (begun,) = parser.feed('{"a').calls
    assert (begun.index, begun.name, begun.arguments) == (0, "f", '{"a')
    (more,) = parser.feed('": "</tool_c').calls
    assert (more.index, more.id, more.name, more.arguments) == (0, None, None, '": "</tool_c')
