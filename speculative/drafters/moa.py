"""Tree drafting with a Mixture-of-Attentions drafter, batched over sequences.

Memory, and SA's keys and values, are kept for verified tokens; tree nodes live in SA's scratch rows while a tree grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from models.attention import additive
from models.kv_cache import KVCache
from models.llama import CompiledGraph, Llama
from models.loader import optimize_for_inference
from models.moa import MoA
from speculative.batch import borrowed_plan, span_of
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.moa_network import Candidates, Frontier, MoANetwork, Place, Text, select
from speculative.policy import DraftShape
from speculative.sampling import gumbel_noise, noise_key
from speculative.sequence import Sequence
from speculative.tree import DraftTree

CANDIDATES = 32
"""Drafter tokens per node that get noise when sampling; the rest are too unlikely to win."""


class MoADrafter:
    """Proposes EAGLE-2-style trees: every level expands its best nodes, and the best nodes of all levels are verified.

    ``compiled`` holds graphs that replace parts of the network, by name: see ``moa_graphs``.
    """

    name = "moa"

    def __init__(self, moa: MoA, target: Llama, num_slots: int, length: int, shape: DraftShape) -> None:
        self.target = target
        if target.device.type == "cpu" and target.dtype == torch.bfloat16:
            # LSA has a row per layer of every token: enough for bfloat16 products, and the target's cache is read as it is.
            moa.lsa.to(torch.bfloat16)
            moa.to_memory.to(torch.bfloat16)
        self.network = MoANetwork(moa, target)
        self.borrowed = moa.config.target_layer_inference
        config = moa.config
        head_dim = config.target.head_dim
        self.scratch = 1 + shape.depth * shape.breadth
        device, dtype = target.device, self.network.dtype
        self.sa_cache = KVCache(1, num_slots, self.scratch, length, config.sa_num_kv_heads, head_dim, dtype=dtype, device=device)
        self.ca_cache = KVCache(1, num_slots, 0, length, config.ca_num_kv_heads, head_dim, dtype=dtype, device=device)
        moa.rotary.reserve(length + self.scratch, moa.sa.qkv.weight)
        moa.layer_rotary.reserve(config.target.num_layers, moa.lsa.qkv.weight)
        self.compiled: dict[str, CompiledGraph] = {}

    def pack(self) -> None:
        """Prepare the network's weights for inference without compiled graphs."""
        optimize_for_inference(self.network.moa)
        if self.network.head is not self.target.lm_head:
            self.network.head.pack()

    def target_scratch_rows(self, shape: DraftShape) -> int:
        """Borrowed layers keep the keys and values of drafted nodes in the target's scratch rows."""
        return 1 + shape.depth * shape.breadth if self.borrowed else 0

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Move memory and SA's state."""
        self.sa_cache.move_slot(source, destination, length)
        self.ca_cache.move_slot(source, destination, length)

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """LSA on newly verified tokens, CA's keys and values of their memory, SA's of their embeddings."""
        slots, positions = verified.slots, verified.positions
        source = target_cache.flat_rows(slots, positions)
        rows = (self.sa_cache.flat_rows(slots, positions), self.ca_cache.flat_rows(slots, positions))
        if remember := self.compiled.get("remember"):
            windows = (layer for kv in (target_cache, self.sa_cache, self.ca_cache) for layer in kv.window(0, kv.num_slots))
            remember([verified.token_ids, positions, source, *rows, *windows])
        else:
            kv = target_cache.gather(source)
            self.network.remember(verified.token_ids, positions, kv, self.sa_cache, self.ca_cache, rows)

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache) -> DraftTree:
        """Draft level by level; see DESIGN: nodes are ranked by the perturbed drafter's probability."""
        growth = _Growth(self, sequences, shape, target_cache)
        while growth.expand():
            pass
        return growth.tree()


class _Growth:
    """One step's trees while they grow."""

    def __init__(self, drafter: MoADrafter, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache) -> None:
        self.drafter, self.shape, self.target_cache = drafter, shape, target_cache
        self.sequences, self.batch = sequences, len(sequences)
        device, dtype = drafter.target.device, drafter.network.dtype
        self.longest = max(sequence.num_computed for sequence in sequences)
        lengths = torch.tensor([sequence.num_computed for sequence in sequences], device=device)
        columns = torch.arange(span_of(drafter.sa_cache, self.longest), device=device)
        self.text = Text(lengths, additive(columns < lengths.view(-1, 1, 1, 1), dtype))
        self.sampling = _Sampling.of(sequences, device)
        self.level = self.row = 0
        self.number = 1
        mask = torch.full((self.batch, 1, drafter.scratch), float("-inf"), dtype=dtype, device=device)
        mask[..., 0] = 0.0
        # Numbers count all candidates of the tree: the root is 0, then level by level.
        self.frontier = Frontier(
            torch.tensor([sequence.tokens[-1:] for sequence in sequences], device=device),
            torch.zeros(self.batch, 1, device=device),
            torch.zeros(self.batch, 1, dtype=torch.long, device=device),
            mask,
        )
        self.drafted: list[Candidates] = []

    def expand(self) -> bool:
        """Draft one level from the frontier; True when another level should follow."""
        width = self.frontier.tokens.shape[1]
        candidates, following, reach = self._level(_place(self.level, self.row, self.number, self.drafter.target.device))
        self.drafted.append(candidates)
        self.level += 1
        self.row += width
        self.number += candidates.scores.shape[1]
        self.frontier = following
        return self.level < self.shape.depth and float(reach) >= self.shape.min_reach

    def _level(self, place: Place) -> tuple[Candidates, Frontier, Tensor]:
        drafter, frontier, breadth = self.drafter, self.frontier, self.shape.breadth
        compiled = drafter.compiled
        windows = (drafter.sa_cache.window(0, self.batch)[0], drafter.ca_cache.window(0, self.batch)[0])
        inputs = [*frontier, *self.text, *place, *windows]
        if self.sampling is None and "level" in compiled:
            outputs = compiled["level"](inputs)
            return Candidates(*outputs[:3]), Frontier(*outputs[3:7]), outputs[7]
        if self.sampling is not None and "candidates" in compiled:
            best, ids, total = compiled["candidates"](inputs)
        else:
            feature = drafter.network.feature(frontier, self.text, place, drafter.sa_cache, drafter.ca_cache)
            feature = self._through_borrowed(feature) if drafter.borrowed else feature
            best, ids, total = drafter.network.candidates(feature, self.batch, breadth if self.sampling is None else CANDIDATES)
        if self.sampling is None:
            log_probs = best - total
        else:
            log_probs, ids = self._perturbed(self.sampling, best, ids)
        return select(frontier, log_probs, ids, place, breadth)

    def _through_borrowed(self, feature: Tensor) -> Tensor:
        """Run the target's last N layers on the frontier: [B·w, E] -> [B·w, E]."""
        target, lengths = self.drafter.target, self.text.lengths
        positions = (lengths + self.level).repeat_interleave(self.frontier.tokens.shape[1])
        tree_mask = self.frontier.mask.unsqueeze(1)
        return target.run_layers(
            feature.to(target.dtype),
            borrowed_plan(self.target_cache, lengths, self.longest, positions, tree_mask, self.row),
            self.target_cache,
            first_layer=target.config.num_layers - self.drafter.borrowed,
        )

    def _perturbed(self, sampling: _Sampling, best: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Best logits and token ids [B, w, 32] -> log-probabilities under noise and sampling settings, and ids, [B, w, breadth]."""
        keys = [
            0 if sequence.request.params.greedy else noise_key(sequence.seed, sequence.num_computed + self.level + 1)
            for sequence in self.sequences
        ]
        noise = gumbel_noise(torch.tensor(keys, device=best.device).view(-1, 1, 1), ids)
        best = best / sampling.temperature
        perturbed = best + noise.masked_fill_(sampling.greedy, 0.0)
        log_probs = perturbed.masked_fill_(~sampling.allowed(best), float("-inf")).log_softmax(-1)
        log_probs, index = log_probs.topk(min(self.shape.breadth, log_probs.shape[-1]), dim=-1)
        return log_probs, ids.gather(-1, index)

    def tree(self) -> DraftTree:
        """The best nodes of all levels.

        A child never scores above its parent, and of equals the stable sort takes the parent first, so they form a tree.
        """
        scores, tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*self.drafted, strict=True))
        count = min(self.shape.nodes, scores.shape[1])
        index = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
        rows = torch.zeros(self.batch, scores.shape[1] + 1, dtype=torch.long, device=scores.device)
        rows.scatter_(1, index + 1, torch.arange(1, count + 1, device=scores.device).expand(self.batch, -1))
        sizes = tuple(count if sequence.speculative else 0 for sequence in self.sequences)
        return DraftTree(tokens.gather(1, index), rows.gather(1, parents.gather(1, index)), sizes)


@cache
def _place(depth: int, row: int, number: int, device: torch.device) -> Place:
    """Built once for each level of a shape: creating tensors costs as much as computing with them."""
    return Place(*(torch.tensor([value], device=device) for value in (depth, row, number)))


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The batch's sampling settings, each [B, 1, 1]; greedy sequences have neutral ones."""

    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, sequences: list[Sequence], device: torch.device) -> _Sampling | None:
        """None when all are greedy."""
        params = [sequence.request.params for sequence in sequences]
        if all(p.greedy for p in params):
            return None
        columns = zip(
            *((True, 1.0, 0, 1.0, 0.0) if p.greedy else (False, p.temperature, p.top_k, p.top_p, p.min_p) for p in params),
            strict=True,
        )
        return cls(*(torch.tensor(column, device=device).view(-1, 1, 1) for column in columns))

    def allowed(self, best: Tensor) -> Tensor:
        """Which of the best candidates [B, w, k], in falling order, top-k, top-p and min-p would leave if the target agreed."""
        rank = torch.arange(best.shape[-1], device=best.device)
        within = (self.top_k == 0) | (rank < self.top_k)
        probs = best.masked_fill(~within, float("-inf")).softmax(-1)
        before = probs.cumsum(-1) - probs
        return within & (before < self.top_p) & (probs >= self.min_p * probs[..., :1])
