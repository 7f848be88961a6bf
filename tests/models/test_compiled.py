import torch

from models.compiled import Graph, fingerprint
from models.config import RopeConfig
from models.layers import RotaryTable


def test_graphs_that_rotate_otherwise_are_told_apart() -> None:
    def of(theta: float) -> str:
        return fingerprint(Graph("rotary", RotaryTable(8, RopeConfig(theta=theta)), (torch.arange(3),), ({},), ""))

    assert of(10000.0) == of(10000.0) != of(500000.0)
