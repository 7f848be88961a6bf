"""An edge's drafter on compiled graphs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from models.compiled import Graph
from models.edge import EdgeNetworks
from models.edge_bundle import EdgeBundle, read_bundle
from models.graph_runner import load_graph, load_runner
from speculative.drafters import tiled_block
from speculative.drafters.moa_edge import EdgeDrafter, EdgeNetwork
from speculative.drafters.moa_graphs import drafting_graphs, use_compiled
from speculative.packages import Recipe, packages
from speculative.policy import DraftShape


def new_drafter(bundle: EdgeBundle, largest: DraftShape, network: EdgeNetwork | None = None) -> EdgeDrafter:
    """One that drafts for one text, with a network of its own, or with another's."""
    return EdgeDrafter(bundle.drafter, bundle.target, 1, bundle.config.max_model_len, largest, network=network)


def suits_whole(networks: EdgeNetworks, vocabulary_size: int | None, largest: DraftShape) -> bool:
    """Whether operators do all that such a bundle's drafter does; ``networks`` are on the meta device, without weights."""
    if vocabulary_size is not None:
        networks.drafter.draft_vocabulary = torch.empty(vocabulary_size, dtype=torch.long, device="meta")
    return tiled_block.suits(EdgeNetwork(networks.drafter, networks.target), largest.breadth)


def compile_drafter(drafter: EdgeDrafter, folder: Path, largest: DraftShape) -> None:
    """Let a new drafter of the bundle in ``folder`` run on compiled graphs; raises EngineLoadError when compilation fails."""
    dtype, threads = str(drafter.network.dtype).removeprefix("torch."), torch.get_num_threads()
    arguments = {"folder": str(folder), "dtype": dtype, "largest": asdict(largest), "num_threads": threads}
    paths, runner = packages(drafting_graphs(drafter), Recipe(__name__, edge_graphs.__name__, arguments))
    load_runner(runner)
    use_compiled(drafter, {name: load_graph(package) for name, package in paths.items()})


def edge_graphs(folder: str, dtype: str, largest: dict[str, Any], num_threads: int) -> list[Graph]:
    """As ``compile_drafter`` was told of them."""
    torch.set_num_threads(num_threads)
    return drafting_graphs(new_drafter(read_bundle(Path(folder), dtype=getattr(torch, dtype)), DraftShape(**largest)))
