"""Tree drafting with a Mixture-of-Attentions drafter, batched over sequences.

Memory, and SA's keys and values, are kept for verified tokens; tree nodes live in SA's scratch rows while a tree grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import AttentionPlan, additive, cached_attention
from models.kv_cache import KVCache
from models.layers import Linear
from models.llama import Llama
from models.loader import optimize_for_inference
from models.moa import MoA
from speculative.batch import borrowed_plan, span_of
from speculative.drafters.base import VerifiedTokens
from speculative.policy import DraftShape
from speculative.sampling import gumbel_noise, noise_key, top_tokens
from speculative.sequence import Sequence
from speculative.tree import DraftTree

_CANDIDATES = 32
"""Drafter tokens per node that get noise when sampling; the rest are too unlikely to win."""


class MoADrafter:
    """Proposes EAGLE-2-style trees: every level expands its best nodes, and the best nodes of all levels are verified."""

    name = "moa"

    def __init__(self, moa: MoA, target: Llama, num_slots: int, length: int, shape: DraftShape) -> None:
        self.moa, self.target = moa, target
        if target.device.type == "cpu" and target.dtype == torch.bfloat16:
            # LSA has a row per layer of every token: enough for bfloat16 products, and the target's cache is read as it is.
            moa.lsa.to(torch.bfloat16)
            moa.to_memory.to(torch.bfloat16)
        optimize_for_inference(moa)
        self.head = _draft_head(moa, target)
        self.borrowed = moa.config.target_layer_inference
        config = moa.config
        head_dim = config.target.head_dim
        scratch = 1 + shape.depth * shape.breadth
        self.dtype = moa.sa.qkv.weight.dtype
        device, dtype = target.device, self.dtype
        self.sa_cache = KVCache(1, num_slots, scratch, length, config.sa_num_kv_heads, head_dim, dtype=dtype, device=device)
        self.ca_cache = KVCache(1, num_slots, 0, length, config.ca_num_kv_heads, head_dim, dtype=dtype, device=device)
        moa.rotary.reserve(length + scratch, moa.sa.qkv.weight)
        self._sa_groups = config.target.num_heads // config.sa_num_kv_heads
        self._ca_groups = config.target.num_heads // config.ca_num_kv_heads

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
        rope = self.moa.rotary(positions)
        kv = target_cache.gather(target_cache.flat_rows(slots, positions))
        memory = self.moa.memory(kv.to(self.moa.dtype)).to(self.dtype)
        self.ca_cache.write(0, self.ca_cache.flat_rows(slots, positions), self.moa.cross_keys_values(memory, rope))
        self.sa_cache.write(
            0, self.sa_cache.flat_rows(slots, positions), self.moa.self_keys_values(self._embed(verified.token_ids), rope)
        )

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache) -> DraftTree:
        """Draft level by level; see DESIGN: nodes are ranked by the perturbed drafter's probability."""
        growth = _Growth(self, sequences, shape, target_cache)
        while growth.expand():
            pass
        return growth.tree()

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.target.embed(token_ids).to(self.dtype)


class _Growth:
    """One step's trees while they grow. Shapes: B sequences, w frontier nodes each, k candidates a node."""

    def __init__(self, drafter: MoADrafter, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache) -> None:
        self.drafter, self.shape, self.target_cache = drafter, shape, target_cache
        self.sequences, self.batch = sequences, len(sequences)
        device = drafter.target.device
        self.lengths = torch.tensor([sequence.num_computed for sequence in sequences], device=device)
        self.longest = max(sequence.num_computed for sequence in sequences)
        self.sampling = _Sampling.of(sequences, device)
        self.level = 0
        self.tokens = torch.tensor([sequence.tokens[-1:] for sequence in sequences], device=device)
        self.scores = torch.zeros(self.batch, 1, device=device)
        # Row numbers among all candidates of the tree: the root is 0, then level by level.
        self.numbers = torch.zeros(self.batch, 1, dtype=torch.long, device=device)
        self.drafted: list[tuple[Tensor, Tensor, Tensor]] = []
        cache = drafter.sa_cache
        self.span = cache.scratch + span_of(cache, self.longest)
        columns = torch.arange(self.span - cache.scratch, device=device)
        self.prefix_mask = additive(columns < self.lengths.view(-1, 1, 1, 1), drafter.dtype)
        self.tree_mask = torch.full((self.batch, 1, 1, cache.scratch), float("-inf"), dtype=drafter.dtype, device=device)
        self.tree_mask[..., 0] = 0.0
        self.first_row = 0
        slots = torch.arange(self.batch, device=device).unsqueeze(1)
        self.scratch_rows = slots * cache.rows_per_slot + torch.arange(cache.scratch, device=device)

    def expand(self) -> bool:
        """Draft one level from the frontier; True when another level should follow."""
        width = self.tokens.shape[1]
        logits = self._logits()
        log_probs, tokens = self._candidates(logits.view(self.batch, width, -1))
        scores = (self.scores.unsqueeze(-1) + log_probs).flatten(1)
        parents = self.numbers.repeat_interleave(log_probs.shape[-1], dim=1)
        tokens = tokens.flatten(1)
        self.drafted.append((scores, tokens, parents))
        first_number = 1 + sum(part[0].shape[1] for part in self.drafted[:-1])
        self.level += 1
        if self.level >= self.shape.depth:
            return False
        best, index = scores.topk(min(self.shape.breadth, scores.shape[1]), dim=1)
        if self.shape.min_reach > 0.0 and bool(best.exp().sum(dim=1).mean() < self.shape.min_reach):
            return False
        self._grow_mask(index // log_probs.shape[-1])
        self.tokens, self.scores, self.numbers = tokens.gather(1, index), best, index + first_number
        return True

    def _grow_mask(self, parents: Tensor) -> None:
        """Every node of the new frontier sees what its parent saw, and itself."""
        width = parents.shape[1]
        self.first_row += self.tokens.shape[1]
        scratch = self.tree_mask.shape[-1]
        mask = self.tree_mask.squeeze(1).gather(1, parents.unsqueeze(-1).expand(-1, -1, scratch))
        mask[:, :, self.first_row : self.first_row + width].diagonal(dim1=1, dim2=2).zero_()
        self.tree_mask = mask.unsqueeze(1)

    def _logits(self) -> Tensor:
        """Run SA, CA and the head on the frontier: float32 logits [B·w, V], or [B·w, K] over a draft vocabulary."""
        drafter, moa, target = self.drafter, self.drafter.moa, self.drafter.target
        width = self.tokens.shape[1]
        positions = (self.lengths + self.level).repeat_interleave(width)
        rope = moa.rotary(positions)
        hidden = moa.sa(
            drafter._embed(self.tokens.flatten()),
            rope,
            cached_attention(
                drafter.sa_cache, 0, plan := self._plan(positions), plan.rows_mask(drafter._sa_groups), moa.sa.num_heads
            ),
        )
        feature = moa.ca.finish(hidden, self._cross_attend(moa.cross_queries(hidden, rope)))
        if drafter.borrowed:
            feature = target.run_layers(
                feature.to(target.dtype),
                borrowed_plan(self.target_cache, self.lengths, self.longest, positions, self.tree_mask, self.first_row),
                self.target_cache,
                first_layer=target.config.num_layers - drafter.borrowed,
            )
        logits: Tensor = drafter.head(feature.to(target.dtype))
        return logits.float()

    def _plan(self, positions: Tensor) -> AttentionPlan:
        width = self.tokens.shape[1]
        write = self.scratch_rows[:, self.first_row : self.first_row + width].flatten()
        mask = torch.cat((self.tree_mask, self.prefix_mask.expand(-1, -1, width, -1)), dim=-1)
        return AttentionPlan(0, self.batch, width, positions, write, 0, self.span, mask)

    def _cross_attend(self, queries: Tensor) -> Tensor:
        """Queries [B·w, h, d] over the memory of verified tokens -> [B·w, h·d]."""
        if self.longest == 0:
            return torch.zeros_like(queries).flatten(1)
        cache, width = self.drafter.ca_cache, self.tokens.shape[1]
        alone = self.batch == 1
        span = self.longest if alone else span_of(cache, self.longest)
        keys, values = cache.read(0, 0, self.batch, 0, span)
        grouped = queries.view(self.batch, -1, cache.num_kv_heads, cache.head_dim).transpose(1, 2)
        # Alone, everything in the span is visible and no mask is needed; a sequence without memory must not see only −inf.
        mask = None if alone else self.prefix_mask[..., :span].masked_fill((self.lengths == 0).view(-1, 1, 1, 1), 0.0)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return out.transpose(1, 2).reshape(self.batch * width, -1)

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, w, V] -> log-probabilities and token ids of each node's best candidates, [B, w, breadth]."""
        breadth = self.shape.breadth
        if self.sampling is None:
            best, ids = top_tokens(logits.log_softmax(-1), breadth)
            return best, self._token_ids(ids)
        best, ids = top_tokens(logits / self.sampling.temperature, _CANDIDATES)
        ids = self._token_ids(ids)
        keys = [
            0 if sequence.request.params.greedy else noise_key(sequence.seed, sequence.num_computed + self.level + 1)
            for sequence in self.sequences
        ]
        noise = gumbel_noise(torch.tensor(keys, device=logits.device).view(-1, 1, 1), ids)
        perturbed = best + noise.masked_fill_(self.sampling.greedy, 0.0)
        log_probs = perturbed.masked_fill_(~self.sampling.allowed(best), float("-inf")).log_softmax(-1)
        log_probs, index = log_probs.topk(min(breadth, log_probs.shape[-1]), dim=-1)
        return log_probs, ids.gather(-1, index)

    def _token_ids(self, ids: Tensor) -> Tensor:
        vocabulary = self.drafter.moa.draft_vocabulary
        return ids if vocabulary is None else vocabulary[ids]

    def tree(self) -> DraftTree:
        """The best nodes of all levels.

        A child never scores above its parent, and of equals the stable sort takes the parent first, so they form a tree.
        """
        scores = torch.cat([part[0] for part in self.drafted], dim=1)
        tokens = torch.cat([part[1] for part in self.drafted], dim=1)
        parents = torch.cat([part[2] for part in self.drafted], dim=1)
        count = min(self.shape.nodes, scores.shape[1])
        index = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
        rows = torch.zeros(self.batch, scores.shape[1] + 1, dtype=torch.long, device=scores.device)
        rows.scatter_(1, index + 1, torch.arange(1, count + 1, device=scores.device).expand(self.batch, -1))
        sizes = tuple(count if sequence.speculative else 0 for sequence in self.sequences)
        return DraftTree(tokens.gather(1, index), rows.gather(1, parents.gather(1, index)), sizes)


def _draft_head(moa: MoA, target: Llama) -> Linear:
    """The target's LM head, cut to the draft vocabulary where there is one."""
    if moa.draft_vocabulary is None:
        return target.lm_head
    head = Linear(target.config.hidden_size, len(moa.draft_vocabulary)).requires_grad_(False)
    head.weight = torch.nn.Parameter(target.lm_head.weight[moa.draft_vocabulary], requires_grad=False)
    head.pack()
    return head


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
