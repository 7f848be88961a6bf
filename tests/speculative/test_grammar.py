"""Grammars: every text follows its own, the same with speculation on and off, in fewer passes where it has no choice."""

from __future__ import annotations

import json
import random
import re
from copy import copy
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from models.loader import BUNDLED, load_tokenizer
from speculative.errors import InvalidRequestError
from speculative.grammar import MOST_KEPT, GrammarMatcher, Grammars
from speculative.request import Grammar, Request, RequestOutput, SamplingParams
from speculative.texts import Texts
from speculative.tree import DraftTree
from tests.speculative.conftest import DRAFTERS, run, tokens

END = 2
BOOKING = {
    "type": "object",
    "properties": {
        "restaurant_name": {"type": "string", "maxLength": 6},
        "party_size": {"type": "integer", "minimum": 1, "maximum": 20},
        "outside": {"type": "boolean"},
        "meal": {"enum": ["lunch", "dinner"]},
    },
    "required": ["restaurant_name", "party_size", "outside", "meal"],
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(BOOKING)),
    "regex": Grammar("regex", r"[a-d]{3,9}(-x[0-9]+){2}"),
    "gbnf": Grammar("lark", 'root ::= "The answer is " number "."\nnumber ::= [0-9] | [0-9] number'),
    "choice": Grammar("lark", 'root ::= "yes, please" | "no, thank you" | "yes, but later"'),
}


def within(before: str, content: dict[str, object], after: str) -> Grammar:
    """A grammar inside of another one."""
    around = {"lark_grammar": f"start: {json.dumps(before)} @inner {json.dumps(after)}"}
    return Grammar("llguidance", json.dumps({"grammars": [around, {"name": "inner", **content}]}))


OVERLAPPING = Grammar("regex", "|".join(f"(.*{first}.{{900}}{last})" for first, last in ("ab", "cd", "ef")))
"""Of these the lexer has to tell the places of all letters so far, for which it makes more and more states."""

LONG_ROW = Grammar("lark", "start: /[b-d]{9}/ " + '"a"? ' * 1500 + '"!"')
"""With the ninth letter it hits a limit of the parser, which has every place of the rest in one row."""

SAMPLING = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.3, "top_k": 40}]


def request(name: str, **params: object) -> Request:
    return Request(name, (10, 20, 30, ord(name) % 90), SamplingParams(**{"max_tokens": 100, "seed": 5, **params}))  # type: ignore[arg-type]


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The bundled target's."""
    loaded = load_tokenizer(BUNDLED["target"])
    assert loaded is not None
    return loaded


@pytest.fixture
def bundled() -> Grammars:
    return Grammars(tokenizer(), 8192, [END])


def written(matcher: GrammarMatcher, text: str) -> bool:
    """Whether a text may be written and may end there."""
    return all(map(matcher.accept, [*tokenizer().encode(text, add_special_tokens=False), END]))


def spelled(ids: list[int]) -> bytes:
    """The bytes of byte-level tokens."""
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(alphabet[character] for token in tokenizer().convert_ids_to_tokens(ids) for character in token)


Outputs = dict[str, list[RequestOutput]]


def texts(outputs: Outputs) -> dict[str, str]:
    return {name: "".join(output.text_delta for output in series) for name, series in outputs.items()}


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_output_is_the_same_with_speculation_on_and_off(make_speller, sampling: dict[str, object]) -> None:
    grammars = [*GRAMMARS.values(), GRAMMARS["schema"], None]  # the last text is free
    requests = [request(name, grammar=each, max_tokens=50, **sampling) for name, each in zip("abcdef", grammars, strict=True)]
    expected = tokens(run(make_speller("none", max_num_seqs=1), requests))
    turn = SAMPLING.index(sampling)
    for drafter in DRAFTERS[turn :: len(SAMPLING)]:  # each with one of the samplings
        assert tokens(run(make_speller(drafter, prefill_chunk=2), requests)) == expected, drafter
    assert tokens(run(make_speller("moa", draft_lookup=1), requests)) == expected


@pytest.mark.parametrize("drafter", ["none", "moa", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_texts_follow_their_grammars_and_end_with_them(make_speller, drafter: str, temperature: float) -> None:
    requests = [request(name, grammar=GRAMMARS["schema"], temperature=temperature) for name in "abc"]
    requests += [request("r", grammar=GRAMMARS["regex"], temperature=temperature)]
    requests += [request("e", grammar=GRAMMARS["gbnf"], temperature=temperature)]
    outputs = run(make_speller(drafter), requests)
    written = texts(outputs)
    ended = {name: series[-1].finish_reason for name, series in outputs.items()}
    for name in "abc":
        assert ended[name] == "stop"
        booking = json.loads(written[name])
        assert list(booking) == list(BOOKING["properties"])
        assert len(booking["restaurant_name"]) <= 6 and 1 <= booking["party_size"] <= 20
        assert type(booking["outside"]) is bool and booking["meal"] in ("lunch", "dinner")
    # Where a text may go on, it need not end in time, but it never leaves its grammar.
    assert re.fullmatch(r"[a-d]{0,9}(-(x[0-9]*)?){0,2}", written["r"])
    assert re.fullmatch(r"The answer is [0-9]+\.?", written["e"])


def test_what_has_no_choice_is_drafted(make_speller) -> None:
    asked = request("a", grammar=GRAMMARS["schema"], temperature=0.0)
    plain, drafted = run(make_speller("none"), [asked]), run(make_speller("ngram"), [asked])
    assert texts(drafted) == texts(plain)
    # Half of the text is names and punctuation that the schema asks for.
    assert drafted["a"][-1].stats.num_target_calls < 0.7 * plain["a"][-1].stats.num_target_calls


def test_json_within_another_grammar_is_written_in_one_way_too(make_speller) -> None:
    asked = request("a", grammar=within("call ", {"json_schema": BOOKING}, " now"), temperature=1.2)
    plain, drafted = run(make_speller("none"), [asked]), run(make_speller("ngram"), [asked])
    text = texts(plain)["a"]
    assert text == texts(drafted)["a"] == f"call {json.dumps(json.loads(text[5:-4]))} now"
    assert drafted["a"][-1].stats.num_target_calls < 0.7 * plain["a"][-1].stats.num_target_calls


def test_schemas_within_another_grammar_are_followed_as_far_as_they_can_be(bundled: Grammars) -> None:
    schema = {"type": "array", "items": {"type": "string", "maxLength": 2}, "uniqueItems": True}
    grammar = within("<", {"json_schema": schema}, ">")
    for text, fits in (('<["a", "a"]>', True), ('<["abc"]>', False), ('<["a","b"]>', False), (r'<["a\""]>', True)):
        assert written(bundled.follow(grammar), text) == fits, text


def test_the_end_is_drafted_where_nothing_can_follow(make_speller) -> None:
    asked = request("a", grammar=Grammar("regex", "[ab]: the rest"), temperature=0.0)
    stats = run(make_speller("ngram"), [asked])["a"][-1].stats
    # The prompt, the letter, and the rest with its end in steps of as many tokens as a tree may have.
    assert stats.num_target_calls <= 2 + -(-stats.completion_tokens // 16)


def test_drafts_that_break_the_grammar_are_not_verified(make_speller) -> None:
    asked = request("a", grammar=Grammar("regex", "[0-9]{60}"), temperature=0.0)
    engine = make_speller("moa")
    free = run(engine, [request("b", temperature=0.0, max_tokens=60)])["b"][-1].stats
    stats = run(engine, [asked])["a"][-1].stats
    assert stats.completion_tokens == 61
    # An untrained drafter says digits one time in ten; a full tree at each step would be as large as the free text's.
    assert stats.num_draft_tokens / stats.num_target_calls < 0.5 * free.num_draft_tokens / free.num_target_calls


def test_a_complete_grammar_ends_the_text_before_min_tokens(make_speller) -> None:
    for drafter in ("none", "moa"):
        asked = request("a", grammar=GRAMMARS["choice"], min_tokens=80, temperature=0.9)
        outputs = run(make_speller(drafter), [asked])
        assert texts(outputs)["a"] in ("yes, please", "no, thank you", "yes, but later")
        assert outputs["a"][-1].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_ends_where_the_tokens_cannot_write_what_must_follow(make_speller, temperature: float) -> None:
    asked = request("a", grammar=Grammar("lark", 'root ::= "no é"'), temperature=temperature)
    beside = request("b", temperature=temperature)
    outputs = run(make_speller("moa"), [asked, beside])
    assert texts(outputs)["a"] == "no " and outputs["a"][-1].finish_reason == "stop"
    assert outputs["b"][-1].stats.completion_tokens > 10


def test_min_tokens_hold_while_the_grammar_can_go_on(make_speller) -> None:
    asked = request("a", grammar=Grammar("regex", "a+"), min_tokens=30, temperature=0.0)
    written = texts(run(make_speller("moa"), [asked]))["a"]
    assert set(written) == {"a"} and len(written) >= 30


def test_other_parameters_count_within_the_grammar(make_speller) -> None:
    grammar = Grammar("regex", "[ab]{40}")
    a = ord("a") - 29
    only = texts(run(make_speller("moa"), [request("a", grammar=grammar, logit_bias=((a, -100.0),), temperature=0.0)]))["a"]
    assert only == "b" * 40
    mixed = texts(run(make_speller("moa"), [request("a", grammar=grammar, frequency_penalty=2.0, temperature=0.0)]))["a"]
    assert abs(mixed.count("a") - mixed.count("b")) <= 2


def test_the_end_token_in_a_draft_ends_the_text(make_speller) -> None:
    # A prediction is verified as it is, and this one goes on after the end.
    asked = request("a", grammar=Grammar("regex", "abc"), temperature=0.0)
    a = ord("a") - 29
    predicted = Request("p", asked.prompt_token_ids, asked.params, prediction=(a, a + 1, a + 2, END, a, a + 1))
    outputs = run(make_speller("moa"), [predicted])
    assert tokens(outputs) == {"p": [a, a + 1, a + 2, END]}
    assert outputs["p"][-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("regex", "a["), "unclosed character class"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("lark", "root ::= x"), "Rule 'x' not found"),
        (Grammar("lark", "start: x"), 'unknown name: "x"'),
        (Grammar("lark", 'root ::= ("a"'), "Expected ')'"),
        (Grammar("lark", 'other: "a"'), "neither Lark nor GBNF"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", '{"type": "colour"}'), "colour"),
        (Grammar("json_schema", '{"properties": {"a": {"not": {"type": "null"}}}}'), "'not' is not supported (at #/properties/a)"),
        (Grammar("json_schema", "false"), "no value"),
        (Grammar("json_schema", "[]"), "must be an object"),
        (Grammar("json_schema", '{"not":' * 5000 + "{}" + "}" * 5000), "nested too deeply"),
        (Grammar("llguidance", "{}"), "grammars"),
        (Grammar("llguidance", '{"grammars": [{"regex": "a"}]}'), "grammars"),
        (Grammar("regex", "a" * 2049), "2049 characters, and at most 2048 are compiled"),
        (Grammar("lark", 'root ::= "' + "a" * 8192), "8202 characters, and at most 8192 are compiled"),
        (within("<", {"lark_grammar": "start: " + '"a"? ' * 7000}, ">"), "at most 32768 are compiled"),
        (within("<", {"lark_grammar": "root ::= x"}, ">"), "Rule 'x' not found"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_followed_is_refused(make_speller, grammar: Grammar, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)) as refused:
        make_speller("none").validate(request("a", grammar=grammar))
    assert refused.value.param == "grammar"
    assert "\n" not in str(refused.value)


def test_ends_cannot_be_ignored_with_a_grammar() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(grammar=GRAMMARS["regex"], ignore_eos=True)
    assert refused.value.param == "ignore_eos"


def test_pruned_trees_keep_their_shape() -> None:
    #      1 ── 3 ── 5
    # 0 ──┤    └ 4
    #      2
    tokens_of, parents_of = [[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]], [[0, 0, 1, 1, 3], [0, 1, 2, 0, 0]]
    tree = DraftTree(torch.tensor(tokens_of), torch.tensor(parents_of), (5, 3))
    pruned = tree.pruned(lambda index, *_: [[1, 3, 5], [1]][index])
    assert pruned.tokens.tolist() == [[11, 13, 15], [21, 0, 0]]
    assert pruned.parents.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert pruned.sizes == (3, 1)
    assert tree.pruned(lambda *_: []).num_rows == 1


def test_text_is_forced_up_to_the_middle_of_a_character(bundled: Grammars) -> None:
    # These characters share their first byte, and the two emoji all bytes but the last.
    for choices, shared in (
        ('"ø" | "Ù"', b"\xc3"),
        ('"so 🙂" | "so 🙃"', "so 🙂".encode()[:-1]),
        ('"so 🙂" | "so 🙂🙂"', "so 🙂".encode()),
    ):
        forced = bundled.follow(Grammar("lark", f"root ::= {choices}")).forced(15)
        assert spelled(forced) == shared


def test_of_a_long_text_that_is_forced_no_more_is_told_than_is_asked_for(bundled: Grammars) -> None:
    text = "one two three four " * 300
    whole = tokenizer().encode(text, add_special_tokens=False)
    matcher = bundled.follow(Grammar("lark", f'root ::= "{text}"'))
    assert matcher.forced(15) == whole[:15]
    assert matcher.forced(len(whole) + 5) == [*whole, END]


def test_texts_go_on_when_their_grammar_is_not_kept_any_more(bundled: Grammars) -> None:
    begun = [bundled.follow(Grammar("regex", f"[a-c]{{{number}}}")) for number in range(1, MOST_KEPT + 2)]
    a = tokenizer().convert_tokens_to_ids("a")
    for number, matcher in enumerate(begun, 1):
        assert all(matcher.accept(a) for _ in range(number)) and matcher.accept(END) and matcher.ended


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_whose_grammar_hits_a_limit_fails_alone(make_speller, temperature: float) -> None:
    asked = request("a", grammar=LONG_ROW, temperature=temperature)
    beside = [request(name, grammar=GRAMMARS["schema"], temperature=temperature) for name in "bc"]
    expected = tokens(run(make_speller("none", max_num_seqs=1), [asked, *beside]))
    for drafter in ("none", "ngram", "moa"):
        outputs = run(make_speller(drafter), [asked, *beside])
        assert tokens(outputs) == expected, drafter
        assert re.fullmatch("[b-d]{8}", texts(outputs)["a"])
        assert [outputs[name][-1].finish_reason for name in "abc"] == ["error", "stop", "stop"]


def test_a_grammar_whose_states_are_used_up_is_compiled_anew(bundled: Grammars, caplog: pytest.LogCaptureFixture) -> None:
    def until_it_fails(matcher: GrammarMatcher) -> int:
        draw = random.Random(1)
        for written in range(200):
            matcher.mask(torch.zeros(8192))
            if matcher.failed:
                return written
            assert matcher.accept(tokenizer().convert_tokens_to_ids(draw.choice("abcdef")))
        raise AssertionError("no limit was hit")

    first, beside = bundled.follow(OVERLAPPING), bundled.follow(OVERLAPPING)
    lasted = until_it_fails(first)
    assert lasted > 20
    after = bundled.follow(OVERLAPPING)
    assert until_it_fails(beside) < lasted  # it shares the first one's states
    assert until_it_fails(after) == until_it_fails(bundled.follow(OVERLAPPING)) == lasted
    assert "too many expressions" in caplog.text and "<state>" not in caplog.text


def test_objects_may_leave_out_far_more_than_rules(bundled: Grammars) -> None:
    whole = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(1000)}}
    last = '{"p998": null, "p999": null}'
    assert written(bundled.follow(Grammar("json_schema", json.dumps(whole))), last)
    assert written(bundled.follow(within("<", {"json_schema": whole}, ">")), f"<{last}>")
    matcher = bundled.follow(LONG_ROW)
    assert not written(matcher, "bcdbcdbcd!") and matcher.failed


def test_an_output_that_its_grammar_cannot_be_followed_through_is_refused(make_speller) -> None:
    b = ord("b") - 29
    given = Request("r", (10, 20), SamplingParams(50, grammar=LONG_ROW), output_token_ids=(b,) * 9)
    with pytest.raises(InvalidRequestError, match="too complex to be followed to token 8 of the output") as refused:
        make_speller("none").validate(given)
    assert refused.value.param == "grammar"


def test_a_text_that_leaves_its_grammar_has_ended(bundled: Grammars) -> None:
    matcher = bundled.follow(Grammar("regex", "a+"))
    assert matcher.accept(tokenizer().convert_tokens_to_ids("a")) and not matcher.accept(tokenizer().convert_tokens_to_ids("b"))
    assert matcher.ended and not matcher.failed
    assert not matcher.accept(tokenizer().convert_tokens_to_ids("a"))


def test_tokens_that_the_tokenizer_does_not_have_are_never_allowed() -> None:
    grammars = Grammars(tokenizer(), 8200, [END])
    scores = grammars.follow(Grammar("regex", r"(?s:.)*")).mask(torch.zeros(8200))
    assert scores[END] == 0 and scores[8000:8192].max() == 0 and scores[8192:].max() == float("-inf")


def test_added_tokens_that_are_none_of_the_special_ones_are_text() -> None:
    wider = copy(tokenizer())
    wider._tokenizer = Tokenizer.from_str(tokenizer()._tokenizer.to_str())
    wider.add_tokens(["<ß>", "éß"])
    grammars = Grammars(wider, 8194, [END])
    for text in ("<tool_call>", "<ß>", "éß"):
        (token,) = wider.encode(text, add_special_tokens=False)
        for spelling in ([token], [each for part in text for each in wider.encode(part, add_special_tokens=False)]):
            matcher = grammars.follow(Grammar("lark", f'start: "{text}"'))
            assert all(map(matcher.accept, [*spelling, END])), text


def test_a_tokenizer_that_does_not_tell_its_tokens_bytes_goes_without_grammars() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a")), eos_token="</s>")
    for known, vocab_size in ((words, 2), (tokenizer(), 8000)):
        with pytest.raises(InvalidRequestError, match="of which llguidance knows too little"):
            Texts(known, vocab_size, (1,)).check_grammar(Grammar("regex", "a"))


@pytest.mark.parametrize(
    ("schema", "text", "excluded"),
    [
        ({"type": "string", "pattern": "^(?!x)a"}, '"b"', "1"),
        ({"type": "string", "pattern": "a" * 3000}, '"b"', "1"),
        ({"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}, '["a", "a"]', '["b"]'),
        ({"type": "array", "items": {"type": "any"}}, '[1, "a"]', "{}"),
        ({"type": ["strng", {}]}, "1", "tru"),
        ({"type": "array", "items": {"$ref": "http://elsewhere"}}, "[{}]", "{}"),
        ({"type": "array", "items": {"$ref": "#/$defs/missing"}}, "[{}]", "{}"),
        ({"type": "object", "patternProperties": {"^a": {"type": "string"}, "^ab": {"type": "null"}}}, '{"abc": 1}', "[]"),
        ({"propertyNames": {"pattern": r"^a\b"}, "properties": {"a": {"type": "null"}}}, '{"a": null}', '{"a": 1}'),
        ({"properties": []}, "{}", "[]"),
        ({"not": {}}, "{}", "[]"),
    ],
    ids=str,
)
def test_of_a_schema_within_another_grammar_what_cannot_be_kept_is_passed_over(
    bundled: Grammars, schema: dict[str, object], text: str, excluded: str
) -> None:
    whole = {"type": "object", "properties": {"it": schema}, "required": ["it"]}
    grammar = within("<", {"json_schema": whole}, ">")
    assert written(bundled.follow(grammar), f'<{{"it": {text}}}>')
    if schema not in ({"not": {}}, {"properties": []}):  # of those nothing is left but that it is an object
        assert not written(bundled.follow(grammar), f'<{{"it": {excluded}}}>')


def test_every_end_may_end_a_text_and_one_is_drafted() -> None:
    grammars = Grammars(tokenizer(), 8192, [0, END])
    for end in (0, END):
        matcher = grammars.follow(Grammar("regex", "ab?"))
        assert (
            matcher.accept(tokenizer().convert_tokens_to_ids("a")) and matcher.allows(end) and matcher.accept(end) and matcher.ended
        )
    assert grammars.follow(Grammar("regex", "abc")).forced(9)[-1] == 0


@pytest.mark.parametrize(("tokenized", "said"), [(True, "names no token that ends a text"), (False, "has no tokenizer")])
def test_a_model_that_cannot_follow_a_grammar_writes_texts_and_says_why(tokenized: bool, said: str) -> None:
    texts = Texts(tokenizer() if tokenized else None, 8192, ())
    assert texts.begin(Request("r", (5, 6), SamplingParams(4)), 64).tokens == [5, 6]
    with pytest.raises(InvalidRequestError, match=said):
        texts.check_grammar(Grammar("lark", 'root ::= "a"'))
