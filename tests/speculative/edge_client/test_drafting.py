"""What an edge computes with, apart from what it drafts."""

from pathlib import Path

from speculative.edge.config import EdgeConfig
from speculative.edge.drafting import EdgeModel
from speculative.edge.opening import Server
from speculative.edge_export import export_edge
from speculative.request import Request, SamplingParams
from tests.speculative.conftest import N0


def test_drafters_are_used_again(tmp_path: Path) -> None:
    export_edge(str(N0 / "target"), str(N0 / "drafter"), tmp_path / "edge", dtype="float32")
    model = EdgeModel.load(EdgeConfig(Server("ws://127.0.0.1:1"), tmp_path / "edge", compile="off"))
    for _ in range(3):
        texts = [model.begin(Request(name, (3, 4, 5), SamplingParams(8, seed=1)), 64) for name in ("one", "other")]
        for text in texts:
            model.end(text)
    assert len(model._free) == 2
