"""What a drafter is told of, and what it need not know any more."""

from __future__ import annotations

import pytest

from tests.speculative.conftest import MakeEngine, request, run


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_of_requests_that_have_ended_are_not_told(make_engine: MakeEngine, max_tokens: int, window: int | None) -> None:
    """They would keep their hidden states, and hold up the drafts of those that come after them."""
    engine = make_engine(drafter="entry", draft_window=window)
    engine.telling.drafting = False
    run(engine, [request(str(number), [5, 9, 23, 41, number], max_tokens=max_tokens) for number in range(8)])
    assert not engine.telling.catch_up()
    (outputs,) = run(engine, [request("next", [5, 9, 23, 41], max_tokens=20, temperature=0.0)]).values()
    assert outputs[-1].stats.num_drafts


def test_what_was_gained_is_published_before_a_drafter_is_told_what_it_has_missed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes milliseconds, for which streams would wait."""
    engine = make_engine(drafter="entry")
    engine.telling.drafting = False
    engine.add(request("a", [5, 9, 23, 41], max_tokens=12, temperature=0.0))
    engine.step()
    order: list[str] = []
    assert engine.drafter is not None
    extend = engine.drafter.extend
    engine.before_pass = lambda: order.append("published")
    monkeypatch.setattr(engine.drafter, "extend", lambda tokens, cache: order.append("told") or extend(tokens, cache))
    engine.step()
    assert order == ["published", "told", "published", "told"]


@pytest.mark.parametrize("others", [0, 1])
def test_a_prompts_first_token_does_not_wait_for_the_drafter_to_be_told(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """But who comes next may begin alike, and finds all that there is to know."""
    engine = make_engine(drafter="entry")
    told: list[int] = []
    assert engine.drafter is not None
    extend = engine.drafter.extend
    monkeypatch.setattr(engine.drafter, "extend", lambda tokens, cache: told.append(len(tokens.token_ids)) or extend(tokens, cache))
    prompt = [5 + number for number in range(40)]
    for number in range(1 + others):
        engine.add(request(str(number), prompt, max_tokens=12, temperature=0.0))
    first, *_ = engine.step()
    assert len(first.new_token_ids) == 1
    assert told == [40] * others
    (sequence, *_) = engine.scheduler.running
    assert sequence.num_untold == (0 if others else 40)
    assert engine.scheduler.running[-1].num_cached == 32 * others
    engine.step()
    assert sum(told) >= 40 and not sequence.num_untold


@pytest.mark.parametrize("ending", ["length", "abort"])
def test_what_is_asked_for_one_token_is_kept_for_the_drafter_too(make_engine: MakeEngine, ending: str) -> None:
    """As a prompt is that is sent ahead, so that what follows need not be computed again."""
    engine = make_engine(drafter="entry")
    prompt = [5 + number for number in range(40)]
    engine.add(request("a", prompt, max_tokens=1 if ending == "length" else 12, temperature=0.0))
    engine.step()
    if ending == "abort":
        engine.abort("a")
    assert not engine.has_work
    engine.add(request("b", prompt, max_tokens=12, temperature=0.0))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert (sequence.num_cached, sequence.drafter_start) == (32, 0 if ending == "length" else 32)
