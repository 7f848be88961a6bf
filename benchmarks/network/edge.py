"""`python -m benchmarks.network.edge`: an edge with a drafter that `moaserve edge` does not take; see `others`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from app.commands import serving
from app.edge_settings import EdgeSettings
from benchmarks.network.others import load_other
from speculative.edge.engine import EdgeEngine


def main() -> int:
    """Serve until told to stop; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="as in moaserve edge")
    parser.add_argument("--drafter", required=True, type=Path, help="folder of an EAGLE drafter or of a small model")
    parser.add_argument("--model", default="bundled", help="the target: 'bundled', a folder or a hub id")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--offline", choices=["stop"], default="stop", help="these drafters cannot write alone")
    parser.add_argument("--reconnect-timeout", type=float, default=1.0)
    parser.add_argument("--draft-nodes", type=int, default=EdgeSettings.model_fields["draft_nodes"].default)
    given = parser.parse_args()
    settings = EdgeSettings(
        server=given.server,
        bundle=given.drafter,
        port=given.port,
        dtype=given.dtype,
        num_threads=given.num_threads,
        offline=given.offline,
        reconnect_timeout=given.reconnect_timeout,
        draft_nodes=given.draft_nodes,
    )
    what = f"{given.drafter} for {given.server}"
    return serving.serve(
        settings, lambda: EdgeEngine(settings.edge_config(), load=lambda config: load_other(given.model, config)), what
    )


if __name__ == "__main__":
    sys.exit(main())
