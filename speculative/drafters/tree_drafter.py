"""Drafting trees level by level: what all drafters that compute have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cache
from operator import is_

import torch
from torch import Tensor

from models.attention import AttentionPlan
from models.kv_cache import KVCache
from models.llama import CompiledGraph
from models.plans import counting, span_of
from speculative.drafters.base import window_start
from speculative.drafters.draft_head import DraftHead
from speculative.drafters.growth import Candidates, Frontier, Level, Place, Sampling, Text, best_tree
from speculative.drafters.rare import MOST_RARE, RareTokens, in_one_tensor
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree

Nodes = tuple[Tensor, Tensor, Tensor] | tuple[list[list[int]], list[list[int]], list[list[float]]]
"""Tokens, parents and probabilities [B, N] as in DraftTree, best first."""

DraftTrees = Callable[[list[Tensor], list[list[int]], list[list[int]], list[Tensor], int, int, int, float, float], Nodes]
"""Caches' windows, texts [5][B] (roots, starts, lengths, memory's ends, tokens before the roots), the rare tokens of each, sampling
settings or none, depth, breadth, nodes, least reach and temperature (as in DraftShape) -> nodes."""

_HOPELESS = 2000.0
"""What makes a node less likely than any that is drafted, and still leaves float32 a node and its parent apart."""


class TreeDrafter(ABC):
    """Proposes EAGLE-2-style trees: every level expands its best nodes, and the best nodes of all levels are verified.

    How it learns of verified tokens is each drafter's own. Where its ``head`` has a draft vocabulary it drafts rare tokens of texts
    besides. ``compiled`` holds graphs that replace parts of the network, by name: see ``moa_graphs``. ``trees``, where there is
    one, drafts whole trees in one call. It ``narrows`` where trees that are smaller than was announced cost less: some graphs have
    their breadth built in, others are recorded anew for every shape.
    """

    name: str
    taps: tuple[int, ...] = ()
    window: int | None = None

    def __init__(self, device: torch.device, caches: Many[KVCache], head: DraftHead | None = None) -> None:
        self.device, self._head = device, head
        self._rare = None if head is None or head.vocabulary is None else RareTokens(head.vocabulary)
        self.caches: Many[KVCache] = caches
        self.compiled: dict[str, CompiledGraph] = {}
        self.trees: DraftTrees | None = None
        self._sampling: tuple[list[Sequence], Sampling | None] = [], None
        self.narrows = True

    @property
    def runs_compiled(self) -> bool:
        """Whether something stands in for its network."""
        return bool(self.compiled) or self.trees is not None

    def forget(self, sequence: Sequence) -> None:
        """Its rare tokens; what the slot holds will be written anew before it is read."""
        if self._rare is not None:
            self._rare.forget(sequence)

    def target_scratch_rows(self, shape: DraftShape) -> int:
        """None."""
        return 0

    @abstractmethod
    def pack(self) -> None:
        """Prepare the network's weights for inference without compiled graphs."""

    @abstractmethod
    def inherited(self, lengths: Tensor) -> Tensor:
        """What the roots of trees after texts of ``lengths`` [B] inherit [B, 1, …]: see Frontier."""

    @abstractmethod
    def grow(
        self, level: Level, known: Tensor | None, breadth: int, target_cache: KVCache | None
    ) -> tuple[Tensor | None, Candidates, Frontier, Tensor]:
        """One level: all candidates, the next frontier and its reach, as ``growth.grow``.

        The first of what it returns is handed to the levels below as ``known``.
        """

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """Draft level by level; see DESIGN: nodes are ranked by the perturbed drafter's probability.

        There is no ``target_cache`` where the target is elsewhere.
        """
        sampling = self._sampling_of(sequences)
        if self.trees is None:
            text = self.text(sequences)
            return tree_of(self.drafted(self.roots(sequences, text), text, sampling, shape, target_cache), sequences, shape)
        texts, rare = [[each.tokens[-1] for each in sequences], *self._ends(sequences)], self._rare_of(sequences)
        limits = (shape.depth, shape.breadth, shape.nodes, shape.min_reach, shape.temperature)
        return tree_of(self.trees(self.windows(len(sequences)), texts, rare, list(sampling or ()), *limits), sequences, shape)

    def drafted(
        self,
        frontier: Frontier,
        text: Text,
        sampling: Sampling | None,
        shape: DraftShape,
        target_cache: KVCache | None,
        least_reach: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From the texts' roots to the best nodes' tokens, parents and probabilities [B, N], best first.

        Given ``least_reach`` [1] in the place of the shape's, no number is looked at: levels that would not be drafted are, and
        their nodes come last, with probability 0.
        """
        device, temperature = self.device, number(shape.temperature, self.device)
        grown = Candidates(frontier.scores, frontier.tokens, frontier.numbers)
        known: Tensor | None = None
        row, penalty, penalties = 0, torch.zeros_like(frontier.scores[0]), [torch.zeros_like(frontier.scores[0])]
        for depth in range(shape.depth):
            level = Level(frontier, grown, text, place(depth, row, device), temperature, sampling)
            row += frontier.tokens.shape[1]
            known, following, frontier, reach = self.grow(level, known, shape.breadth, target_cache)
            if least_reach is None:
                grown = following
                if float(reach) < shape.min_reach:
                    break
            else:
                penalties.append(penalty.expand(following.scores.shape[1] - grown.scores.shape[1]))
                penalty, grown = penalty.maximum((reach < least_reach) * _HOPELESS), following
        if least_reach is not None:
            grown = grown._replace(scores=grown.scores - torch.cat(penalties))
        return self._best(grown, shape.nodes)

    def windows(self, batch: int) -> list[Tensor]:
        """The rows of the caches' first ``batch`` slots, all layers in line."""
        return [layer for cache in self.caches for layer in cache.window(0, batch)]

    def text(self, sequences: Many[Sequence]) -> Text:
        """What is known of sequences in consecutive slots from 0."""
        told = self._ends(sequences)
        columns = counting(span_of(self.caches[0], max(told[1])), self.device)
        # One tensor for all: making one costs more than its few numbers.
        starts, lengths, memory_ends, previous = torch.tensor(told, device=self.device).unbind()
        rare = self.with_rows(self.rare_tensor(self._rare_of(sequences)).to(self.device))
        return Text(starts, lengths, memory_ends, columns, previous, *rare)

    def _sampling_of(self, sequences: list[Sequence]) -> Sampling | None:
        """What does not change while they are the same ones."""
        known, sampling = self._sampling
        if len(known) != len(sequences) or not all(map(is_, known, sequences)):
            self._sampling = list(sequences), (sampling := Sampling.of(sequences, self.device))
        return sampling

    def _ends(self, sequences: Many[Sequence]) -> list[list[int]]:
        """As in Text, each [B]: starts, lengths, memory's ends and the tokens before the roots."""
        starts, lengths = [window_start(each, self.window) for each in sequences], [each.num_computed for each in sequences]
        return [starts, lengths, self.memory_ends(lengths), [each.token_before(each.num_computed) for each in sequences]]

    def _rare_of(self, sequences: Many[Sequence]) -> list[list[int]]:
        return [[]] * len(sequences) if self._rare is None else self._rare.of(sequences)

    def rare_tensor(self, rare: list[list[int]]) -> Tensor:
        """As in Text; what is recorded or compiled has their number built in, as it has breadth."""
        return in_one_tensor(rare, MOST_RARE if self._rare is not None and not self.narrows else None)

    def with_rows(self, rare: Tensor) -> tuple[Tensor, Tensor] | tuple[()]:
        """Rare tokens [B, M] and their rows of the head, as in Text."""
        return (rare, self._head.rows(rare)) if self._head is not None and rare.shape[1] else ()

    def memory_ends(self, lengths: list[int]) -> list[int]:
        """As in Text, for texts of ``lengths`` [B]: beside its target a drafter knows all."""
        return lengths

    def roots(self, sequences: Many[Sequence], text: Text) -> Frontier:
        """The first frontier: the texts' last tokens."""
        return self.first_frontier(torch.tensor([sequence.tokens[-1:] for sequence in sequences], device=self.device), text)

    def first_frontier(self, roots: Tensor, text: Text) -> Frontier:
        """The same of tokens [B, 1]."""
        return Frontier(roots, *_blank(len(roots), self.device), self.inherited(text.lengths))

    def _best(self, grown: Candidates, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = counting(min(nodes, grown.tokens.shape[1] - 1) + 1, grown.tokens.device)
        if (best := self.compiled.get("tree")) is None:
            return best_tree(grown, rows)
        tokens, parents, probabilities = best([*grown, rows])
        return tokens, parents, probabilities


def tree_of(best: Nodes, sequences: Many[Sequence], shape: DraftShape) -> DraftTree:
    """The best nodes as the sequences' trees."""
    tokens, parents, probabilities = best
    width = tokens.shape[1] if isinstance(tokens, Tensor) else len(tokens[0])
    sizes = tuple(width if sequence.drafts_here else 0 for sequence in sequences)
    tree = DraftTree(tokens, parents, sizes, probabilities=probabilities)
    if not shape.min_probability or tree.probability_lists is None:
        return tree
    # No node is likelier than its parent: what is left is a tree again.
    likely = [sum(each >= shape.min_probability for each in nodes) for nodes in tree.probability_lists]
    return tree.pruned(lambda index, tokens, parents: range(1, 1 + min(len(tokens), likely[index])))


def frontier_plan(cache: KVCache, groups: int, level: Level, seen: Tensor) -> AttentionPlan:
    """A frontier's rows in a cache of text and scratch rows, for drafters that run whole layers on it.

    ``seen`` [B, w, scratch'] is an additive mask of the drafted rows that each node sees, its own included.
    """
    text, place, device = level.text, level.place, cache.data.device
    batch, width, drafted = seen.shape
    mask = torch.full((batch, 1, width, cache.scratch + len(text.columns)), float("-inf"), dtype=cache.data.dtype, device=device)
    mask[..., :drafted] = seen.unsqueeze(1)
    mask[..., cache.scratch :].masked_fill_(text.columns < text.lengths.view(-1, 1, 1, 1), 0.0)
    slots = torch.arange(batch, device=device).unsqueeze(1) * cache.rows_per_slot
    write = (slots + place.row + torch.arange(width, device=device)).flatten()
    positions = (text.lengths + place.depth).repeat_interleave(width)
    return AttentionPlan(0, batch, width, positions, write, mask.repeat_interleave(groups, dim=2))


@cache
def root_mask(batch: int, scratch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What roots see of a cache's scratch rows [B, 1, scratch]: the first, their own."""
    mask = torch.full((batch, 1, scratch), float("-inf"), dtype=dtype, device=device)
    mask[..., 0] = 0.0
    return mask


# Made once for each shape, like ``counting``.


@cache
def place(depth: int, row: int, device: torch.device) -> Place:
    """A level's."""
    return Place(torch.tensor([depth], device=device), torch.tensor([row], device=device))


@cache
def number(value: float, device: torch.device) -> Tensor:
    """A tensor [1]."""
    return torch.tensor([value], device=device)


@cache
def _blank(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scores and numbers [B, 1] of roots."""
    return torch.zeros(batch, 1, device=device), torch.zeros(batch, 1, dtype=torch.long, device=device)
