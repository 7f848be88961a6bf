"""EdgeConfig: what an edge needs to know, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from speculative.config import Compile, DType, MemoryFormat
from speculative.edge.opening import Server
from speculative.errors import EngineLoadError
from speculative.policy import DraftShape

Offline = Literal["keep", "correct", "stop"]


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """How to draft from a ``bundle`` for a ``server``.

    ``memory_format`` is what the drafter's memory is best sent as, ``max_num_seqs`` the texts written together. A text waits
    ``reconnect_timeout`` seconds for a connection that is lost; what becomes of it then says ``offline``: "stop" ends it with an
    error, "keep" lets the drafter write on alone, and "correct" has the server put right what it wrote once it is back. The rest
    is as in `config.EngineConfig`, but that ``draft_nodes`` also give way to what the server takes, and that how deep and how wide
    trees are within these limits follows from what network and server cost (`policy.EdgePolicy`).
    """

    server: Server
    bundle: Path
    memory_format: MemoryFormat = "int8"
    dtype: DType = "auto"
    compile: Compile = "auto"
    num_threads: int | None = None
    max_num_seqs: int = 4
    offline: Offline = "correct"
    reconnect_timeout: float = 1.0
    draft_depth: int = 8
    draft_breadth: int = 8
    draft_nodes: int = 64
    draft_temperature: float = 1.0
    draft_lookup: int = 2

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the setting."""
        for name in ("max_num_seqs", "draft_depth", "draft_breadth", "draft_nodes"):
            if getattr(self, name) < 1:
                raise EngineLoadError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.server.url.startswith(("ws://", "wss://")):
            raise EngineLoadError(f"server must be an address such as wss://example.org, got {self.server.url!r}")

    @property
    def largest_shape(self) -> DraftShape:
        """The largest trees that are drafted."""
        return DraftShape(self.draft_depth, self.draft_breadth, self.draft_nodes, 0.0, self.draft_temperature)
