"""The parts of a MoA drafter that are compiled, each with inputs to trace it with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.compiled import DYNAMIC, Graph
from models.kv_cache import KVWindow
from speculative.drafters.moa import CANDIDATES, MoADrafter
from speculative.drafters.moa_network import Frontier, MoANetwork, Place, Text, select

Layers = list[Tensor]
"""A ``KVCache.window``."""

Tensors = tuple[Tensor, ...]
"""A Frontier, Text, Place or Candidates as a plain tuple: packages cannot hold the names of ours."""


class _Candidates(nn.Module):
    """A frontier's best candidates, for sampling to perturb."""

    def __init__(self, network: MoANetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, frontier: Tensors, text: Tensors, place: Tensors, sa: Layers, ca: Layers) -> tuple[Tensor, Tensor, Tensor]:
        return self._best(Frontier(*frontier), Text(*text), Place(*place), sa, ca, CANDIDATES)

    def _best(
        self, frontier: Frontier, text: Text, place: Place, sa: Layers, ca: Layers, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.network.moa.config
        windows = (
            KVWindow(sa, config.sa_num_kv_heads, config.target.head_dim),
            KVWindow(ca, config.ca_num_kv_heads, config.target.head_dim),
        )
        feature = self.network.feature(frontier, text, place, *windows)
        return self.network.candidates(feature, frontier.tokens.shape[0], count)


class _Level(_Candidates):
    """A whole greedy level, the choice of the next frontier included."""

    def __init__(self, network: MoANetwork, breadth: int) -> None:
        super().__init__(network)
        self.breadth = breadth

    def forward(  # type: ignore[override]
        self, frontier: Tensors, text: Tensors, place: Tensors, sa: Layers, ca: Layers
    ) -> tuple[Tensors, Tensors, Tensor]:
        best, ids, total = self._best(Frontier(*frontier), Text(*text), Place(*place), sa, ca, self.breadth)
        candidates, following, reach = select(Frontier(*frontier), best - total, ids, Place(*place), self.breadth)
        return tuple(candidates), tuple(following), reach


class _Remember(nn.Module):
    """What drafting keeps of newly verified tokens, from the target's cache into SA's and CA's."""

    def __init__(self, network: MoANetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        source: Tensor,
        rows: tuple[Tensor, Tensor],
        target: Layers,
        sa: Layers,
        ca: Layers,
    ) -> Tensor:
        config = self.network.moa.config
        kv = KVWindow(target, config.target.num_kv_heads, config.target.head_dim).gather(source)
        windows = (
            KVWindow(sa, config.sa_num_kv_heads, config.target.head_dim),
            KVWindow(ca, config.ca_num_kv_heads, config.target.head_dim),
        )
        self.network.remember(token_ids, positions, kv, *windows, rows)
        return positions  # a graph must return something


def drafter_graphs(drafter: MoADrafter, breadth: int) -> list[Graph]:
    """The graphs of a drafter without borrowed layers, under the names by which ``MoADrafter.compiled`` knows them."""
    network, config = drafter.network, drafter.network.moa.config
    batch, width, span, slot_rows, memory_rows, tokens, dtype = 2, 3, 80, 96, 112, 5, network.dtype
    integers = torch.zeros(batch, width, dtype=torch.long)
    frontier = Frontier(
        integers, torch.zeros(batch, width), integers.clone(), torch.zeros(batch, width, drafter.scratch, dtype=dtype)
    )
    text = Text(torch.tensor([7, 9]), torch.zeros(batch, 1, 1, span, dtype=dtype))
    place = Place(torch.tensor([1]), torch.tensor([1]), torch.tensor([5]))
    sa = torch.zeros(batch, slot_rows + drafter.scratch, drafter.sa_cache.data.shape[-1], dtype=dtype)
    ca = torch.zeros(batch, memory_rows, drafter.ca_cache.data.shape[-1], dtype=dtype)
    level_inputs = (tuple(frontier), tuple(text), tuple(place), [sa], [ca])
    level_sizes = (
        ({0: DYNAMIC, 1: DYNAMIC},) * len(frontier),
        ({0: DYNAMIC}, {0: DYNAMIC, 3: DYNAMIC}),
        (None,) * len(place),
        [{0: DYNAMIC, 1: DYNAMIC}],
        [{0: DYNAMIC, 1: DYNAMIC}],
    )
    numbers = torch.arange(tokens)
    layer = torch.zeros(batch, slot_rows, config.target.kv_size, dtype=drafter.target.dtype)
    layers = config.target.num_layers
    remember_inputs = (
        numbers,
        numbers.clone(),
        numbers.clone(),
        (numbers.clone(), numbers.clone()),
        [layer.clone() for _ in range(layers)],
        [sa.clone()],
        [ca.clone()],
    )
    remember_sizes = (
        {0: DYNAMIC},
        {0: DYNAMIC},
        {0: DYNAMIC},
        ({0: DYNAMIC}, {0: DYNAMIC}),
        [{0: DYNAMIC, 1: DYNAMIC}] * layers,
        [{0: DYNAMIC, 1: DYNAMIC}],
        [{0: DYNAMIC, 1: DYNAMIC}],
    )
    return [
        Graph("level", _Level(network, breadth), level_inputs, level_sizes, settings=f"breadth {breadth}"),
        Graph("candidates", _Candidates(network), level_inputs, level_sizes),
        Graph("remember", _Remember(network), remember_inputs, remember_sizes),
    ]
