"""What is said of acceptance."""

import pytest

from benchmarks.acceptance import Acceptance, summarize


@pytest.mark.parametrize(
    ("by_depth", "drafted", "said"),
    [
        ((0.5, 0.25), 8, "τ 1.00; accepted at depth 1, 2, …: 50% 25%"),
        ((), 8, "τ 1.00; no draft was accepted"),
        ((), 0, "τ 1.00; nothing was drafted"),
    ],
)
def test_a_line_ends_with_what_it_promises(by_depth: tuple[float, ...], drafted: int, said: str) -> None:
    assert Acceptance(1.0, by_depth, target_passes=4, drafted=drafted, accepted=0).line() == said


def test_no_requests_are_nothing_drafted() -> None:
    assert summarize([]).line() == "τ 1.00; nothing was drafted"
