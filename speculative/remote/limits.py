"""How much of anything a peer may send."""

from __future__ import annotations

from dataclasses import dataclass

from speculative.remote.frames import ServerLimits, Welcome
from speculative.remote.packing import MOST_ROWS


@dataclass(frozen=True, slots=True)
class Limits:
    """What is taken in one frame.

    ``frame_bytes`` with header and padding. A tree has at most ``tree_nodes``, a chain, which needs no room of its own in the
    target's cache, at most ``chain_nodes``. A connection numbers its sessions from 0 to ``sessions`` − 1, and at most
    ``in_flight`` trees of each are unanswered. Token ids are below ``vocab_size``, texts no longer than ``max_model_len``. A row
    of memory has ``row_bytes`` and the newest memory ``newest_bytes``; None where that is not agreed yet.
    """

    frame_bytes: int = 2**20
    tree_nodes: int = 64
    chain_nodes: int = 1024
    sessions: int = 256
    in_flight: int = 4
    vocab_size: int = 2**32
    max_model_len: int = 2**32
    row_bytes: int | None = None
    newest_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse trees of more nodes than rows can be numbered."""
        if not (1 <= self.tree_nodes <= MOST_ROWS and 1 <= self.chain_nodes <= MOST_ROWS):
            raise ValueError(f"trees have 1 to {MOST_ROWS} nodes, not {self.tree_nodes} or, in a chain, {self.chain_nodes}")

    @classmethod
    def of(cls, welcome: Welcome, frame_bytes: int) -> Limits:
        """What an edge takes of a server that has introduced itself; ``frame_bytes`` are those of its own hello."""
        limits, model = welcome.limits, welcome.model
        return cls(
            frame_bytes=frame_bytes,
            tree_nodes=limits.tree_nodes,
            chain_nodes=limits.chain_nodes,
            sessions=limits.sessions,
            in_flight=limits.in_flight,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            row_bytes=model.row_bytes,
            newest_bytes=model.newest_bytes,
        )

    def told(self, idle_seconds: float) -> ServerLimits:
        """What a server says of them."""
        return ServerLimits(self.frame_bytes, self.tree_nodes, self.chain_nodes, self.sessions, self.in_flight, idle_seconds)
