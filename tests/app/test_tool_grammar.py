"""What the model can write where tools constrain it, told by the grammars that the engine follows."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from app.tools.formats import HERMES, LLAMA3_JSON, Format
from app.tools.grammar import tool_grammar
from app.tools.parsing import ToolParser
from app.tools.schemas import Tool, ToolChoice
from models.loader import BUNDLED, load_tokenizer
from speculative.grammar import GrammarMatcher, Grammars
from speculative.request import Grammar

FIND = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "stars": {"type": "integer"}, "kind": {"enum": ["hotel", "inn"]}},
    "required": ["city"],
}
START, END, CALL = 1, 2, 3  # the bundled tokenizer's <|im_start|>, <|im_end|> and <tool_call>
Matches = Callable[[str], bool]
Follow = Callable[[Grammar | None], GrammarMatcher]
Spellings = Callable[[str], tuple[list[int], list[int]]]


def tools(**strict: bool) -> list[Tool]:
    return [
        Tool.model_validate({"type": "function", "function": {"name": name, "strict": strict.get(name)} | extra})
        for name, extra in {"find": {"parameters": FIND}, "clock": {}, "note": {"parameters": {}}}.items()
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BUNDLED["target"])


@pytest.fixture(scope="module")
def follow(tokenizer: Any) -> Follow:
    grammars = Grammars(tokenizer, 8192, [END])

    def follow(wanted: Grammar | None) -> GrammarMatcher:
        assert wanted is not None and wanted.kind == "llguidance"
        return grammars.follow(wanted)

    return follow


@pytest.fixture(scope="module")
def spellings(tokenizer: Any) -> Spellings:
    @cache
    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def spellings(text: str) -> tuple[list[int], list[int]]:
        """The text as a model usually writes it, and letter by letter: in both calls' marks are marks."""
        return tokens(text), [token for char in text for token in tokens(char)]

    return spellings


@pytest.fixture(scope="module")
def matches(follow: Follow, spellings: Spellings) -> Callable[[Grammar | None], Matches]:
    def of(wanted: Grammar | None) -> Matches:
        def accepts(text: str) -> bool:
            """Whether the text may be written, and may end there."""
            usual, letters = (_accepts(follow(wanted), [*tokens, END]) for tokens in spellings(text))
            assert usual is letters, text
            return usual

        return accepts

    return of


def _accepts(matcher: GrammarMatcher, tokens: list[int]) -> bool:
    return all(matcher.accept(token) for token in tokens)


def choice(given: str) -> ToolChoice:
    if given in ("auto", "required"):
        return ToolChoice.model_validate({"type": given})
    return ToolChoice.model_validate({"type": "function", "function": {"name": given}})


def written(format: Format, name: str, arguments: str) -> str:
    return format.begin.format(name=name) + arguments + format.end


RIGHT: list[tuple[str, str]] = [
    ("find", '{"city": "Rome"}'),
    ("find", '{"city": "Ro\\"me }", "stars": 3}'),
    ("find", '{"city": "Rome", "kind": "inn"}'),
    ("find", '{"city": "</tool_call>"}'),
    ("clock", "{}"),
    ("note", '{"anything": [1, {"a": null}]}'),
]
WRONG: list[tuple[str, str]] = [
    ("find", "{}"),
    ("find", '{"stars": 3}'),
    ("find", '{"city": 5}'),
    ("find", '{"city": "Rome", "kind": "tent"}'),
    ("find", '{"city": "Rome"'),
    ("find", '{"city":  "Rome"}'),  # there is one way to write it
    ("clock", '{"zone": 1}'),
    ("note", "[]"),
    ("unknown", "{}"),
]


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
def test_a_forced_answer_is_calls_that_follow_their_schemas(matches: Any, format: Format) -> None:
    accepts = matches(tool_grammar(tools(), choice("required"), True, format))
    for name, arguments in RIGHT:
        assert accepts(written(format, name, arguments)), arguments
    for name, arguments in WRONG:
        assert not accepts(written(format, name, arguments)), arguments
    one, other = written(format, "clock", "{}"), written(format, "find", '{"city": "Rome"}')
    assert accepts(one + format.separator + other + format.separator + one)
    assert accepts(one + other) is (format is HERMES)  # the bundled model's template writes nothing between calls
    for text in ("", "Hello", "Hello " + one, one + " Hello", one + format.separator, "{}"):
        assert not accepts(text), text


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_named_tool_is_called_once(matches: Any, format: Format, parallel: bool) -> None:
    accepts = matches(tool_grammar(tools(), choice("find"), parallel, format))
    call = written(format, "find", '{"city": "Rome"}')
    assert accepts(call)
    for text in ("", written(format, "clock", "{}"), call + format.separator + call, written(format, "find", "{}")):
        assert not accepts(text), text


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
def test_calls_that_are_not_parallel_are_one(matches: Any, format: Format) -> None:
    call = written(format, "clock", "{}")
    forced = matches(tool_grammar(tools(), choice("required"), False, format))
    assert forced(call)
    assert not forced(call + format.separator + call)
    free = matches(tool_grammar(tools(), choice("auto"), False, format))
    for text in ("", "Hello.", call, "Hello.\n" + call, written(format, "find", '{"whatever": 1}')):
        assert free(text), text
    for text in (call + format.separator + call, call + "Hello", written(format, "unknown", "{}")):
        assert not free(text), text


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
def test_strict_tools_follow_their_schema_where_the_model_chooses(matches: Any, format: Format) -> None:
    assert tool_grammar(tools(), choice("auto"), True, format) is None
    accepts = matches(tool_grammar(tools(find=True), choice("auto"), True, format))
    right, wrong = written(format, "find", '{"city": "Rome"}'), written(format, "find", "{}")
    for text in ("Hello.", right, "So: " + right + "\n" + right + " Done.", written(format, "clock", '{"zone": 1}')):
        assert accepts(text), text
    for text in (wrong, right + wrong):
        assert not accepts(text), text


def test_no_other_way_to_write_a_call_leads_past_its_schema(matches: Any) -> None:
    """What the parser takes for a call is written in the one way, or not at all."""
    names = {"find", "clock", "note"}
    call = written(HERMES, "find", '{"city": "Rome"}')
    bad = '{"stars": 3}'
    escapes = [
        f'<tool_call>{{"name": "find", "arguments": {bad}}}</tool_call>',
        f'<tool_call>\n{{"arguments": {bad}, "name": "find"}}\n</tool_call>',
        f'<tool_call>\n{{"name":"find","arguments":{bad}}}\n</tool_call>',
        f'<tool_call>\n\n{{ "name": "find", "parameters": {bad}}}\n</tool_call>',
        '<tool_call>{"name": "find"}</tool_call>',
        f'<tool_call>{{"name": "others", "arguments": {bad}}}',
    ]
    strict = matches(tool_grammar(tools(find=True), choice("auto"), True, HERMES))
    one = matches(tool_grammar(tools(), choice("auto"), False, HERMES))
    for text in escapes:
        assert ToolParser(HERMES, names).feed(text, final=True).calls, text
        for before in ("", "So: ", call, call + "\n"):
            assert not strict(before + text), before + text
            assert not one(before + text), before + text
    for text in (call, "So: " + call, "The mark is <tool_cal", '{"name": "find", "arguments": {}}', "a < b <tool>"):
        assert strict(text) and one(text), text
    assert strict(call + "\n" + call) and not one(call + "\n" + call)


def test_no_other_way_to_write_llamas_calls_leads_past_their_schema(matches: Any) -> None:
    """The same where calls need no opener: an answer is calls or a text, and a text begins with none and has no opener."""
    names = {"find", "clock", "note"}
    call, bad = written(LLAMA3_JSON, "find", '{"city": "Rome"}'), '{"stars": 3}'
    strict = matches(tool_grammar(tools(find=True), choice("auto"), True, LLAMA3_JSON))
    one = matches(tool_grammar(tools(), choice("auto"), False, LLAMA3_JSON))
    objects = [
        f'{{"name":"find","parameters":{bad}}}',
        f'{{"parameters": {bad}, "name": "find"}}',
        f'{{ "name": "find", "arguments": {bad}}}',
        f'{{"type": "function", "name": "find", "parameters": {bad}}}',
    ]
    spaces = [chr(code) for code in range(0x10000) if chr(code).isspace()]
    openings = ["", "\n ", *spaces, "<|python_tag|>", "So: <|python_tag|>", "<<|python_tag|>", "\n<|python_tag|> "]
    for text in (opening + each for opening in openings for each in objects):
        assert ToolParser(LLAMA3_JSON, names).feed(text, final=True).calls, text
        for before in ("", call, call + "; ", call + "\n", "<|python_tag|>" + call):
            assert not strict(before + text), before + text
            assert not one(before + text), before + text
    for text in (call, "<|python_tag|>" + call):
        assert strict(text) and one(text), text
    for text in ("", " ", "<", "<<b>", "a | b", "| a |", "é{", "Use " + objects[0], "<b>{}", "\nSo", "The mark is <|python_tag"):
        assert strict(text) and one(text), text
        assert not ToolParser(LLAMA3_JSON, names).feed(text, final=True).calls, text
    assert strict(call + "; " + call) and not one(call + "; " + call)


def test_the_mark_of_a_call_is_one_by_its_own_token_or_spelt_out(follow: Follow, spellings: Spellings) -> None:
    token, letters = spellings("<tool_call>")
    assert token == [CALL] and len(letters) == len("<tool_call>")
    strict, one = tool_grammar(tools(find=True), choice("auto"), True, HERMES), tool_grammar(tools(), choice("auto"), False, HERMES)
    for wanted in (strict, one):
        for mark in (token, letters):
            matcher = follow(wanted)
            assert _accepts(matcher, [*spellings("So: ")[0], *mark])
            begun = matcher.forced(15)
            assert begun[:3] == spellings('\n{"name')[0] and not matcher.allows(END)
            assert not matcher.allows(*spellings("{")[0])


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
def test_nothing_is_written_that_the_parser_would_not_see(follow: Follow, format: Format) -> None:
    """Special tokens have no text: before an object one would not keep it from being a call."""
    matcher = follow(tool_grammar(tools(find=True), choice("auto"), True, format))
    assert matcher.allows(END) and not matcher.allows(START)


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
def test_what_must_come_is_told(follow: Follow, spellings: Spellings, format: Format) -> None:
    call, _ = spellings(written(format, "clock", "{}"))
    assert follow(tool_grammar(tools(), choice("clock"), True, format)).forced(len(call) + 1) == [*call, END]
    matcher = follow(tool_grammar(tools(), choice("find"), True, format))
    call, _ = spellings(written(format, "find", '{"city": "Rome"}'))
    begun = matcher.forced(15)
    assert begun == call[: len(begun)] and len(begun) > 10


NAMED = '{"name": "find"}'
FORMS = [
    (
        Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})),
        '{"a": 1}',
    ),
    (Grammar("regex", "yes|no"), "yes"),
    (Grammar("lark", 'root ::= "a" | "b" root'), "bba"),
    # Forms that begin as calls do.
    (
        Grammar("json_schema", json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})),
        NAMED,
    ),
    (Grammar("regex", r'\{"name": "[a-z]*"\}'), NAMED),
    (Grammar("lark", 'root ::= "{" text ": " text "}"\ntext ::= "\\"" [a-z]+ "\\""'), NAMED),
    (Grammar("regex", r"<t[a-z]+>/"), "<tr>/"),
    (Grammar("lark", 'start: "<" NAME ">"\nNAME: /[a-z]+/'), "<tr>"),
    (Grammar("lark", 'start: NAME+\nNAME: /[a-z]+/\n%ignore " "'), "two words"),
]


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
@pytest.mark.parametrize(("form", "answer"), FORMS)
@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_has_its_form_or_calls(matches: Any, format: Format, form: Grammar, answer: str, parallel: bool) -> None:
    accepts = matches(tool_grammar(tools(find=True), choice("auto"), parallel, format, form))
    call = written(format, "find", '{"city": "Rome"}')
    assert accepts(answer)
    assert accepts(call)
    assert accepts(call + format.separator + call) is parallel
    for text in ("", "Hello", answer + call, call + answer, written(format, "find", "{}"), "{}"):
        assert not accepts(text), text


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON])
@pytest.mark.parametrize("forced", [True, False])
def test_arguments_come_in_the_order_that_the_model_has_learnt(matches: Any, format: Format, forced: bool) -> None:
    """Nothing else of the schema is let go: what is required, what there is, and that each comes once."""
    declared, by_name = '{"city": "Rome", "stars": 3, "kind": "inn"}', '{"city": "Rome", "kind": "inn", "stars": 3}'
    wanted = choice("find") if forced else choice("auto")
    for order, right, wrong in ((False, declared, by_name), (True, by_name, declared)):
        used = replace(format, by_name=order)
        accepts = matches(tool_grammar(tools(find=True), wanted, True, used))
        assert accepts(written(used, "find", right)) and not accepts(written(used, "find", wrong))
        assert accepts(written(used, "find", '{"city": "Rome"}'))
        for arguments in ('{"stars": 3}', '{"city": "Rome", "city": "Oslo"}', '{"city": "Rome", "zone": 1}'):
            assert not accepts(written(used, "find", arguments))
