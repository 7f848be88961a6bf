"""What an edge measures on its way: round trips, and what things cost by their size."""

from __future__ import annotations


class RoundTrip:
    """Seconds from a ping to its pong, smoothed with their deviation as TCP does (RFC 6298)."""

    def __init__(self) -> None:
        self.smoothed: float | None = None
        self.deviation = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        if self.smoothed is None:
            self.smoothed, self.deviation = seconds, seconds / 2
            return
        self.deviation += (abs(seconds - self.smoothed) - self.deviation) / 4
        self.smoothed += (seconds - self.smoothed) / 8


class Line:
    """The cost of things by their size, some seconds + ``slope`` · size: least squares that forget what is long past.

    ``slope`` is never negative, and 0 as long as all sizes were about the same: nothing is known of it then.
    """

    def __init__(self, weight: float = 0.05) -> None:
        self._weight = weight
        self._known = False
        self._x = self._y = self._xx = self._xy = 0.0

    def add(self, size: float, seconds: float) -> None:
        """One more."""
        weight = self._weight if self._known else 1.0
        self._known = True
        self._x += weight * (size - self._x)
        self._y += weight * (seconds - self._y)
        self._xx += weight * (size * size - self._xx)
        self._xy += weight * (size * seconds - self._xy)

    @property
    def slope(self) -> float:
        """Seconds for one more."""
        variance = self._xx - self._x * self._x
        if variance <= 1e-3 * self._xx or variance <= 0:
            return 0.0
        return max(0.0, (self._xy - self._x * self._y) / variance)
