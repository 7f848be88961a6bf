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
    catch_up = engine.telling.catch_up
    engine.before_pass = lambda: order.append("published")
    monkeypatch.setattr(engine.telling, "catch_up", lambda: order.append("told") or catch_up())
    engine.step()
    assert order == ["published", "told", "published"]
