"""A tree drafted ahead is verified as far as the text has followed it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from speculative.remote.grafting import Graft, graft
from speculative.verification import verify_tree

#      0
#    1   2      tokens 5 6
#   3 4   5            7 8 7
#       6              9
TOKENS, PARENTS = [5, 6, 7, 8, 7, 9], [0, 0, 1, 1, 2, 4]


def test_nothing_came_since() -> None:
    assert graft(TOKENS, PARENTS, []) == Graft(tuple(TOKENS), tuple(PARENTS), (1, 2, 3, 4, 5, 6))


def test_the_text_went_down_the_tree() -> None:
    assert graft(TOKENS, PARENTS, [5]) == Graft((7, 8, 9), (0, 0, 2), (3, 4, 6))
    assert graft(TOKENS, PARENTS, [5, 8]) == Graft((9,), (0,), (6,))
    assert graft(TOKENS, PARENTS, [6, 7]) == Graft((), (), ())


def test_the_text_left_the_tree() -> None:
    assert graft(TOKENS, PARENTS, [9]) is None
    assert graft(TOKENS, PARENTS, [6, 7, 1]) is None
    assert graft([], [], [1]) is None


@given(st.data(), st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_verifying_late_gives_the_same_as_verifying_at_once(data: st.DataObject, text: list[int]) -> None:
    """The target says ``text``, whatever was drafted; some of it is known before the tree arrives."""
    tokens = data.draw(st.lists(st.integers(0, 2), max_size=12))
    parents = [data.draw(st.integers(0, node)) for node in range(len(tokens))]
    known = data.draw(st.integers(0, len(text) - 1))

    def verify(tokens: tuple[int, ...], parents: tuple[int, ...], text: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        say = iter(text)
        accepted = verify_tree(tokens, parents, lambda row: next(say), len(text))
        return accepted.rows, accepted.tokens

    rows, gained = verify(tuple(tokens), tuple(parents), text)
    late = graft(tokens, parents, text[:known])
    if late is None:
        assert len(gained) <= known
        return
    late_rows, more = verify(late.tokens, late.parents, text[known:])
    assert tuple(late.rows[row - 1] for row in late_rows) == rows[known:]
    assert tuple(late.path(more[: len(late_rows)])) == rows[known:]
    assert (*text[:known], *more) == gained or len(gained) <= known
