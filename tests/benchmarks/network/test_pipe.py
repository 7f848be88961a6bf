"""The model of a link, in virtual time."""

from __future__ import annotations

import random

import pytest

from benchmarks.network.links import LINKS, Link
from benchmarks.network.pipe import HEADERS, SEGMENT, Pipe

DELAYED = Link("delayed", rtt=0.2)
# 12,000 bits a second: a full segment of 1,500 bytes with its headers takes one second.
NARROW = Link("narrow", rtt=0.2, rate=12e3)


class Losing(random.Random):
    """Loses the segments whose numbers it is told, counted as they are sent; one that is named twice is lost twice."""

    def __init__(self, *lost: int) -> None:
        super().__init__(0)
        self._lost, self._now = list(lost), 0

    def random(self) -> float:
        if self._now in self._lost:
            self._lost.remove(self._now)
            return 0.0
        self._now += 1
        return 1.0


def lossy(*lost: int) -> Pipe:
    return Pipe(Link("lossy", rtt=0.2, loss=0.5), Losing(*lost))


def arrivals(pipe: Pipe) -> list[tuple[float, bytes]]:
    """When each piece can be taken, in order."""
    taken: list[tuple[float, bytes]] = []
    while (when := pipe.next_arrival()) is not None:
        taken += [(pytest.approx(when), data) for data in pipe.take(when)]
    return taken


def test_bytes_arrive_half_a_round_trip_later_and_not_before() -> None:
    pipe = Pipe(DELAYED, random.Random(0))
    pipe.send(5.0, b"here")
    assert pipe.take(5.0999) == []
    assert pipe.take(5.1001) == [b"here"]
    assert pipe.next_arrival() is None


def test_segments_take_the_link_one_after_the_other_headers_included() -> None:
    pipe = Pipe(NARROW, random.Random(0))
    pipe.send(0.0, bytes(2 * SEGMENT + 23))
    first, second, rest = arrivals(pipe)
    assert (first[0], len(first[1])) == (1.1, SEGMENT)
    assert (second[0], len(second[1])) == (2.1, SEGMENT)
    assert (rest[0], len(rest[1])) == (2.1 + 8 * (23 + HEADERS) / 12e3, 23)


def test_what_is_sent_while_the_link_is_busy_waits_and_later_on_it_is_free() -> None:
    pipe = Pipe(NARROW, random.Random(0))
    pipe.send(0.0, bytes(SEGMENT))
    pipe.send(0.5, bytes(SEGMENT))
    pipe.send(9.0, bytes(SEGMENT))
    assert [when for when, _ in arrivals(pipe)] == [1.1, 2.1, 10.1]


def test_the_end_arrives_behind_everything() -> None:
    pipe = Pipe(NARROW, random.Random(0))
    pipe.send(0.0, bytes(SEGMENT))
    pipe.close(0.0)
    assert [len(data) for _, data in arrivals(pipe)] == [SEGMENT, 0]


def test_a_lost_segment_with_nothing_behind_it_waits_for_the_timeout() -> None:
    pipe = lossy(0)
    pipe.send(0.0, b"a")
    assert arrivals(pipe) == [(0.2 + 0.2 + 0.1, b"a")]


def test_lost_again_the_timeout_doubles() -> None:
    pipe = lossy(0, 0, 0)
    pipe.send(0.0, b"a")
    assert arrivals(pipe) == [(0.4 + 0.8 + 1.6 + 0.1, b"a")]


def test_three_segments_behind_prove_a_loss_and_all_of_them_wait_for_it() -> None:
    pipe = lossy(0)
    for number in range(5):
        pipe.send(0.01 * number, str(number).encode())
    # Word of the third is back at 0.03 + 0.2; what was lost then takes half a round trip.
    assert arrivals(pipe) == [(0.33, str(number).encode()) for number in range(5)]


def test_one_segment_behind_proves_it_a_quarter_of_a_round_trip_later() -> None:
    pipe = lossy(0)
    pipe.send(0.0, b"a")
    pipe.send(0.04, b"b")
    assert arrivals(pipe) == [(0.04 + 0.2 + 0.05 + 0.1, b"a"), (0.39, b"b")]


def test_segments_that_are_lost_prove_nothing() -> None:
    pipe = lossy(0, 1)
    pipe.send(0.0, b"a")
    pipe.send(0.0, b"b")
    assert arrivals(pipe) == [(0.5, b"a"), (0.5, b"b")]


def test_as_many_segments_are_lost_as_the_link_says_and_all_bytes_arrive_in_order() -> None:
    pipe = Pipe(LINKS["poor"], random.Random(7))
    sent = [number.to_bytes(2, "little") for number in range(4000)]
    for number, data in enumerate(sent):
        pipe.send(number * 0.01, data)
    assert [data for _, data in arrivals(pipe)] == sent
    # 2% of 4,000 with a deviation of 9, some of them more than once.
    assert 45 < pipe.num_lost < 125
    assert pipe.num_bytes == 8000 and pipe.num_wire_bytes == (4000 + pipe.num_lost) * (2 + HEADERS)
    assert pipe.queued == 0


def test_the_same_seed_loses_the_same_segments() -> None:
    runs = []
    for _ in range(2):
        pipe = Pipe(LINKS["poor"], random.Random(3))
        for number in range(2000):
            pipe.send(number * 0.01, b"x")
        runs.append([pipe.next_arrival(), pipe.num_lost])
    assert runs[0] == runs[1]


def test_a_link_says_what_it_is() -> None:
    assert LINKS["4g"].describe() == "4g: 60 ms round trip, 20 Mbit/s, 0.5% loss"
    assert LINKS["lan"].describe() == "lan: not shaped" and not LINKS["lan"].shaped
    assert LINKS["poor"].as_dict() == {"name": "poor", "rtt_ms": 200.0, "rate_mbit": 2.0, "loss": 0.02}
