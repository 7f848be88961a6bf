"""What choices have cost, together."""

import random
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

import pytest

from app.usage import Edge, ResponseMetrics, Totals, Usage
from speculative.request import EdgeStats, RequestStats


def made(draw: random.Random, edge: bool) -> RequestStats:
    """A choice at any time of its life; its histogram ends with a verification, as an engine's do."""
    first = draw.choice([None, draw.uniform(1, 5)])
    return RequestStats(
        prompt_tokens=draw.randrange(9),
        completion_tokens=draw.randrange(9),
        cached_tokens=draw.randrange(9),
        num_drafts=draw.randrange(9),
        num_draft_tokens=draw.randrange(9),
        num_accepted_draft_tokens=draw.randrange(9),
        num_target_calls=draw.randrange(9),
        num_accepted_prediction_tokens=draw.randrange(2),
        num_rejected_prediction_tokens=draw.randrange(2),
        acceptance_histogram=(*(draw.randrange(3) for _ in range(draw.randrange(4))), 1) if draw.randrange(4) else (),
        first_token_time=first,
        last_token_time=None if first is None else first + draw.uniform(0, 5),
        edge=EdgeStats(*(draw.randrange(9) for _ in range(6))) if edge and draw.randrange(2) else None,
    )


def usage(choices: list[RequestStats], n: int) -> dict[str, Any]:
    """Added up choice by choice."""
    prompt, completion = sum(each.prompt_tokens for each in choices[::n]), sum(each.completion_tokens for each in choices)
    accepted = sum(each.num_accepted_prediction_tokens for each in choices)
    rejected = sum(each.num_rejected_prediction_tokens for each in choices)
    predicted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected} if accepted + rejected else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in choices[::n])},
        "completion_tokens_details": {"reasoning_tokens": 0, **predicted},
    }


def metrics(choices: list[RequestStats]) -> dict[str, Any]:
    """Added up choice by choice."""
    steps, drafted = sum(each.num_drafts for each in choices), sum(each.num_draft_tokens for each in choices)
    accepted = sum(each.num_accepted_draft_tokens for each in choices)
    first = [each.first_token_time for each in choices if each.first_token_time is not None]
    last = [each.last_token_time for each in choices if each.last_token_time is not None]
    elapsed = max(last) - min(first) if first and last else 0.0
    later = sum(max(each.completion_tokens - 1, 0) for each in choices)
    speed = choices[0].tokens_per_second if len(choices) == 1 else later / elapsed if elapsed else 0.0
    edges = [asdict(each.edge) for each in choices if each.edge is not None]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": [
                sum(counts) for counts in zip_longest(*(each.acceptance_histogram for each in choices), fillvalue=0)
            ],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": accepted + steps,
            "num_target_calls": sum(each.num_target_calls for each in choices),
            "tokens_per_second": speed,
        },
        **({"edge": {name: sum(edge[name] for edge in edges) for name in Edge.model_fields}} if edges else {}),
    }


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize(("count", "n"), [(1, 1), (3, 1), (6, 2), (6, 6)])
def test_totals_are_those_of_the_choices_at_any_time(count: int, n: int, edge: bool) -> None:
    draw = random.Random(count + n)
    choices = [RequestStats(prompt_tokens=draw.randrange(9)) for _ in range(count)]
    totals = Totals(choices, n)
    for _ in range(200):
        for _ in range(draw.randrange(4)):
            index = draw.randrange(count)
            choices[index] = made(draw, edge)  # whatever it was: numbers and times may also become less
            totals.put(index, choices[index])
        told = totals.usage().model_dump(exclude_unset=True), totals.metrics().model_dump(exclude_unset=True)
        assert told == (usage(choices, n), metrics(choices))
        assert told == (
            Usage.of(choices, n).model_dump(exclude_unset=True),
            ResponseMetrics.of(choices).model_dump(exclude_unset=True),
        )


class Watched(RequestStats):
    """Says how often it has been looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Watched.looks += name == "completion_tokens"
        return super().__getattribute__(name)


def test_a_choice_is_not_counted_again_for_another() -> None:
    written = RequestStats(completion_tokens=3, first_token_time=1.0, last_token_time=2.0)
    totals = Totals([written, *(Watched(completion_tokens=2, first_token_time=1.0, last_token_time=3.0) for _ in range(100))])
    totals.metrics()
    Watched.looks = 0
    totals.put(0, replace(written, completion_tokens=4, last_token_time=4.0))
    assert totals.usage().completion_tokens == 204
    assert totals.metrics().speculative_decoding.tokens_per_second == pytest.approx((3 + 100) / 3)
    assert not Watched.looks
