"""What is handed out of a text that was written alone for a while, once the server speaks again."""

from speculative.edge.published import News, Published
from speculative.edge.session import Gain
from speculative.remote.frames import Stats
from speculative.request import FinishReason, RequestOutput, RequestStats, Written


def gain(tokens: tuple[int, ...], text: str, finish_reason: FinishReason | None = None) -> Gain:
    return Gain(tokens, 0, 0, text, finish_reason, None, None, Stats(0.0, 1, 0, 0, 0))


def written_alone() -> Published:
    """Two tokens of the server's, and three of the drafter's."""
    published = Published()
    assert published.take(gain((1, 2), "ab"), 2, revise=True) == News((1, 2), "ab")
    for token, text in ((3, "c"), (4, "d"), (5, "e")):
        published.write_alone(RequestOutput("one", (token,), text, None, RequestStats()))
    return published


def test_what_turns_out_right_is_not_told_again() -> None:
    published = written_alone()
    assert published.take(gain((3, 4), "cd"), 4, revise=True) == News((), "")
    assert published.take(gain((5, 6), "ef"), 6, revise=True) == News((6,), "f")
    assert (published.told, published.ahead, published.num_offline, published.num_corrected) == ("abcdef", [], 3, 0)


def test_what_turns_out_wrong_is_replaced_from_the_first_difference() -> None:
    published = written_alone()
    assert published.take(gain((3, 9), "cx"), 4, revise=True) == News((9,), "x", Written(False, 3, 3))
    assert (published.told, published.ahead, published.num_corrected) == ("abcx", [], 2)


def test_an_end_before_its_time_takes_back_what_was_written_behind_it() -> None:
    published = written_alone()
    assert published.take(gain((3,), "c", "stop"), 3, revise=True) == News((), "", Written(False, 3, 3))
    assert published.told == "abc" and published.num_corrected == 2


def test_what_may_not_be_revised_is_kept() -> None:
    published = written_alone()
    assert published.take(gain((3, 9), "cx"), 4, revise=False) is None
    assert published.keep() == [3, 4, 5]
    assert (published.told, published.verified, published.ahead, published.num_corrected) == ("abcde", "abcde", [], 0)


def test_a_replacement_begins_where_a_token_does_even_if_both_begin_alike() -> None:
    published = Published()
    for token, text in ((1, "The"), (2, ""), (3, " cat")):  # the second makes no text certain
        published.write_alone(RequestOutput("one", (token,), text, None, RequestStats()))
    assert published.take(gain((1,), "The"), 1, revise=True) == News((), "")
    assert published.take(gain((2, 4), " car"), 3, revise=True) == News((4,), " car", Written(False, 2, 3))
