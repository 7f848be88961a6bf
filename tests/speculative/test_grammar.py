"""Grammars: every text follows its own, the same with speculation on and off, in fewer passes where it has no choice."""

from __future__ import annotations

import json
import re

import pytest
import torch

from models.loader import BUNDLED, load_tokenizer
from speculative.errors import InvalidRequestError
from speculative.grammar import Grammars
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
    "ebnf": Grammar("ebnf", 'root ::= "The answer is " number "."\nnumber ::= [0-9] | [0-9] number'),
    "choice": Grammar("ebnf", 'root ::= "yes, please" | "no, thank you" | "yes, but later"'),
}


def tagged(content: dict[str, object]) -> Grammar:
    """Something within a structural tag."""
    tag = {"type": "tag", "begin": "<", "content": {"type": "or", "elements": [content]}, "end": ">"}
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))


SAMPLING = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.3, "top_k": 40}]


def request(name: str, **params: object) -> Request:
    return Request(name, (10, 20, 30, ord(name) % 90), SamplingParams(**{"max_tokens": 100, "seed": 5, **params}))  # type: ignore[arg-type]


Outputs = dict[str, list[RequestOutput]]


def texts(outputs: Outputs) -> dict[str, str]:
    return {name: "".join(output.text_delta for output in series) for name, series in outputs.items()}


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_output_is_the_same_with_speculation_on_and_off(make_speller, sampling: dict[str, object]) -> None:
    requests = [request(name, grammar=grammar, **sampling) for name, grammar in zip("abcd", GRAMMARS.values(), strict=True)]
    requests += [request("e", grammar=GRAMMARS["schema"], **sampling), request("f", **sampling)]  # the last one is free
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
    requests += [request("e", grammar=GRAMMARS["ebnf"], temperature=temperature)]
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


def test_json_inside_of_tags_is_written_in_one_way_too(make_speller) -> None:
    call = {"type": "tag", "begin": "call ", "content": {"type": "json_schema", "json_schema": BOOKING}, "end": " now"}
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": call}))
    asked = request("a", grammar=grammar, temperature=1.2)
    plain, drafted = run(make_speller("none"), [asked]), run(make_speller("ngram"), [asked])
    text = texts(plain)["a"]
    assert text == texts(drafted)["a"] == f"call {json.dumps(json.loads(text[5:-4]))} now"
    assert drafted["a"][-1].stats.num_target_calls < 0.7 * plain["a"][-1].stats.num_target_calls


def test_counted_strings_inside_of_tags_are_json_too() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    grammar = tagged({"type": "json_schema", "json_schema": {"type": "string", "maxLength": 4}})
    for text, fits in ((r'<"a\tb">', True), ('<"a\tb">', False), (r'<"a\"bc">', True), (r'<"a\"bcd">', False)):
        matcher = grammars.follow(grammar)
        assert all(map(matcher.accept, tokenizer.encode(text, add_special_tokens=False))) == fits, text


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
    asked = request("a", grammar=Grammar("ebnf", 'root ::= "no é"'), temperature=temperature)
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
        (Grammar("regex", "a["), "Unclosed"),
        (Grammar("ebnf", "start ::= x"), "root"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", '{"type": "colour"}'), "colour"),
        (Grammar("json_schema", '{"not": {}}'), "'not'"),
        (Grammar("json_schema", "false"), "cannot accept any value"),
        (Grammar("structural_tag", "{}"), "format"),
        (Grammar("regex", "a?" * 1000), "at most"),
        (Grammar("json_schema", json.dumps({"type": "string", "pattern": "a?" * 1000})), "2000 characters, and at most 1024"),
        (tagged({"type": "regex", "pattern": "a?" * 1000}), "2000 characters, and at most 1024"),
        (tagged({"type": "grammar", "grammar": "root ::= " + '"a"? ' * 2000}), "10009 characters, and at most 8192"),
        (tagged({"type": "json_schema", "json_schema": {"type": "string", "pattern": "a?" * 1000}}), "2000 characters, and"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused(make_speller, grammar: Grammar, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)) as refused:
        make_speller("none").validate(request("a", grammar=grammar))
    assert refused.value.param == "grammar"
    assert ".cc:" not in str(refused.value)


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


def test_text_that_is_forced_up_to_the_middle_of_a_character_is_left_to_the_drafter() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    # These characters share their first byte, and the two emoji all bytes but the last.
    for choices, following in (('"ø" | "Ù"', []), ('"so 🙂" | "so 🙃"', [])):
        assert grammars.follow(Grammar("ebnf", f"root ::= {choices}")).forced(15) == following
    assert tokenizer.decode(grammars.follow(Grammar("ebnf", 'root ::= "so 🙂" | "so 🙂🙂"')).forced(15)) == "so 🙂"


def test_of_a_long_text_that_is_forced_no_more_is_looked_at_than_is_asked_for() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    text = "one two three four " * 300
    whole = tokenizer.encode(text, add_special_tokens=False)
    matcher = grammars.follow(Grammar("ebnf", f'root ::= "{text}"'))
    assert matcher.forced(15) == whole[:15]
    assert matcher.forced(len(whole) + 5) == [*whole, tokenizer.eos_token_id]


def test_so_many_grammars_are_kept_whatever_they_count_and_texts_go_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculative.grammar.MOST_KEPT", 4)
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    grammars = Grammars(tokenizer, len(tokenizer), [END])
    begun = [grammars.follow(Grammar("regex", f"[a-c]{{{number}}}")) for number in range(1, 5)]
    full = grammars._compiler.get_cache_size_bytes()
    grammars.follow(Grammar("regex", "[a-c]{4}"))
    assert grammars._compiler.get_cache_size_bytes() == full > 0
    grammars.follow(Grammar("regex", "[a-c]{5}"))
    assert 0 < grammars._compiler.get_cache_size_bytes() < full
    a = tokenizer.convert_tokens_to_ids("a")
    for number, matcher in enumerate(begun, 1):
        assert all(matcher.accept(a) for _ in range(number)) and matcher.accept(END) and matcher.ended


@pytest.mark.parametrize(("tokenized", "said"), [(True, "names no token that ends a text"), (False, "has no tokenizer")])
def test_a_model_that_cannot_follow_a_grammar_writes_texts_and_says_why(tokenized: bool, said: str) -> None:
    tokenizer = load_tokenizer(BUNDLED["target"]) if tokenized else None
    texts = Texts(tokenizer, 8192, ())
    assert texts.begin(Request("r", (5, 6), SamplingParams(4)), 64).tokens == [5, 6]
    with pytest.raises(InvalidRequestError, match=said):
        texts.check_grammar(Grammar("ebnf", 'root ::= "a"'))
