"""How draft trees grow: pure functions of tensors, so that they can be part of a compiled graph.

Shapes: B sequences, w frontier nodes each, k candidates a node, S columns of text. Candidates are numbered in the order in which
they were proposed; the root is number 0.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from speculative.sampling import gumbel_noise, noise_keys, noise_stream, top_tokens
from speculative.sequence import Sequence

CANDIDATES = 32
"""Drafter tokens per node that get noise when sampling; the rest are too unlikely to win."""

_PER_LEVEL = 1e-3
"""What a level costs beyond its tokens' log-probabilities, so that a node never ties with its parent."""

_LEAST = -64.0
"""Where log-probabilities end: sums of −inf would tie."""


class Frontier(NamedTuple):
    """The nodes that the next level expands.

    ``tokens``, log-probability ``scores`` from the root and candidate ``numbers`` are [B, w]; ``inherited`` [B, w, …] is what else
    a level must know of a node: where the drafter runs level by level an additive mask [B, w, scratch], the scratch rows of SA's
    cache that the node sees; in a block the state [B, w, E] of its parent.
    """

    tokens: Tensor
    scores: Tensor
    numbers: Tensor
    inherited: Tensor


class Candidates(NamedTuple):
    """The root and all that was proposed so far, [B, n]: scores, tokens, and the number of the node that each would follow."""

    scores: Tensor
    tokens: Tensor
    parents: Tensor


class Place(NamedTuple):
    """Where a level stands, each [1]: its depth below the root, and its first scratch row."""

    depth: Tensor
    row: Tensor


class Text(NamedTuple):
    """What drafts follow: where texts end (``lengths`` [B]) and from where on a drafter reads them (``starts`` [B]).

    What comes of the target, memory, is there up to ``memory_ends`` [B]: less far only where the target is elsewhere.
    ``columns`` [S] are the positions 0, 1, … to look at, ``previous`` [B] the tokens before the roots. ``rare`` [B, M] are tokens
    of the texts that a draft vocabulary lacks, −1 behind those of texts with fewer, and ``rare_rows`` [B, M, E] their rows of the
    LM head; None where there are none.
    """

    starts: Tensor
    lengths: Tensor
    memory_ends: Tensor
    columns: Tensor
    previous: Tensor
    rare: Tensor | None = None
    rare_rows: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Those that there are."""
        return tuple(each for each in self if each is not None)


class Sampling(NamedTuple):
    """How each sequence samples, each [B]: its noise ``streams``, and its settings; greedy sequences have neutral ones."""

    streams: Tensor
    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, sequences: Many[Sequence], device: torch.device) -> Sampling | None:
        """None when all are greedy."""
        params = [sequence.request.params for sequence in sequences]
        if all(p.greedy for p in params):
            return None
        settings = [(True, 1.0, 0, 1.0, 0.0) if p.greedy else (False, p.temperature, p.top_k, p.top_p, p.min_p) for p in params]
        columns = ([noise_stream(sequence.sampler.seed) for sequence in sequences], *zip(*settings, strict=True))
        return cls(*(torch.tensor(column, device=device) for column in columns))


class Level(NamedTuple):
    """All that a level starts from; without ``sampling`` it is a greedy one. Logits are divided by ``temperature`` [1]."""

    frontier: Frontier
    grown: Candidates
    text: Text
    place: Place
    temperature: Tensor
    sampling: Sampling | None

    def tensors(self) -> tuple[Tensor, ...]:
        """Those that graphs are given, in their order, but for the settings of sampling."""
        return (*self.frontier, *self.grown, *self.text.tensors(), *self.place, self.temperature)


def frontier_previous(level: Level) -> Tensor:
    """The tokens before the frontier's [B, w]: their parents, or before a root the text's."""
    frontier, grown = level.frontier, level.grown
    parents = grown.tokens.gather(1, grown.parents.gather(1, frontier.numbers))
    return torch.where(frontier.numbers == 0, level.text.previous.unsqueeze(1), parents)


def candidates(level: Level, logits: Tensor, draft_vocabulary: Tensor | None, breadth: int) -> tuple[Tensor, Tensor]:
    """The frontier's logits [B, w, K + M] -> log-probabilities and token ids of each node's ``breadth`` likeliest [B, w, breadth].

    ``draft_vocabulary`` [K] are the ids that logits stand for, None if they are their own; the others stand for rare tokens.
    """
    text, temperature, sampling = level.text, level.temperature, level.sampling
    best, outputs = top_tokens(logits, breadth if sampling is None else max(breadth, CANDIDATES))
    ids = _tokens(outputs, draft_vocabulary, text.rare)
    if sampling is None:
        return best / temperature - (logits / temperature).logsumexp(-1, keepdim=True), ids
    return perturb(best, ids, text.lengths + level.place.depth + 1, sampling, temperature, breadth)


def _tokens(outputs: Tensor, draft_vocabulary: Tensor | None, rare: Tensor | None) -> Tensor:
    """The ids [B, w, k] of the tokens that outputs of a ``DraftHead`` stand for."""
    if draft_vocabulary is None:
        return outputs
    count = draft_vocabulary.shape[0]
    ids = draft_vocabulary[outputs.clamp(max=count - 1)]
    if rare is None:
        return ids
    # Where logits are not numbers, what is chosen may be no token: any will do.
    rarely = rare.clamp(min=0).gather(1, (outputs - count).clamp(min=0).flatten(1)).view_as(outputs)
    return torch.where(outputs < count, ids, rarely)


def perturb(
    best: Tensor, ids: Tensor, positions: Tensor, sampling: Sampling, draft_temperature: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """A node's best logits and their token ids [B, w, k] -> log-probabilities and ids of the likeliest [B, w, count].

    The noise that the target's tokens at ``positions`` [B] will get is added, and the sampling settings are applied: see DESIGN.
    """
    streams, greedy, temperature, top_k, top_p, min_p = sampling
    noise = gumbel_noise(noise_keys(streams, positions).view(-1, 1, 1), ids).masked_fill(greedy.view(-1, 1, 1), 0.0)
    best = best / temperature.view(-1, 1, 1)
    # What top-k, top-p and min-p would leave if the target agreed.
    rank = torch.arange(best.shape[-1], device=best.device)
    within = (top_k == 0).view(-1, 1, 1) | (rank < top_k.view(-1, 1, 1))
    probs = best.masked_fill(~within, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs
    allowed = within & (before < top_p.view(-1, 1, 1)) & (probs >= min_p.view(-1, 1, 1) * probs[..., :1])
    log_probs = ((best + noise) / draft_temperature).masked_fill(~allowed, float("-inf")).log_softmax(-1)
    log_probs, index = log_probs.topk(min(count, best.shape[-1]), dim=-1)
    return log_probs, ids.gather(-1, index)


def grow(
    frontier: Frontier, grown: Candidates, log_probs: Tensor, ids: Tensor, breadth: int
) -> tuple[Candidates, Frontier, Tensor]:
    """A frontier's candidates [B, w, k] -> all candidates, the best ``breadth`` new ones as the next frontier, and its reach [1].

    The new frontier inherits what stands in the old one. Reach is the probability of getting to the new frontier by the drafter's
    lights: a sum over its nodes, a mean over the batch.
    """
    width, count = log_probs.shape[1:]
    scores = (frontier.scores.unsqueeze(-1) + log_probs.clamp(min=_LEAST) - _PER_LEVEL).flatten(1)
    tokens = ids.flatten(1)
    parents = frontier.numbers.repeat_interleave(count, dim=1)
    # Sizes may be symbols while compiling, and comparing those would make constants of them.
    best, index = scores.topk(breadth if count >= breadth else min(breadth, width * count), dim=1)
    inherited = frontier.inherited.gather(1, (index // count).unsqueeze(-1).expand(-1, -1, frontier.inherited.shape[-1]))
    following = Frontier(tokens.gather(1, index), best, index + grown.scores.shape[1], inherited)
    everything = Candidates(*(torch.cat(parts, dim=1) for parts in zip(grown, (scores, tokens, parents), strict=True)))
    return everything, following, best.exp().sum(dim=1).mean().unsqueeze(0)


def expand(
    level: Level, logits: Tensor, draft_vocabulary: Tensor | None, breadth: int, inherited: Tensor, *, masked: bool
) -> tuple[Candidates, Frontier, Tensor]:
    """The frontier's logits [B, w, K + M] -> as ``grow``; its children inherit ``inherited`` [B, w, …] of their parents.

    Where that begins with a mask of scratch rows (``masked``), each of them sees its own row too.
    """
    log_probs, ids = candidates(level, logits, draft_vocabulary, breadth)
    everything, following, reach = grow(level.frontier._replace(inherited=inherited), level.grown, log_probs, ids, breadth)
    if masked:
        following = seeing_themselves(following, level.place.row + level.frontier.tokens.shape[1])
    return everything, following, reach


def seeing_themselves(frontier: Frontier, first_row: Tensor) -> Frontier:
    """A frontier that has inherited its parents' masks, each node seeing its own scratch row too; they begin at ``first_row``."""
    mask = frontier.inherited
    columns, own = torch.arange(mask.shape[-1], device=mask.device), torch.arange(mask.shape[1], device=mask.device).unsqueeze(1)
    return frontier._replace(inherited=mask.masked_fill(columns == first_row + own, 0.0))


def best_tree(grown: Candidates, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best candidates as a tree: tokens, parents and probabilities [B, N] as in DraftTree, best first; ``rows`` are 0, 1, … N.

    A node scores less than its parent, so the best candidates form a tree, the root is the first, and parents precede children.
    """
    scores, best = grown.scores.topk(rows.shape[0], dim=1)
    row_of = torch.zeros_like(grown.parents).scatter(1, best, rows.expand(best.shape))
    nodes = best[:, 1:]
    return grown.tokens.gather(1, nodes), row_of.gather(1, grown.parents.gather(1, nodes)), scores[:, 1:].exp()
