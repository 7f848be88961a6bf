"""One direction of a TCP connection over a network, without a network: what arrives when, in virtual time.

What is sent is cut into segments. Each takes the link for its bytes at the link's rate, headers included, one after the other, and
arrives a one-way delay later. On TCP a lost segment shows as delay: whatever was sent behind it waits until it has been sent again
(head-of-line blocking). When that is, follows Linux:

- behind three segments that arrived (RFC 5681), as soon as word of the third is back;
- behind one or two, a quarter of a round trip after word of the first (RACK, RFC 8985);
- else after the retransmission timeout, RTT + 200 ms (RFC 6298 with Linux's smallest variance), twice as long each time that it is
  lost again.

Left out are congestion windows (slow start after a pause or a loss would slow down long answers at high rates, and nothing here
sends more than a few packets a round trip), delayed and lost acknowledgements and the bandwidth they take, reordering and jitter.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Final

from benchmarks.network.links import Link

SEGMENT: Final = 1448
"""Bytes of a full segment over Ethernet, with TCP timestamps."""
HEADERS: Final = 52
"""Of IP and TCP, before each."""
MIN_VARIANCE: Final = 0.2
"""Seconds that a retransmission timeout is longer than the round trip, on Linux."""
ENOUGH: Final = 3
"""Segments behind a lost one whose arrival proves it lost."""


@dataclass(slots=True)
class _Segment:
    """``arrival`` falls when what follows tells the sender of a loss; ``spent`` seconds go by from noticing it to arrival."""

    data: bytes
    arrival: float
    lost: bool = False
    spent: float = 0.0
    followers: int = 0


class Pipe:
    """Takes bytes at one end and has them at the other, later; times are seconds of any clock and do not go back."""

    def __init__(self, link: Link, rng: random.Random, begin: float = 0.0) -> None:
        self.link, self._rng = link, rng
        self._free_at = begin
        self._segments: deque[_Segment] = deque()
        self.queued = 0
        self.num_bytes, self.num_wire_bytes, self.num_lost = 0, 0, 0

    def send(self, now: float, data: bytes) -> None:
        """Bytes enter at ``now``."""
        for start in range(0, len(data), SEGMENT):
            self._send(now, data[start : start + SEGMENT])

    def close(self, now: float) -> None:
        """The stream ends; arrives as b"" behind everything else."""
        self._send(now, b"")

    def next_arrival(self) -> float | None:
        """When there is something to take, as things stand; None when all has been taken."""
        return self._segments[0].arrival if self._segments else None

    def take(self, now: float) -> list[bytes]:
        """What has arrived by ``now``, in order."""
        arrived = []
        while self._segments and self._segments[0].arrival <= now:
            data = self._segments.popleft().data
            self.queued -= len(data)
            arrived.append(data)
        return arrived

    def _send(self, now: float, data: bytes) -> None:
        link = self.link
        airtime = 8 * (len(data) + HEADERS) / link.rate if link.rate else 0.0
        sent = self._free_at = max(now, self._free_at) + airtime
        segment = _Segment(data, sent + link.delay)
        times_lost = 0
        while link.loss and self._rng.random() < link.loss:
            times_lost += 1
        if times_lost:
            timeout = link.rtt + MIN_VARIANCE
            backoff = sum(timeout * 2**again for again in range(1, times_lost))
            segment.lost, segment.spent = True, backoff + airtime + link.delay
            segment.arrival = sent + timeout + segment.spent
        else:
            self._tell(segment.arrival + link.delay)
        self._segments.append(segment)
        self.queued += len(data)
        self.num_bytes += len(data)
        self.num_wire_bytes += (len(data) + HEADERS) * (1 + times_lost)
        self.num_lost += times_lost

    def _tell(self, back: float) -> None:
        """A segment arrives, and word of it is back at ``back``: what that says of those lost before it."""
        for segment in self._segments:
            if segment.lost and segment.followers < ENOUGH:
                segment.followers += 1
                if segment.followers == 1:
                    segment.arrival = min(segment.arrival, back + self.link.rtt / 4 + segment.spent)
                elif segment.followers == ENOUGH:
                    segment.arrival = min(segment.arrival, back + segment.spent)
