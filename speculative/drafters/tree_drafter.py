"""Drafting trees level by level: what all drafters that compute have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cache

import torch
from torch import Tensor

from models.attention import AttentionPlan
from models.kv_cache import KVCache
from models.llama import CompiledGraph
from models.plans import counting, span_of
from speculative.drafters.base import window_start
from speculative.drafters.draft_head import DraftHead
from speculative.drafters.growth import Candidates, Frontier, Level, Place, Sampling, Text, best_tree
from speculative.drafters.rare import MOST_RARE, RareTokens
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree

DraftTrees = Callable[[list[Tensor], Tensor, Tensor, list[Tensor], int, int, int, float, float], Many[Tensor]]
"""Caches' windows, texts [5, B] (roots, starts, lengths, memory's ends, tokens before the roots), their rare tokens [B, M] (M is 0
where there are none), sampling settings or none, depth, breadth, nodes, least reach and temperature (as in DraftShape) ->
tokens, parents and probabilities [B, N] as in DraftTree."""

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
        sampling = Sampling.of(sequences, self.device)
        if self.trees is None:
            text = self.text(sequences)
            return tree_of(self.drafted(self.roots(sequences, text), text, sampling, shape, target_cache), sequences, shape)
        # One tensor for all: making one costs more than its few numbers.
        lengths = [each.num_computed for each in sequences]
        starts = [window_start(each, self.window) for each in sequences]
        previous = [each.token_before(each.num_computed) for each in sequences]
        texts = torch.tensor([[each.tokens[-1] for each in sequences], starts, lengths, lengths, previous])
        texts[3] = self.memory_ends(texts[2])
        limits = (shape.depth, shape.breadth, shape.nodes, shape.min_reach, shape.temperature)
        trees = self.trees(self.windows(len(sequences)), texts, self._rare_of(sequences), list(sampling or ()), *limits)
        return tree_of(trees, sequences, shape)

    def drafted(
        self,
        frontier: Frontier,
        text: Text,
        sampling: Sampling | None,
        shape: DraftShape,
        target_cache: KVCache | None,
        least_reach: Tensor | None = None,
    ) -> Many[Tensor]:
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
        longest = max(sequence.num_computed for sequence in sequences)
        # One tensor for all: making one costs more than its few numbers.
        told = [(window_start(each, self.window), each.num_computed, each.token_before(each.num_computed)) for each in sequences]
        starts, lengths, previous = torch.tensor(told, device=self.device).T.contiguous().unbind()
        columns = counting(span_of(self.caches[0], longest), self.device)
        rare = self.with_rows(self._rare_of(sequences).to(self.device))
        return Text(starts, lengths, self.memory_ends(lengths), columns, previous, *rare)

    def _rare_of(self, sequences: Many[Sequence]) -> Tensor:
        """As in DraftTrees; what is recorded or compiled has their number built in, as it has breadth."""
        if self._rare is None:
            return torch.empty(len(sequences), 0, dtype=torch.long)
        return self._rare.of(sequences, None if self.narrows else MOST_RARE)

    def with_rows(self, rare: Tensor) -> tuple[Tensor, Tensor] | tuple[()]:
        """Rare tokens [B, M] and their rows of the head, as in Text."""
        return (rare, self._head.rows(rare)) if self._head is not None and rare.shape[1] else ()

    def memory_ends(self, lengths: Tensor) -> Tensor:
        """As in Text, for texts of ``lengths`` [B]: beside its target a drafter knows all."""
        return lengths

    def roots(self, sequences: Many[Sequence], text: Text) -> Frontier:
        """The first frontier: the texts' last tokens."""
        return self.first_frontier(torch.tensor([sequence.tokens[-1:] for sequence in sequences], device=self.device), text)

    def first_frontier(self, roots: Tensor, text: Text) -> Frontier:
        """The same of tokens [B, 1]."""
        return Frontier(roots, *_blank(len(roots), self.device), self.inherited(text.lengths))

    def _best(self, grown: Candidates, nodes: int) -> list[Tensor]:
        rows = counting(min(nodes, grown.tokens.shape[1] - 1) + 1, grown.tokens.device)
        best = self.compiled.get("tree")
        return best([*grown, rows]) if best else list(best_tree(grown, rows))


def tree_of(best: Many[Tensor], sequences: Many[Sequence], shape: DraftShape) -> DraftTree:
    """The best nodes' tokens, parents and probabilities [B, N], best first, as the sequences' trees."""
    tokens, parents, probabilities = best
    sizes = tuple(tokens.shape[1] if sequence.drafts_here else 0 for sequence in sequences)
    tree = DraftTree(tokens, parents, sizes, probabilities=probabilities)
    if not shape.min_probability:
        return tree
    # No node is likelier than its parent: what is left is a tree again.
    likely = (probabilities >= shape.min_probability).sum(dim=1).tolist()
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
