"""What a MoA drafter computes while serving: tensors in, tensors out, so that each part can be compiled as a whole.

Shapes: B sequences, w frontier nodes each, k candidates a node, S cache rows of text.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionPlan, cached_attention
from models.kv_cache import KVCache, KVWindow
from models.layers import Linear
from models.llama import Llama
from models.moa import MoA
from speculative.sampling import top_tokens


class Frontier(NamedTuple):
    """The nodes that the next level expands.

    ``tokens``, log-probability ``scores`` from the root and candidate ``numbers`` are [B, w]; the additive ``mask``
    [B, w, scratch] tells which scratch rows of SA's cache each node sees.
    """

    tokens: Tensor
    scores: Tensor
    numbers: Tensor
    mask: Tensor


class Candidates(NamedTuple):
    """All that a level proposes, [B, w·k]: scores, tokens, and the number of the node that each would follow."""

    scores: Tensor
    tokens: Tensor
    parents: Tensor


class Place(NamedTuple):
    """Where a level stands, each [1]: its depth, its first scratch row, and the number of its first candidate."""

    depth: Tensor
    row: Tensor
    number: Tensor


class Text(NamedTuple):
    """What drafts follow: ``lengths`` [B] of the verified texts, and the additive ``mask`` [B, 1, 1, S] that hides all else."""

    lengths: Tensor
    mask: Tensor


class MoANetwork(nn.Module):
    """The drafter's networks with what they borrow of the target."""

    def __init__(self, moa: MoA, target: Llama) -> None:
        super().__init__()
        self.moa, self.target = moa, target
        self.head = _draft_head(moa, target)
        self.dtype = moa.sa.qkv.weight.dtype

    def remember(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: Tensor,
        sa: KVCache | KVWindow,
        ca: KVCache | KVWindow,
        rows: tuple[Tensor, Tensor],
    ) -> None:
        """Write what drafting needs of n verified tokens: CA's keys and values of their memory, SA's of their embeddings.

        ``kv`` [n, L, E_kv] are the target's keys and values; ``rows`` [n] are the places in SA's and in CA's cache.
        """
        moa = self.moa
        rope = moa.rotary(positions)
        memory = moa.memory(kv.to(moa.lsa.qkv.weight.dtype)).to(self.dtype)
        ca.write(0, rows[1], moa.cross_keys_values(memory, rope))
        sa.write(0, rows[0], moa.self_keys_values(self._embed(token_ids), rope))

    def feature(self, frontier: Frontier, text: Text, place: Place, sa: KVCache | KVWindow, ca: KVCache | KVWindow) -> Tensor:
        """SA and CA on the frontier: what enters the head (or the borrowed layers) [B·w, E]."""
        moa, (batch, width) = self.moa, frontier.tokens.shape
        positions = (text.lengths + place.depth).unsqueeze(1).expand(-1, width).flatten()
        rope = moa.rotary(positions)
        write = torch.arange(batch, device=positions.device).unsqueeze(1) * sa.rows_per_slot
        write = write + place.row + torch.arange(width, device=positions.device)
        mask = torch.cat((frontier.mask.unsqueeze(1), text.mask.expand(-1, -1, width, -1)), dim=-1)
        plan = AttentionPlan(0, batch, width, positions, write.flatten(), mask.shape[-1], mask)
        attend = cached_attention(sa, 0, plan, plan.rows_mask(moa.sa.num_heads // moa.sa.num_kv_heads), moa.sa.num_heads)
        hidden = moa.sa(self._embed(frontier.tokens.flatten()), rope, attend)
        out: Tensor = moa.ca.finish(hidden, self._cross_attend(moa.cross_queries(hidden, rope), text, ca))
        return out

    def _cross_attend(self, queries: Tensor, text: Text, ca: KVCache | KVWindow) -> Tensor:
        """Queries [B·w, h, d] over the memory of the text [B] -> [B·w, h·d]."""
        batch = text.lengths.shape[0]
        keys, values = ca.read(0, 0, batch, 0, text.mask.shape[-1])
        grouped = queries.reshape(batch, -1, ca.num_kv_heads, ca.head_dim).transpose(1, 2)
        # A sequence without memory must not see only −inf; what it sees instead is then dropped.
        empty = (text.lengths == 0).view(-1, 1, 1, 1)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=text.mask.masked_fill(empty, 0.0))
        return out.masked_fill(empty, 0.0).transpose(1, 2).reshape(queries.shape[0], -1)

    def candidates(self, feature: Tensor, batch: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """What leaves CA [B·w, E] -> the best logits and their token ids [B, w, count], and logsumexp over all [B, w, 1]."""
        logits = self.head(feature.to(self.head.weight.dtype)).float().unflatten(0, (batch, -1))
        best, ids = top_tokens(logits, count)
        if self.moa.draft_vocabulary is not None:
            ids = self.moa.draft_vocabulary[ids]
        return best, ids, logits.logsumexp(-1, keepdim=True)

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.target.embed(token_ids).to(self.dtype)


def select(
    frontier: Frontier, log_probs: Tensor, token_ids: Tensor, place: Place, breadth: int
) -> tuple[Candidates, Frontier, Tensor]:
    """Candidates [B, w, k] of a frontier -> all of them in line, the best ``breadth`` as the next frontier, and its reach [1].

    Reach is the probability of getting to the new frontier by the drafter's lights: a sum over its nodes, a mean over the batch.
    """
    width, count = log_probs.shape[1:]
    scores = (frontier.scores.unsqueeze(-1) + log_probs).flatten(1)
    tokens = token_ids.flatten(1)
    parents = frontier.numbers.repeat_interleave(count, dim=1)
    # Sizes may be symbols while compiling, and comparing those would make constants of them.
    best, index = scores.topk(breadth if count >= breadth else min(breadth, width * count), dim=1)
    # Every new node sees what its parent saw, and itself.
    scratch = frontier.mask.shape[-1]
    seen = frontier.mask.gather(1, (index // count).unsqueeze(-1).expand(-1, -1, scratch))
    columns, own = torch.arange(scratch, device=index.device), torch.arange(best.shape[1], device=index.device).unsqueeze(1)
    mask = seen.masked_fill(columns == place.row + width + own, 0.0)
    following = Frontier(tokens.gather(1, index), best, index + place.number, mask)
    return Candidates(scores, tokens, parents), following, best.exp().sum(dim=1).mean().unsqueeze(0)


def _draft_head(moa: MoA, target: Llama) -> Linear:
    """The target's LM head, cut to the draft vocabulary where there is one."""
    if moa.draft_vocabulary is None:
        return target.lm_head
    head = Linear(target.config.hidden_size, len(moa.draft_vocabulary)).requires_grad_(False)
    head.weight = nn.Parameter(target.lm_head.weight[moa.draft_vocabulary], requires_grad=False)
    return head
