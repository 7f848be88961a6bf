"""Texts that were begun elsewhere: an engine goes on with them as if it had written all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from speculative.engine import Engine
from speculative.errors import ContextLengthError, InvalidRequestError
from speculative.request import Grammar, OfferedTree, Request, RequestOutput, SamplingParams
from tests.speculative.conftest import N0, MakeEngine, request, run, tokens
from tests.speculative.test_engine import mixed_requests

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": ((7, 2.0), (9, -3.0))}


def given(whole: Request, output: list[int], name: str, **fields: object) -> Request:
    return replace(whole, request_id=name, output_token_ids=tuple(output), **fields)


def text_of(engine: Engine, each: Request) -> tuple[str, RequestOutput]:
    (series,) = run(engine, [each]).values()
    return "".join(output.text_delta for output in series), series[-1]


@pytest.mark.parametrize("extra", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("drafter", ["none", "moa", "entry and block", "paired", "paired block", "eagle3"])
def test_the_rest_is_the_same(make_engine: MakeEngine, drafter: str, extra: dict[str, object]) -> None:
    wholes = {each.request_id: each for each in mixed_requests(**extra)}
    expected = tokens(run(make_engine(N0, "none"), list(wholes.values())))
    engine = make_engine(N0, drafter, max_num_seqs=12, prefill_chunk=9)
    cuts = ((1, 11), (2, 18))  # for one text these, for the next those
    parts = [given(each, expected[name][:cut], f"{name} {cut}") for name, each in wholes.items() for cut in cuts[int(name) % 2]]
    for name, rest in tokens(run(engine, parts)).items():
        whole, cut = name.split()
        assert rest == expected[whole][int(cut) :]


def test_log_probabilities_are_told_of_the_prompt_and_of_what_is_new(make_engine: MakeEngine) -> None:
    whole = request("a", list(range(3, 20)), max_tokens=12, temperature=0.7, seed=1, logprobs=2, prompt_logprobs=1)
    engine = make_engine(N0, "moa", prefill_chunk=6)
    (series,) = run(engine, [whole]).values()
    told = [each for output in series for each in output.logprobs or ()]
    of_prompt = [each for output in series for each in output.prompt_logprobs or ()]
    (rest,) = run(engine, [given(whole, [each.token_id for each in told[:5]], "b")]).values()
    again = [each for output in rest for each in output.logprobs or ()]
    assert [each.token_id for each in again] == [each.token_id for each in told[5:]]
    assert [each.logprob for each in again] == pytest.approx([each.logprob for each in told[5:]], abs=1e-4)
    prompt_again = [each.logprob for output in rest for each in output.prompt_logprobs or ()]
    assert prompt_again == pytest.approx([each.logprob for each in of_prompt], abs=1e-4)
    assert rest[-1].stats.prompt_tokens == 17 and rest[-1].stats.completion_tokens == 7


def test_what_is_told_while_a_prompt_is_read_has_no_part_of_its_log_probabilities(make_engine: MakeEngine) -> None:
    whole = request("a", list(range(3, 40)), max_tokens=0, prompt_logprobs=1)
    (series,) = run(make_engine(N0, "moa", prefill_chunk=6), [replace(whole, remote=True, memory="int8")]).values()
    *reading, last = series
    assert len(reading) > 3 and all(output.memory is not None and output.prompt_logprobs is None for output in reading)
    assert [each.token_id for each in last.prompt_logprobs or ()] == list(range(4, 40))


def test_text_goes_on_where_the_caller_is(make_speller) -> None:
    engine = make_speller()
    whole = request("a", [5, 9, 2], max_tokens=40, temperature=0.9, seed=3)
    text, _ = text_of(engine, whole)
    ids = [token for output in run(engine, [replace(whole, request_id="ids")])["ids"] for token in output.new_token_ids]
    for cut in (1, 7, 39):
        has = len(text_of(engine, given(whole, ids[:cut], f"none {cut}"))[0])
        assert has == len(text)
        rest, last = text_of(engine, given(whole, ids[:cut], f"some {cut}", text_length=1))
        assert rest == text[1:] and last.finish_reason == "length"


def test_grammar_and_stops_hold_for_the_whole(make_speller) -> None:
    engine = make_speller()
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5, grammar=Grammar("regex", "(ab|ba){4,9}"))
    whole = Request("a", (5, 9, 2), params)
    (series,) = run(engine, [whole]).values()
    ids = [token for output in series for token in output.new_token_ids]
    text = "".join(output.text_delta for output in series)
    for cut in range(1, len(ids) - 1, 3):
        assert text_of(engine, given(whole, ids[:cut], f"cut {cut}"))[0] == text
    with pytest.raises(InvalidRequestError, match="token 0 of the output cannot follow"):
        engine.validate(given(whole, [9], "x"))
    with pytest.raises(InvalidRequestError, match="has ended with its token"):
        engine.validate(given(whole, ids, "y"))


def test_outputs_that_leave_nothing_to_do_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(N0, "none")
    whole = Request("a", (1, 2), SamplingParams(max_tokens=3, stop_token_ids=(9,)))
    with pytest.raises(InvalidRequestError, match="has 3 tokens already"):
        engine.add(given(whole, [4, 4, 4], "b"))
    with pytest.raises(InvalidRequestError, match="has ended with its token 1"):
        engine.add(given(whole, [4, 9], "c"))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        engine.add(given(whole, [160], "d"))
    with pytest.raises(ContextLengthError, match="prompt and output have 128"):
        engine.add(given(replace(whole, params=SamplingParams()), [4] * 126, "e"))
    with pytest.raises(InvalidRequestError, match="0 characters so far, not 3"):
        engine.add(replace(whole, request_id="f", text_length=3))
    assert not engine.has_work


def test_a_remote_text_goes_on_with_trees(make_engine: MakeEngine) -> None:
    whole = request("a", [5, 9, 2], max_tokens=30, temperature=0.8, seed=3)
    (expected,) = tokens(run(make_engine(N0, "none"), [whole])).values()
    engine = make_engine(N0, "moa")
    engine.add(given(replace(whole, remote=True, memory="int8"), expected[:10], "b"))
    (first,) = engine.step()
    assert list(first.new_token_ids) == expected[10:11] and first.memory is not None
    assert first.memory.first == 0
    engine.offer("b", OfferedTree(14, tuple(expected[11:15]), (0, 1, 2, 3)))
    (second,) = engine.step()
    assert list(second.new_token_ids) == expected[11:16]
