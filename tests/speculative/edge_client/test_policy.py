"""How much is drafted, by what it costs."""

from itertools import pairwise

import pytest

from speculative.edge.measuring import Line, RoundTrip
from speculative.edge.policy import EdgePolicy, Exchange
from speculative.policy import DraftShape

LARGEST = DraftShape(8, 8, 64)


def policy(round_trip: float, bytes_per_second: float, per_node: float = 0.0005, batch_size: int = 1) -> EdgePolicy:
    """After a hundred exchanges over such a network; levels take 2 ms, and a verification 10 ms and something for each node."""
    made = EdgePolicy()
    for number in range(100):
        nodes, size = 4 + number % 13, 300 + 40 * (number % 7)
        server = 0.01 + per_node * nodes
        made.drafted(8, 0.016)
        waited = round_trip + size / bytes_per_second + server
        made.exchanged(Exchange(nodes, size, waited, server, batch_size))
        made.gained(4, 0.016 + waited)
    return made


def test_before_anything_is_known_all_is_tried() -> None:
    assert EdgePolicy().shape(LARGEST) == LARGEST


def test_the_slower_the_way_the_more_is_worth_trying() -> None:
    shapes = [policy(round_trip, 1e6).shape(LARGEST) for round_trip in (0.0005, 0.02, 0.1, 0.3)]
    for near, far in pairwise(shapes):
        assert near.min_reach > far.min_reach and near.min_probability >= far.min_probability
    assert (shapes[0].depth, shapes[0].breadth, shapes[0].nodes) == (8, 8, 64)


def test_nodes_pay_for_their_bytes_and_for_their_verification() -> None:
    narrow, wide = policy(0.05, 2_000), policy(0.05, 1e7)
    assert narrow.shape(LARGEST).min_probability > wide.shape(LARGEST).min_probability
    assert policy(0.05, 1e7, per_node=0.002).shape(LARGEST).min_probability > wide.shape(LARGEST).min_probability


def test_on_a_busy_server_nodes_pay_for_all_who_wait() -> None:
    alone, busy = (policy(0.02, 1e9, batch_size=size).shape(LARGEST) for size in (1, 4))
    assert busy.min_probability == pytest.approx(4 * alone.min_probability, rel=0.01)
    assert busy.min_reach == alone.min_reach


def test_what_a_node_costs_is_found_out_however_much_is_drafted() -> None:
    made = EdgePolicy()
    for _ in range(64):
        nodes = made.shape(LARGEST).nodes
        made.drafted(8, 0.016)
        made.exchanged(Exchange(nodes, 300, 0.05 + 0.002 * nodes, 0.01 + 0.002 * nodes))
        made.gained(4, 0.066 + 0.002 * nodes)
    shapes = [made.shape(LARGEST) for _ in range(8)]
    assert sorted(shape.nodes for shape in shapes) == [16] + [64] * 7
    assert shapes[0].min_probability == pytest.approx(made.tokens_per_second * 0.002, rel=0.1)


def test_a_level_is_drafted_while_it_pays() -> None:
    made = policy(0.05, 1e9)
    rate = made.tokens_per_second
    assert rate == pytest.approx(4 / (0.05 + 0.016 + 0.01 + 0.0005 * 10), rel=0.05)
    assert made.shape(LARGEST).min_reach == pytest.approx(rate * 0.002)


def test_what_may_follow_is_drafted_where_a_round_trip_leaves_time_for_it() -> None:
    assert EdgePolicy().ahead(LARGEST) is None
    near, far = policy(0.0001, 1e9, per_node=0.0), policy(0.1, 1e9)
    assert near.ahead(LARGEST) is None
    ahead = far.ahead(LARGEST)
    assert ahead is not None and ahead.nodes == 64
    assert ahead.min_reach <= far.shape(LARGEST).min_reach and ahead.min_probability <= far.shape(LARGEST).min_probability


def test_a_line_finds_its_slope_and_says_nothing_of_slopes_it_cannot_know() -> None:
    line = Line()
    for size in (1, 5, 3, 9, 2, 7) * 20:
        line.add(size, 0.5 + 0.25 * size)
    assert line.slope == pytest.approx(0.25)
    same = Line()
    for _ in range(10):
        same.add(4, 1.0)
    assert same.slope == 0.0


def test_round_trips_are_smoothed() -> None:
    trip = RoundTrip()
    for seconds in (0.1, 0.1, 0.3):
        trip.add(seconds)
    assert trip.smoothed == pytest.approx(0.125)
    assert trip.deviation == pytest.approx(((0.1 / 2) * 3 / 4) * 3 / 4 + 0.2 / 4)  # RFC 6298: RTTVAR, then SRTT
