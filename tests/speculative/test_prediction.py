"""Predicted outputs: the same answer in fewer passes, however wrong the prediction is."""

from __future__ import annotations

import random

import pytest

from speculative.prediction import FIRST, LONGEST, Prediction
from speculative.request import Request, SamplingParams
from tests.speculative.conftest import N0, N1, MakeEngine, run, tokens

PROMPTS = [[5, 9], list(range(100, 140))]
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.9, "top_k": 50}


def predicted(name: str, prompt: list[int], prediction: list[int], **params: object) -> Request:
    given = {"max_tokens": 80, "seed": 4, **params}
    return Request(name, tuple(prompt), SamplingParams(ignore_eos=True, **given), prediction=tuple(prediction))  # type: ignore[arg-type]


def wrong_here_and_there(answer: list[int]) -> dict[str, list[int]]:
    """Predictions of an answer, from perfect to useless."""
    chance = random.Random(0)
    return {
        "perfect": answer,
        "longer": answer + answer[:30],
        "substituted": [token if place % 17 else 3 for place, token in enumerate(answer)],
        "cut out": answer[:20] + answer[33:],
        "inserted": [*answer[:20], 1, 2, 3, 4, 5, *answer[20:]],
        "shuffled": chance.sample(answer, len(answer)),
        "one token": answer[:1],
        "unrelated": [chance.randrange(160) for _ in range(50)],
    }


@pytest.mark.parametrize(
    ("folder", "drafter", "sampling", "slots"),
    [
        (N0, "moa", GREEDY, 20),
        (N0, "moa", DRAWN, 2),
        (N0, "ngram", DRAWN, 20),
        (N0, "entry and block", GREEDY, 7),
        (N0, "eagle3", DRAWN, 7),
        (N1, "moa", GREEDY, 7),
    ],
)
def test_a_prediction_changes_nothing_but_speed(
    make_engine: MakeEngine, folder, drafter: str, sampling: dict[str, object], slots: int
) -> None:
    plain = make_engine(folder, "none", max_num_seqs=1)
    answers = {n: tokens(run(plain, [predicted(str(n), prompt, [], **sampling)]))[str(n)] for n, prompt in enumerate(PROMPTS)}
    requests, expected = [], {}
    for n, prompt in enumerate(PROMPTS):
        for kind, prediction in wrong_here_and_there(answers[n]).items():
            requests.append(predicted(f"{n} {kind}", prompt, prediction, **sampling))
            expected[f"{n} {kind}"] = answers[n]
        # Beside them, requests that predict nothing, and one that is not to speculate.
        requests.append(predicted(f"{n} none", prompt, [], **sampling))
        requests.append(predicted(f"{n} plain", prompt, answers[n], speculative=False, **sampling))
        expected |= {f"{n} none": answers[n], f"{n} plain": answers[n]}
    outputs = run(make_engine(folder, drafter, max_num_seqs=slots, prefill_chunk=9), requests)
    assert tokens(outputs) == expected
    for n in range(len(PROMPTS)):
        assert outputs[f"{n} plain"][-1].stats.num_draft_tokens == 0
        stats = outputs[f"{n} perfect"][-1].stats
        assert (stats.num_accepted_prediction_tokens, stats.num_rejected_prediction_tokens) == (80, 0)
        # 1 + 16, 1 + 32, and the rest.
        assert stats.num_target_calls <= 3 + -(-len(PROMPTS[n]) // 9)


def test_a_prediction_ends_with_the_context(make_engine: MakeEngine) -> None:
    plain = make_engine(N0, "none", max_model_len=64)
    prompt = list(range(3, 20))
    answer = tokens(run(plain, [predicted("r", prompt, [], max_tokens=None, temperature=0.0)]))["r"]
    assert len(answer) == 64 - 17
    engine = make_engine(N0, "moa", max_model_len=64)
    request = predicted("r", prompt, answer + answer, max_tokens=None, temperature=0.0)
    assert tokens(run(engine, [request]))["r"] == answer


def test_drafts_grow_while_they_hold_and_begin_anew() -> None:
    prediction = Prediction(range(1000, 1500))
    lengths = []
    for _ in range(4):
        draft = prediction.draft(10_000)
        lengths.append(len(draft))
        prediction.follow([*draft, draft[-1] + 1])
    assert lengths == [FIRST, 2 * FIRST, LONGEST, LONGEST]
    prediction.follow([1, 2])
    assert prediction.draft(100) == []
    prediction.follow([1300, 1301, 1302])
    assert prediction.draft(100) == list(range(1303, 1303 + FIRST))
    assert prediction.draft(5) == list(range(1303, 1308))
    assert prediction.accepted + prediction.rejected == 500
    assert prediction.accepted == FIRST + 2 * FIRST + 2 * LONGEST + 4 + 3


def test_text_is_found_again_where_it_was_left_rather_than_before() -> None:
    prediction = Prediction([1, 2, 3, 10, 11, 1, 2, 3, 20, 21])
    prediction.follow([1, 2, 3, 10, 9, 9])
    prediction.follow([1, 2, 3])
    assert prediction.draft(9) == [20, 21]
    prediction.follow([7, 1, 2, 3])
    assert prediction.draft(9) == [10, 11, 1, 2, 3, 20, 21]


def test_what_an_answer_leaves_out_is_rejected() -> None:
    prediction = Prediction(range(10))
    prediction.follow([0, 1, 2, 77, 5, 6, 7])
    assert (prediction.accepted, prediction.rejected) == (6, 4)
