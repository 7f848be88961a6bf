"""The drafter's teacher-forced pass, arranged for training: a fraction of the work of one over whole sequences.

SA is a single layer over token embeddings, so only positions whose proposal is wanted need its queries and MLP, and likewise CA's.
LSA reads every token, in chunks that fit a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import masked_attention
from models.block import BlockHead
from models.copying import first_head
from models.layers import Rope, queries
from models.llama import Llama, TargetActivations
from models.moa import MoA, attention_over_layers, tokens_before
from training.masks import draft_depths, last_boundaries
from training.rows import Padded

CPU_CHUNK = 256
"""Tokens whose layers LSA reads at a time on a CPU; measured, 128 to 512 are alike, all at once is a third slower."""

GPU_CHUNK = 16384


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What is proposed at R wanted positions [R, E]: ``feature`` enters the LM head, ``predicted_input`` (N > 0) leaves CA."""

    feature: Tensor
    predicted_input: Tensor | None


class DraftForward(nn.Module):
    """A MoA drafter's training pass as a module, so that `accelerate` can wrap it. ``compiled`` fuses LSA with torch.compile."""

    def __init__(self, moa: MoA, *, compiled: bool = False) -> None:
        super().__init__()
        assert not moa.reads_cache_layout
        self.moa = moa
        self._read_layers: Callable[[Tensor, Rope], Tensor] = self._lsa
        if compiled:
            self._read_layers = torch.compile(self._lsa, dynamic=False)

    def forward(
        self,
        target: Llama,
        token_ids: Tensor,
        truth: TargetActivations,
        sa_mask: Tensor,
        ca_mask: Tensor,
        boundaries: Tensor,
        wanted: Tensor,
    ) -> DraftRows:
        """Over whole sequences ``token_ids`` [B, S]; ``wanted`` boolean [B, S]: the positions to return, in row-major order.

        ``sa_mask`` and ``ca_mask`` boolean [B, 1, S, S], true where row i sees token (SA) or memory (CA) j; ``boundaries`` boolean
        [B, S] marks verified positions, whose true inputs the borrowed layers see (N > 0). These may be drawn several times for
        each sequence: then they, masks and ``wanted`` are [K·B, …], one draw of all B sequences after another, over the same
        ``token_ids`` and ``truth``.
        """
        moa = self.moa
        inferred = moa.config.target_layer_inference
        # The borrowed layers of later positions read what was predicted for every drafted one.
        computed = wanted | ~boundaries if inferred else wanted
        padded = Padded(computed)
        memory = self.memory(truth.kv.flatten(0, 1), truth.hidden.flatten(0, 1))
        predicted = self._cross_attend(target, token_ids, memory, sa_mask, ca_mask, boundaries, padded)
        if not inferred:
            return DraftRows(predicted, None)
        rows = padded.rows
        kept = wanted.flatten().index_select(0, rows).nonzero().squeeze(1)
        feature = self._through_borrowed(target, predicted, truth, boundaries, rows)
        return DraftRows(feature.index_select(0, rows.index_select(0, kept)), predicted.index_select(0, kept))

    def memory(self, kv: Tensor, hidden: Tensor) -> Tensor:
        """As ``MoA.memory``, of n tokens: [n, L, E_kv] and [n, E] -> [n, E]."""
        moa = self.moa
        if moa.lsa is None:
            return moa.memory(kv, hidden)
        count, layers, _ = kv.shape
        size = min(count, CPU_CHUNK if kv.device.type == "cpu" else GPU_CHUNK)
        moa.layer_rotary.reserve(layers, kv)
        rope = moa.layer_rotary(torch.arange(layers, device=kv.device).repeat(size))
        # All chunks are alike, the last one filled up: one shape to compile and to keep oneDNN's kernels for.
        kv = F.pad(kv, (0, 0, 0, 0, 0, -count % size))
        memory = torch.cat([self._read_layers(part, rope) for part in kv.split(size)])[:count]
        return moa.with_top(memory, hidden)

    def _lsa(self, kv: Tensor, rope: Rope) -> Tensor:
        moa = self.moa
        assert moa.lsa is not None
        count, layers, _ = kv.shape
        out: Tensor = moa.lsa(kv.flatten(0, 1), rope, attention_over_layers(count, moa.lsa, kv.device))
        memory: Tensor = moa.to_memory(out.view(count, layers, -1).mean(dim=1))
        return memory

    def _cross_attend(
        self,
        target: Llama,
        token_ids: Tensor,
        memory: Tensor,
        sa_mask: Tensor,
        ca_mask: Tensor,
        boundaries: Tensor,
        padded: Padded,
    ) -> Tensor:
        """SA and CA at the wanted positions, and the head of a block drafter: [R, E]."""
        moa = self.moa
        batch, length = token_ids.shape
        draws = len(boundaries) // batch
        rows, taken = padded.rows, padded.rows % (batch * length)
        moa.rotary.reserve(length, memory)
        rope = moa.rotary(torch.arange(length, device=token_ids.device).repeat(batch))
        own_rope = (rope[0].index_select(0, taken), rope[1].index_select(0, taken))
        embeddings = target.embed(token_ids.flatten())
        own = embeddings.index_select(0, taken)
        token_before: Tensor | None = None
        if moa.config.paired:
            previous = target.embed(tokens_before(token_ids))
            memory = moa.of_pairs(memory, embeddings.view_as(previous), previous)
            token_before = previous.flatten(0, 1).index_select(0, taken)
        texts = moa.self_keys_values(embeddings, rope).unflatten(0, (batch, length)).repeat(draws, 1, 1)
        seen, remembered = padded.mask_rows(sa_mask), padded.mask_rows(ca_mask)
        inputs, before = own, token_before
        if moa.block is not None:
            depths = draft_depths(boundaries).flatten().index_select(0, rows)
            inputs = _block_inputs(moa.block, own, depths)
            before = None if token_before is None else _before_block_inputs(inputs, token_before, depths)
            # Of the text a block sees what is verified, and besides itself up to each position.
            block_of = padded.fill(last_boundaries(boundaries).flatten().index_select(0, rows))
            drafted = padded.fill(moa.self_keys_values(inputs, own_rope))
            together = (block_of.unsqueeze(2) == block_of.unsqueeze(1)).tril()
            texts, seen = torch.cat((texts, drafted), dim=1), torch.cat((seen & remembered, together), dim=2)
        newest: Tensor | None = None
        if moa.entry is not None:
            row_starts = torch.arange(batch, device=rows.device).repeat(draws).unsqueeze(1) * length
            newest = memory.index_select(0, (last_boundaries(boundaries) + row_starts).flatten().index_select(0, rows))
        hidden = moa.sa.finish(moa.start(inputs, before, newest), padded.attend(queries(moa.sa, inputs, own_rope), texts, seen))
        memories = moa.cross_keys_values(memory, rope).unflatten(0, (batch, length)).repeat(draws, 1, 1)
        out = moa.leave(hidden, padded.attend(queries(moa.ca, hidden, own_rope), memories, remembered))
        if moa.block is None:
            return out
        copied: Tensor | None = None
        if moa.block.copying is not None:
            assert token_before is not None
            asked = moa.block.copying.queries(own, token_before, own_rope)
            copied = moa.block.copying.output(padded.attend(asked, first_head(memories, moa.config.ca_num_kv_heads), remembered))
        return _block_states(moa.block, out, copied, own, depths)

    def _through_borrowed(
        self, target: Llama, predicted: Tensor, truth: TargetActivations, boundaries: Tensor, rows: Tensor
    ) -> Tensor:
        """The target's last N layers over predicted inputs, with the true input at boundaries: [K·B·S, E]."""
        if truth.layer_input is None:
            raise ValueError("a drafter with borrowed layers needs activations encoded with layer_input")
        config = self.moa.config.target
        batch, length = boundaries.shape
        true = truth.layer_input.flatten(0, 1).to(predicted.dtype).repeat(batch // len(truth.layer_input), 1)
        hidden = torch.where(boundaries.flatten().unsqueeze(-1), true, true.index_copy(0, rows, predicted))
        target.rotary.reserve(length, target.embedding.weight)
        rope = target.rotary(torch.arange(length, device=hidden.device).repeat(batch))
        attend = masked_attention(batch, config.num_heads, config.num_kv_heads, None, causal=True)
        for layer in target.borrowed(config.num_layers - self.moa.config.target_layer_inference):
            hidden = layer(hidden, rope, attend)
        out: Tensor = target.norm(hidden)
        return out


def _block_inputs(block: BlockHead, own: Tensor, depths: Tensor) -> Tensor:
    """What enters SA at wanted rows [R, E]: a root's own embedding, further on stand-ins."""
    return torch.where((depths == 0).unsqueeze(1), own, block.stand_ins.index_select(0, (depths - 1).clamp(min=0)).to(own.dtype))


def _before_block_inputs(inputs: Tensor, before: Tensor, depths: Tensor) -> Tensor:
    """What stands before them [R, E]: before roots the token that does, ``before`` [R, E], further on the block's own input."""
    return torch.where((depths == 0).unsqueeze(1), before, inputs.roll(1, dims=0))


def _block_states(block: BlockHead, features: Tensor, copied: Tensor | None, own: Tensor, depths: Tensor) -> Tensor:
    """The head over blocks, whose rows follow one another: features, what they copy and own embeddings -> states, all [R, E]."""
    at = (depths == 0).nonzero().squeeze(1)
    contributions = block.of_tokens(own) + block.of_positions(features)
    joined = features if copied is None else features + copied
    states, order = [joined.index_select(0, at)], [at]
    place = torch.zeros_like(depths)
    # One step even where no block is that long: processes that train together must all use all weights.
    for depth in range(1, max(2, int(depths.max()) + 1 if len(depths) else 0)):
        place[at] = torch.arange(len(at), device=at.device)
        at = (depths == depth).nonzero().squeeze(1)
        parents = states[-1].index_select(0, place[at - 1])
        states.append(block.step(parents, contributions.index_select(0, at), joined.index_select(0, at)))
        order.append(at)
    return torch.cat(states).index_select(0, torch.cat(order).argsort())
