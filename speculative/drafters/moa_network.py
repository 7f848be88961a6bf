"""What a MoA drafter computes while serving: tensors in, tensors out, so that each part can be compiled as a whole.

``DraftNetwork`` drafts, from memory that is there; ``MoANetwork``, beside the target, makes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionPlan, additive, cached_attention
from models.kv_cache import KVCache, KVWindow
from models.moa import DraftingMoA, MoA
from speculative.drafters.base import TargetEnds
from speculative.drafters.draft_head import DraftHead
from speculative.drafters.growth import Candidates, Frontier, Level, Text, expand, frontier_previous

DraftCaches = Sequence[KVCache | KVWindow]
"""What drafting keeps of verified tokens: SA's and CA's keys and values, and for an entry a third, memory itself, a row a token."""


class DraftNetwork(nn.Module):
    """The drafter's networks with what they borrow of the target. Shapes as in ``growth``."""

    def __init__(self, moa: DraftingMoA, target: TargetEnds) -> None:
        super().__init__()
        self.moa, self.target = moa, target
        self.head = DraftHead(target, moa.draft_vocabulary)
        self.dtype = moa.sa.qkv.dtype
        self.known_tokens: Tensor | None
        self.known_index: Tensor | None
        for name, known in zip(("known_tokens", "known_index"), self._known(), strict=True):
            self.register_buffer(name, known, persistent=known is not None)

    def of_tokens(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """SA's keys and values of verified tokens [n] at ``positions`` [n]: [n, 2·n_kv·d]."""
        return self.moa.self_keys_values(self._embed(token_ids), self.moa.rotary(positions))

    def feature(self, level: Level, caches: DraftCaches) -> Tensor:
        """SA and CA on the frontier: what enters the head (or the borrowed layers) [B·w, E]."""
        frontier, text, place = level.frontier, level.text, level.place
        inputs = self._embed(frontier.tokens.flatten())
        before = self._embed(frontier_previous(level).flatten()) if self.moa.config.paired else None
        return self._attend(inputs, before, frontier.inherited, place.depth, place.row, text, caches)

    @torch.no_grad()
    def _known(self) -> tuple[Tensor | None, Tensor | None]:
        """What each token of the draft vocabulary contributes to a block's step [K, 2I], and their numbers by token id [V].

        Computed once, they save a level a third of its weights. What rare tokens contribute ``block`` tells.
        """
        block, vocabulary = self.moa.block, self.moa.draft_vocabulary
        if block is None or vocabulary is None:
            return None, None
        index = torch.zeros(self.target.config.vocab_size, dtype=torch.long, device=vocabulary.device)
        index[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
        return block.of_tokens(self._embed(vocabulary)), index

    def block(self, roots: Tensor, text: Text, caches: DraftCaches) -> Tensor:
        """SA and CA on the roots [B, 1] and the stand-ins that follow.

        Features [B, size, E], and beside them what their positions contribute: [B, size, E + 2I]. In rows behind them stands what
        rare tokens contribute, beside nothing: [B, size + M, E + 2I].
        """
        block, batch = self.moa.block, roots.shape[0]
        assert block is not None
        inputs = torch.cat((self._embed(roots), block.stand_ins.expand(batch, -1, -1)), dim=1)
        before: Tensor | None = None
        if self.moa.config.paired:
            before = torch.cat((self._embed(text.previous.unsqueeze(1)), inputs[:, :-1]), dim=1).flatten(0, 1)
        depths = torch.arange(block.size, device=roots.device)
        seen = additive(depths <= depths.unsqueeze(1), self.dtype).expand(batch, -1, -1)
        features = self._attend(inputs.flatten(0, 1), before, seen, depths, depths[:1], text, caches)
        known = torch.cat((features, block.of_positions(features)), dim=-1).view(batch, block.size, -1)
        if text.rare is None:
            return known
        rare = block.of_tokens(self._embed(text.rare.clamp(min=0)))
        return torch.cat((known, F.pad(rare, (features.shape[-1], 0))), dim=1)

    def opening(self, level: Level, known: Tensor, caches: DraftCaches) -> Tensor:
        """The roots' states [B, 1, E], as ``states``."""
        return self._with_copied(known[:, :1, : level.frontier.inherited.shape[-1]], level, caches)

    def states(self, level: Level, known: Tensor, caches: DraftCaches) -> Tensor:
        """The frontier's states [B, w, E] in a block of which ``block`` has told what is ``known``."""
        block, frontier, depth = self.moa.block, level.frontier, level.place.depth
        assert block is not None
        width = frontier.tokens.shape[1]
        size = frontier.inherited.shape[-1]
        here, positions = known.index_select(1, depth).expand(-1, width, -1).split((size, 2 * block.intermediate_size), dim=-1)
        tokens = self._contributed(level, known[:, block.size :, size:])
        joined = self._with_copied(here, level, caches)
        # A root may be any token, and has no parent.
        return torch.where(depth == 0, joined, block.step(frontier.inherited, tokens + positions, joined))

    def _contributed(self, level: Level, by_rare: Tensor) -> Tensor:
        """What the frontier's tokens contribute to a step [B, w, 2I], where rare ones contribute ``by_rare`` [B, M, 2I]."""
        block, tokens, rare = self.moa.block, level.frontier.tokens, level.text.rare
        assert block is not None
        if self.known_tokens is None or self.known_index is None:
            return block.of_tokens(self._embed(tokens))
        known = self.known_tokens[self.known_index[tokens]]
        if rare is None:
            return known
        are = tokens.unsqueeze(-1) == rare.unsqueeze(1)
        place = are.int().argmax(dim=-1, keepdim=True)
        return torch.where(are.any(dim=-1, keepdim=True), by_rare.gather(1, place.expand(-1, -1, by_rare.shape[-1])), known)

    def _with_copied(self, features: Tensor, level: Level, caches: DraftCaches) -> Tensor:
        """A block's features [B, w, E] at the frontier's nodes, and what these find in memory where levels copy."""
        assert self.moa.block is not None
        copying = self.moa.block.copying
        if copying is None:
            return features
        frontier, text, ca = level.frontier, level.text, caches[1]
        positions = (text.lengths.unsqueeze(1) + level.place.depth).expand_as(frontier.tokens).flatten()
        embeddings, previous = (self._embed(tokens.flatten()) for tokens in (frontier.tokens, frontier_previous(level)))
        asked = copying.queries(embeddings, previous, self.moa.rotary(positions))
        found: Tensor = copying.output(self._cross_attend(asked, text, ca, num_kv_heads=1))
        return features + found.view(*frontier.tokens.shape, -1)

    def _attend(
        self, inputs: Tensor, before: Tensor | None, seen: Tensor, depths: Tensor, row: Tensor, text: Text, caches: DraftCaches
    ) -> Tensor:
        """SA and CA on drafted positions [B·w, E], ``depths`` [1] or [w] behind the text, from SA's scratch row ``row`` [1] on.

        ``before`` [B·w, E], where memory is paired, is what stands before each; ``seen`` [B, w, scratch] is an additive mask of the
        scratch rows.
        """
        moa, (sa, ca, *memories), (batch, width, _) = self.moa, caches, seen.shape
        positions = (text.lengths.unsqueeze(1) + depths).expand(-1, width).flatten()
        rope = moa.rotary(positions)
        write = torch.arange(batch, device=positions.device).unsqueeze(1) * sa.rows_per_slot
        write = write + row + torch.arange(width, device=positions.device)
        starts, lengths = (each.view(-1, 1, 1, 1) for each in (text.starts, text.lengths))
        known = additive((text.columns >= starts) & (text.columns < lengths), self.dtype)
        mask = torch.cat((seen.unsqueeze(1), known.expand(-1, -1, width, -1)), dim=-1)
        mask = mask.repeat_interleave(moa.sa.num_heads // moa.sa.num_kv_heads, dim=2)
        plan = AttentionPlan(0, batch, width, positions, write.flatten(), mask)
        newest = self._newest(text, memories[0]).repeat_interleave(width, dim=0) if memories else None
        hidden = moa.attend_to_tokens(inputs, before, newest, rope, cached_attention(sa, 0, plan, moa.sa.num_heads))
        return moa.leave(hidden, self._cross_attend(moa.cross_queries(hidden, rope), text, ca, num_kv_heads=ca.num_kv_heads))

    def _newest(self, text: Text, memories: KVCache | KVWindow) -> Tensor:
        """The newest memory of the texts [B, E], zero where there is none."""
        newest = memories.gather(self._newest_rows(text, memories))[:, 0]
        return newest.masked_fill((text.memory_ends <= text.starts).unsqueeze(1), 0.0)

    def _newest_rows(self, text: Text, memories: KVCache | KVWindow) -> Tensor:
        """Where the newest memory of the texts stands [B]; anywhere for those without."""
        starts = torch.arange(text.lengths.shape[0], device=text.lengths.device) * memories.rows_per_slot
        return starts + (text.memory_ends if self.moa.config.paired else (text.memory_ends - 1).clamp(min=0))

    def _cross_attend(self, queries: Tensor, text: Text, ca: KVCache | KVWindow, *, num_kv_heads: int) -> Tensor:
        """Queries [B·w, h, d] over the memory of the text in CA's first ``num_kv_heads`` -> [B·w, h·d]."""
        batch = text.lengths.shape[0]
        starts, memory_ends = (each.view(-1, 1, 1, 1) for each in (text.starts, text.memory_ends))
        if self.moa.config.attends_to_all_memory:
            remembered = additive((text.columns >= starts) & (text.columns < memory_ends), self.dtype)
        else:
            remembered = additive(text.columns == memory_ends - 1, self.dtype)
        keys, values = (each[:, :num_kv_heads] for each in ca.read(0, 0, batch, text.columns.shape[0]))
        grouped = queries.reshape(batch, -1, num_kv_heads, ca.head_dim).transpose(1, 2)
        # A sequence without memory must not see only −inf; what it sees instead is then dropped.
        empty = (text.memory_ends <= text.starts).view(-1, 1, 1, 1)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=remembered.masked_fill(empty, 0.0))
        return out.masked_fill(empty, 0.0).transpose(1, 2).reshape(queries.shape[0], -1)

    def expand(self, level: Level, entering: Tensor, breadth: int) -> tuple[Candidates, Frontier, Tensor]:
        """What enters the head [B, w, E] -> as ``grow``: the frontier's ``breadth`` likeliest candidates join the tree."""
        logits, moa = self.head(entering, level.text), self.moa
        inherited = level.frontier.inherited if moa.block is None else entering
        return expand(level, logits, moa.draft_vocabulary, breadth, inherited, masked=moa.block is None)

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.target.embed(token_ids).to(self.dtype)


class MoANetwork(DraftNetwork):
    """As it stands beside its target, from which it makes memory."""

    moa: MoA

    def remember(
        self,
        token_ids: Tensor,
        previous: Tensor,
        positions: Tensor,
        kv: Tensor,
        hidden: Tensor | None,
        caches: DraftCaches,
        rows: tuple[Tensor, ...],
    ) -> None:
        """Write what drafting needs of n verified tokens: CA's keys and values of their memory, SA's of their embeddings.

        ``previous`` [n] are the tokens before them, ``kv`` [n, L, E_kv] the target's keys and values, ``hidden`` [n, E] its final
        hidden states, which an entry reads; ``rows`` [n] are the places in each of the ``caches``.
        """
        moa = self.moa
        rope = moa.rotary(positions)
        embeddings = self._embed(token_ids)
        memory = moa.memory(kv.to(moa.to_memory.weight.dtype), hidden).to(self.dtype)
        if moa.config.paired:
            memory = moa.with_own(memory, embeddings, self._embed(previous))
        (sa, ca, *memories), (in_sa, in_ca, *in_memories) = caches, rows
        sa.write(0, in_sa, moa.self_keys_values(embeddings, rope))
        for cache, places in zip(memories, in_memories, strict=True):
            cache.write(0, places, memory)
        if moa.config.paired:
            self._pair(embeddings, positions, caches, rows)
        else:
            ca.write(0, in_ca, moa.cross_keys_values(memory, rope))

    def pair(self, token_ids: Tensor, positions: Tensor, caches: DraftCaches, rows: tuple[Tensor, ...]) -> None:
        """Let the memory of the tokens before these [n] be what is drafted from: the newest, where memory is paired.

        It is kept in these tokens' rows, as theirs is not known yet.
        """
        caches[2].write(0, rows[2], self._pair(self._embed(token_ids), positions, caches, rows))

    def _pair(self, embeddings: Tensor, positions: Tensor, caches: DraftCaches, rows: tuple[Tensor, ...]) -> Tensor:
        """CA's keys and values of the tokens before these, which are known by now to follow; the paired memory [n, E].

        Before a text's first token stands its slot's last row, which is never read: no text comes that far.
        """
        _, ca, memories = caches
        before, remembered = (_before(cache, positions, places) for cache, places in zip(caches[1:], rows[1:], strict=True))
        paired = self.moa.with_following(memories.gather(remembered)[:, 0], embeddings)
        ca.write(0, before, self.moa.cross_keys_values(paired, self.moa.rotary((positions - 1).clamp(min=0))))
        return paired


def _before(cache: KVCache | KVWindow, positions: Tensor, rows: Tensor) -> Tensor:
    """The rows [n] before those of tokens at ``positions`` [n], in a cache without scratch rows; a slot's last before its first."""
    return torch.where(positions == 0, rows + cache.rows_per_slot - 1, rows - 1)
