"""How much an edge drafts, from what drafting, network and server cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from speculative.edge.measuring import Line
from speculative.policy import DraftShape

NODE_BYTES = 6
"""Bytes of a node in a frame: its token and its parent."""

PROBE = 8
"""Of so many trees one is a quarter as large as may be: what a node costs shows only by trees of different sizes."""

_WEIGHT = 0.1
_LEAST_REACH, _MOST_REACH = 0.01, 0.5
_LEAST_PROBABILITY, _MOST_PROBABILITY = 0.001, 0.3


@dataclass(frozen=True, slots=True)
class Exchange:
    """A tree's way to the server and back.

    The tree had ``nodes``, frames both ways ``num_bytes``. From sending it to its result ``waited`` seconds went by, of which
    ``server_seconds`` at the server, whose pass was shared by ``batch_size`` texts.
    """

    nodes: int
    num_bytes: int
    waited: float
    server_seconds: float
    batch_size: int = 1


class EdgePolicy:
    """Chooses trees that make the most tokens a second; one for all texts of an edge, whose network and server are the same.

    A step gains G tokens and takes T seconds: drafting, the way there and back, verification. What is added to a tree, worth g
    tokens and costing t seconds, makes (G + g) / (T + t) larger than G / T exactly if g / t > G / T, the rate that there is anyway:

    - another level is drafted while the drafter gives its nodes together a probability above rate · seconds of a level,
    - a node is kept and sent if its path's probability is above rate · seconds of a node: its bytes' on the network, and what
      verification takes longer for it, once for each text of the batch, as all of them wait for it.

    The longer the way, the lower the rate, and the more is worth trying: down a slow line with a fast server trees become large,
    up to what the server takes; the busier the server, the smaller. Breadth stays as it is given: a level's few rows cost the same.

    While a tree is under way there may be time to draft what could follow it (``ahead``): as much as may be, since nobody waits
    for it and it costs the server nothing unless the text goes that way.
    """

    def __init__(self) -> None:
        self._network, self._server = Line(), Line()
        self._level_seconds = 0.0
        self._gained, self._taken = 0.0, 0.0
        self._batch_size = 1.0
        self._waited = 0.0
        self._num_shapes = 0

    @property
    def tokens_per_second(self) -> float:
        """Of one text, of late; 0 before anything is known."""
        return self._gained / self._taken if self._taken else 0.0

    def shape(self, largest: DraftShape) -> DraftShape:
        """The limits of the next tree, within those of ``largest``."""
        self._num_shapes += 1
        if self._num_shapes % PROBE == 2:
            largest = replace(largest, nodes=max(1, largest.nodes // 4))
        rate = self.tokens_per_second
        if not rate:
            return largest
        node_seconds = NODE_BYTES * self._network.slope + self._batch_size * self._server.slope
        return replace(
            largest,
            min_reach=_between(_LEAST_REACH, rate * self._level_seconds, _MOST_REACH),
            min_probability=_between(_LEAST_PROBABILITY, rate * node_seconds, _MOST_PROBABILITY),
        )

    def ahead(self, largest: DraftShape) -> DraftShape | None:
        """Limits of what is drafted while a tree is under way; None where there is no time for it, or that is not known yet."""
        if self._level_seconds * largest.depth >= self._waited:
            return None
        probability = self.tokens_per_second * NODE_BYTES * self._network.slope
        return replace(
            largest, min_reach=_LEAST_REACH, min_probability=_between(_LEAST_PROBABILITY, probability, _MOST_PROBABILITY)
        )

    def drafted(self, depth: int, seconds: float) -> None:
        """A tree of so many levels took so long."""
        if depth:
            each = seconds / depth
            self._level_seconds += (each - self._level_seconds) * (_WEIGHT if self._level_seconds else 1.0)

    def exchanged(self, exchange: Exchange) -> None:
        """A tree was verified that nothing else was under way with."""
        self._network.add(exchange.num_bytes, max(0.0, exchange.waited - exchange.server_seconds))
        self._server.add(exchange.nodes, exchange.server_seconds)
        weight = _WEIGHT if self._waited else 1.0
        self._batch_size += weight * (max(1, exchange.batch_size) - self._batch_size)
        self._waited += weight * (exchange.waited - self._waited)

    def gained(self, count: int, seconds: float) -> None:
        """A text had ``count`` tokens more, ``seconds`` after what it had before."""
        weight = _WEIGHT if self._taken else 1.0
        self._gained += weight * (count - self._gained)
        self._taken += weight * (seconds - self._taken)


def _between(least: float, value: float, most: float) -> float:
    return min(most, max(least, value))
