"""What is compared: how text gets from a target on a server to a user elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from benchmarks.network.processes import moaserve

PLAIN: Final = "streaming, plain"
"""Whose texts are everyone else's reference."""
SPECULATIVE: Final = "streaming, speculative"
MOA: Final = "edge, MoA"
INDEPENDENT: Final = "edge, independent"
EAGLE: Final = "edge, EAGLE-2"

NO_DRAFTER: Final = "none"
"""The drafter of a server without one."""

PATIENCE_S: Final = 30.0
"""That a text waits for a connection that was lost: a bad link looks like a server that is gone."""

ServerName = Literal["plain", "moa", "eagle"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One way; ``server`` is the one it needs, ``drafts`` the folder that an edge drafts from (None: there is no edge)."""

    name: str
    server: ServerName
    drafts: Path | None = None

    @property
    def has_edge(self) -> bool:
        """Whether something drafts on the user's side."""
        return self.drafts is not None


@dataclass(frozen=True, slots=True)
class Pair:
    """What servers and edges load, and how they draft.

    Trees of edges have at most ``draft_nodes`` nodes, whatever drafts (None: as many as edges send by themselves). Of a prompt MoA
    and EAGLE-2 read the last ``draft_window`` tokens (0: all).
    """

    model: str
    drafter: str
    dtype: str
    compile: str
    draft_nodes: int | None = None
    draft_window: int = 64


def kinds(bundle: Path, independent: Path | None, eagle: Path | None) -> list[Kind]:
    """Those that can be had; an independent drafter needs nothing of the server's but tokens."""
    found = [Kind(PLAIN, "plain"), Kind(SPECULATIVE, "moa"), Kind(MOA, "moa", bundle)]
    if independent is not None:
        found.append(Kind(INDEPENDENT, "plain", independent))
    if eagle is not None:
        found.append(Kind(EAGLE, "eagle", eagle))
    return found


def server_command(pair: Pair, drafter: str, host: str, slots: int) -> list[str]:
    """A server of ``slots`` places that reads each prompt anew, however often it comes."""
    options = ["--host", host, "--port", "0", "--no-playground", "--num-threads", "1", "--prefix-cache-tokens", "0"]
    options += ["--model", pair.model, "--drafter", drafter, "--dtype", pair.dtype, "--compile", pair.compile]
    if drafter != NO_DRAFTER:
        options += ["--draft-window", str(pair.draft_window)]
    if pair.draft_nodes is not None:
        options += ["--remote-tree-nodes", str(pair.draft_nodes)]
    return moaserve("serve", *options, "--max-num-seqs", str(slots))


def edge_command(pair: Pair, kind: Kind, address: tuple[str, int]) -> list[str]:
    """An edge of a server at ``address``."""
    server = f"ws://{address[0]}:{address[1]}"
    options = ["--server", server, "--port", "0", "--num-threads", "1", "--dtype", pair.dtype]
    # What an edge writes alone is not compared: cut off, it waits.
    options += ["--offline", "stop", "--reconnect-timeout", f"{PATIENCE_S:g}"]
    if pair.draft_nodes is not None:
        options += ["--draft-nodes", str(pair.draft_nodes)]
    if kind.name == MOA:
        return moaserve("edge", "--bundle", str(kind.drafts), "--compile", pair.compile, *options)
    return [sys.executable, "-m", "benchmarks.network.edge", "--drafter", str(kind.drafts), "--model", pair.model, *options]
