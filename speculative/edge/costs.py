"""What a text costs: calls, bytes and time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from speculative.edge.connection import Channel
from speculative.edge.place import Tally
from speculative.edge.policy import EdgePolicy, Exchange
from speculative.edge.published import Published
from speculative.edge.session import Gain
from speculative.request import EdgeStats


@dataclass(slots=True)
class _Sent:
    """A tree that is under way: when it was sent, and what the channel had carried by then; ``ahead`` of another's result."""

    at: float
    num_bytes: int
    received_before: int
    ahead: bool


class Costs:
    """Counts for one text, over all its connections, and tells the policy how long calls take and what they bring."""

    def __init__(self, policy: EdgePolicy, tally: Tally) -> None:
        self._policy, self._tally = policy, tally
        self._sent: dict[int, _Sent] = {}
        self._advanced_at: float | None = None
        self._num_results = self._num_ahead = 0
        self._target_calls_before = self._target_calls = 0
        self._bytes_before = (0, 0)
        self._channel: Channel | None = None

    @property
    def num_target_calls(self) -> int:
        """Passes of the target, for all sessions that the text has had."""
        return self._target_calls_before + self._target_calls

    def edge_stats(self, published: Published) -> EdgeStats:
        """So far."""
        sent, received = self._bytes_before
        if self._channel is not None:
            sent, received = sent + self._channel.bytes_sent, received + self._channel.bytes_received
        return EdgeStats(self._num_results, self._num_ahead, sent, received, published.num_offline, published.num_corrected)

    def open_anew(self) -> None:
        """The server counts from nothing again."""
        self._target_calls_before, self._target_calls = self.num_target_calls, 0

    def enter(self, channel: Channel) -> None:
        """All goes over ``channel`` now."""
        self._channel = channel

    def leave(self) -> None:
        """That is over; what was under way on it will not be answered."""
        if (channel := self._channel) is not None:
            self._bytes_before = (self._bytes_before[0] + channel.bytes_sent, self._bytes_before[1] + channel.bytes_received)
        self._channel, self._advanced_at = None, None
        self._sent.clear()

    def sent(self, step: int, channel: Channel, num_bytes: int, *, ahead: bool) -> None:
        """A tree is under way."""
        self._sent[step] = _Sent(time.monotonic(), num_bytes, channel.bytes_received, ahead)

    def gained(self, step: int, gain: Gain, channel: Channel, *, drafts: bool) -> None:
        """It is answered; its tree was a draft, or (not ``drafts``) what was written alone."""
        self._target_calls = gain.stats.num_target_calls
        sent = self._sent.pop(step, None)
        if not gain.tokens:
            return
        self._num_results += 1
        now, before = time.monotonic(), self._advanced_at
        self._advanced_at = now
        if sent is None:
            return
        self._tally.num_steps += 1
        self._tally.verify_seconds += now - max(sent.at, before or 0.0)
        if before is not None and drafts:
            self._policy.gained(len(gain.tokens), now - before)
        if sent.ahead:
            self._num_ahead += 1
            return
        num_bytes, stats = sent.num_bytes + channel.bytes_received - sent.received_before, gain.stats
        self._policy.exchanged(Exchange(gain.drafted, num_bytes, now - sent.at, stats.server_seconds, stats.batch_size))
