"""The parts of a MoA drafter that are compiled, each with inputs to trace it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.compiled import DYNAMIC, Graph
from models.kv_cache import KVCache, KVWindow
from models.llama import CompiledGraph
from speculative.drafters import tiled_block, tiled_memory
from speculative.drafters.growth import Candidates, Frontier, Level, Place, Sampling, Text, best_tree
from speculative.drafters.moa import MoADrafter
from speculative.drafters.moa_network import DraftCaches, DraftNetwork, MoANetwork
from speculative.drafters.moa_trees import MoATreeDrafter
from speculative.drafters.rare import MOST_RARE

Layers = list[Tensor]
"""A ``KVCache.window``."""

Tensors = tuple[Tensor, ...]
"""A Frontier, Candidates, Text (what there is of it), Place or Sampling as a plain tuple: packages cannot hold names of ours."""


@dataclass(frozen=True, slots=True)
class _Slots:
    """What the graphs know of a cache besides its rows."""

    scratch: int
    rows_per_slot: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, cache: KVCache) -> _Slots:
        return cls(cache.scratch, cache.rows_per_slot, cache.num_kv_heads, cache.head_dim)

    def window(self, layers: Layers) -> KVWindow:
        return KVWindow(layers, self.num_kv_heads, self.head_dim)

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """As ``KVCache.flat_rows``."""
        return slots * self.rows_per_slot + self.scratch + positions


def _windows(caches: list[_Slots], windows: tuple[Layers, ...]) -> DraftCaches:
    return [cache.window(layers) for cache, layers in zip(caches, windows, strict=True)]


def _level(frontier: Tensors, grown: Tensors, text: Tensors, place: Tensors, temperature: Tensor, sampling: Tensors) -> Level:
    settings = Sampling(*sampling) if sampling else None
    return Level(Frontier(*frontier), Candidates(*grown), Text(*text), Place(*place), temperature, settings)


def _expanded(network: DraftNetwork, level: Level, entering: Tensor, breadth: int) -> tuple[Tensors, Tensors, Tensor]:
    everything, following, reach = network.expand(level, entering, breadth)
    return tuple(everything), tuple(following), reach


class _Level(nn.Module):
    """A whole level, the choice of the next frontier included; without ``sampling`` settings a greedy one.

    ``known`` is what ``DraftNetwork.block`` has told, if there is a block, and ``windows`` are those of the drafter's caches, if
    levels read them: without a block, or where a block's copy.
    """

    def __init__(self, network: DraftNetwork, caches: list[_Slots], breadth: int) -> None:
        super().__init__()
        self.network, self.caches, self.breadth = network, caches, breadth

    def forward(
        self,
        frontier: Tensors,
        grown: Tensors,
        text: Tensors,
        place: Tensors,
        temperature: Tensor,
        sampling: Tensors,
        known: Tensors,
        windows: tuple[Layers, ...],
    ) -> tuple[Tensors, Tensors, Tensor]:
        level, network = _level(frontier, grown, text, place, temperature, sampling), self.network
        caches = _windows(self.caches, windows) if windows else []
        if network.moa.block is not None:
            entering = network.states(level, known[0], caches)
        else:
            entering = network.feature(level, caches).unflatten(0, level.frontier.tokens.shape)
        return _expanded(network, level, entering, self.breadth)


class _Block(nn.Module):
    """``DraftNetwork.block`` and the greedy level of the roots."""

    def __init__(self, network: DraftNetwork, caches: list[_Slots], breadth: int) -> None:
        super().__init__()
        self.network, self.caches, self.breadth = network, caches, breadth

    def forward(
        self, frontier: Tensors, grown: Tensors, text: Tensors, place: Tensors, temperature: Tensor, windows: tuple[Layers, ...]
    ) -> tuple[Tensor, Tensors, Tensors, Tensor]:
        level, caches = _level(frontier, grown, text, place, temperature, ()), _windows(self.caches, windows)
        known = self.network.block(level.frontier.tokens, level.text, caches)
        return known, *_expanded(self.network, level, self.network.opening(level, known, caches), self.breadth)


class _Tree(nn.Module):
    """``best_tree``."""

    def forward(self, grown: Tensors, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return best_tree(Candidates(*grown), rows)


class _Remember(nn.Module):
    """What drafting keeps of newly verified tokens, from the target's cache into the drafter's; ``tapped`` is for an entry."""

    def __init__(self, network: MoANetwork, target: _Slots, caches: list[_Slots]) -> None:
        super().__init__()
        self.network, self.target, self.caches = network, target, caches

    def forward(
        self,
        token_ids: Tensor,
        previous: Tensor,
        slots: Tensor,
        positions: Tensor,
        tapped: Tensors,
        target: Layers,
        windows: tuple[Layers, ...],
    ) -> Tensor:
        kv = self.target.window(target).gather(self.target.rows(slots, positions))
        rows = tuple(each.rows(slots, positions) for each in self.caches)
        hidden = tapped[0] if tapped else None
        self.network.remember(token_ids, previous, positions, kv, hidden, _windows(self.caches, windows), rows)
        return positions  # a graph must return something


def use_compiled(drafter: MoATreeDrafter, graphs: dict[str, CompiledGraph]) -> None:
    """Let a drafter run on its graphs, and on operators where they do without."""
    drafter.compiled, length = graphs, drafter.caches[0].length
    if isinstance(drafter, MoADrafter) and tiled_memory.suits(drafter.network):
        drafter.tiled = tiled_memory.tiled_memory(drafter.network, length)
    if tiled_block.suits(drafter.network, drafter.breadth):
        if isinstance(drafter, MoADrafter) and drafter.tiled is not None:
            drafter.trees = tiled_block.tiled_drafting(drafter.network, length, drafter.tiled, drafter.scratches(0))
            drafter.trees_pair = True
        else:
            drafter.trees = tiled_block.tiled_drafting(drafter.network, length)
    drafter.narrows = drafter.trees is not None


def drafter_graphs(drafter: MoADrafter, target_cache: KVCache) -> list[Graph]:
    """All graphs of a drafter without borrowed layers, under the names by which ``TreeDrafter.compiled`` knows them."""
    remembering = [] if tiled_memory.suits(drafter.network) else [_remember_graph(drafter, target_cache)]
    return [*drafting_graphs(drafter), *remembering]


def drafting_graphs(drafter: MoATreeDrafter) -> list[Graph]:
    """Those that draft from memory that is there."""
    if tiled_block.suits(drafter.network, drafter.breadth):
        return []
    network, caches = drafter.network, [_Slots.of(cache) for cache in drafter.caches]
    batch, width, candidates, span, dtype = 2, 3, 7, 80, network.dtype
    integers = torch.zeros(batch, width, dtype=torch.long)
    block = network.moa.block
    hidden_size = network.target.config.hidden_size
    inherited = torch.zeros(batch, width, drafter.scratch if block is None else hidden_size, dtype=dtype)
    frontier = Frontier(integers, torch.zeros(batch, width), integers.clone(), inherited)
    numbered = torch.zeros(batch, candidates, dtype=torch.long)
    grown = Candidates(torch.randn(batch, candidates), numbered, numbered.clone())
    rare: Tensors = ()
    if network.moa.draft_vocabulary is not None:
        ids = torch.zeros(batch, MOST_RARE, dtype=torch.long)
        rare = ids, network.head.rows(ids)
    ends = torch.tensor([0, 2]), torch.tensor([7, 9]), torch.tensor([7, 9])
    text = Text(*ends, torch.arange(span), torch.tensor([3, 5]), *rare)
    place = Place(torch.tensor([1]), torch.tensor([1]))
    ones, temperature = torch.ones(batch), torch.ones(1)
    sampling = Sampling(text.lengths.clone(), ones == 1, ones, text.lengths.clone(), ones.clone(), ones.clone())
    batched, each, text_sizes = {0: DYNAMIC}, {0: DYNAMIC, 1: DYNAMIC}, ({0: DYNAMIC},) * len(text.tensors())
    windows, cache_sizes = _example_windows(drafter)
    settings = f"{caches} breadth {drafter.breadth}"

    def level(name: str, sampling: Tensors) -> Graph:
        known: Tensors = ()
        if block is not None:
            rows = block.size + (MOST_RARE if rare else 0)
            known = (torch.zeros(batch, rows, hidden_size + 2 * block.intermediate_size, dtype=dtype),)
        read = block is None or network.moa.config.copies
        inputs = (
            *(tuple(frontier), tuple(grown), text.tensors(), tuple(place), temperature, tuple(sampling), known),
            windows if read else (),
        )
        sizes = (
            (each,) * len(frontier),
            (each,) * len(grown),
            text_sizes,
            (None,) * len(place),
            None,
            (batched,) * len(sampling),
            (batched,) * len(known),
            cache_sizes if read else (),
        )
        return Graph(name, _Level(network, caches, drafter.breadth), inputs, sizes, settings)

    graphs = [
        level("level", ()),
        level("sampled_level", sampling),
        Graph("tree", _Tree(), (tuple(grown), torch.arange(5)), ((each,) * len(grown), batched)),
    ]
    if block is not None:
        roots = tuple(each[:, :1].clone() for each in frontier)
        root = tuple(each[:, :1].clone() for each in grown)
        inputs = (roots, root, text.tensors(), tuple(place), temperature, windows)
        sizes = ((batched,) * len(roots), (batched,) * len(root), text_sizes, (None,) * len(place), None, cache_sizes)
        graphs.append(Graph("block", _Block(network, caches, drafter.breadth), inputs, sizes, settings))
    return graphs


def _remember_graph(drafter: MoADrafter, target_cache: KVCache) -> Graph:
    network, tokens = drafter.network, 5
    target, caches = _Slots.of(target_cache), [_Slots.of(cache) for cache in drafter.caches]
    numbers = torch.arange(tokens)
    tapped = tuple(torch.zeros(tokens, network.target.config.hidden_size, dtype=network.target.dtype) for _ in drafter.taps)
    windows, cache_sizes = _example_windows(drafter)
    inputs = (numbers, numbers.clone(), numbers.clone(), numbers.clone(), tapped, _window(target_cache, 96), windows)
    counted = ({0: DYNAMIC},)
    sizes = (*counted * 4, counted * len(tapped), _WINDOW_SIZES * target_cache.num_layers, cache_sizes)
    return Graph("remember", _Remember(network, target, caches), inputs, sizes, settings=f"{target} {caches}")


_WINDOW_SIZES: list[Any] = [{0: DYNAMIC, 1: DYNAMIC}]


def _example_windows(drafter: MoATreeDrafter) -> tuple[tuple[Layers, ...], tuple[Any, ...]]:
    """The drafter's caches as examples, and their dynamic sizes; lengths differ, lest tracing takes them for one and the same."""
    windows = tuple(_window(cache, 96 + 16 * number + cache.scratch) for number, cache in enumerate(drafter.caches))
    return windows, (_WINDOW_SIZES,) * len(windows)


def _window(cache: KVCache, rows: int) -> Layers:
    return [torch.zeros(2, rows, cache.data.shape[-1], dtype=cache.data.dtype) for _ in range(cache.num_layers)]
