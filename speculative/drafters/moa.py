"""A Mixture-of-Attentions drafter beside its target, whose keys and values it turns into memory."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import chain

import torch
from torch import Tensor

from models.kv_cache import KVCache
from models.llama import Llama
from models.loader import optimize_for_inference
from models.moa import MoA
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.growth import Level
from speculative.drafters.moa_network import MoANetwork
from speculative.drafters.moa_trees import MoATreeDrafter
from speculative.drafters.tiled_memory import TiledMemory
from speculative.drafters.tree_drafter import frontier_plan
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree


class MoADrafter(MoATreeDrafter):
    """Drafts with a target in the same process.

    ``moa`` is made ready for serving and is of no use for training afterwards. Of prompts SA and CA read the last ``window`` tokens
    (None: all), of which those who draft elsewhere are sent the last ``sent_window`` (None: as many). ``tiled``, where there is
    one, stands in for what the network does to make memory. ``trees_pair`` where ``trees`` begin with ``pair_newest``.
    """

    network: MoANetwork

    def __init__(
        self,
        moa: MoA,
        target: Llama,
        num_slots: int,
        length: int,
        shape: DraftShape,
        window: int | None = None,
        sent_window: int | None = None,
    ) -> None:
        self.target, self.sent_window = target, window if sent_window is None else sent_window
        moa.read_cache_layout()
        if target.device.type == "cpu" and target.dtype == torch.bfloat16:
            # LSA has a row per layer of every token: enough for bfloat16 products, and the target's cache is read as it is.
            if moa.lsa is not None:
                moa.lsa.to(torch.bfloat16)
            moa.to_memory.to(torch.bfloat16)
            if moa.entry is not None:
                moa.entry.from_hidden.to(torch.bfloat16)
        network = MoANetwork(moa, target)
        self.config = config = moa.config
        self.borrowed = config.target_layer_inference
        memories: KVCache | None = None
        if moa.entry is not None:
            self.taps = (config.target.num_layers,)
            size = config.target.hidden_size // 2
            memories = KVCache(1, num_slots, 0, length, 1, size, dtype=network.dtype, device=target.device)
        moa.layer_rotary.reserve(config.target.num_layers, moa.to_memory.weight)
        self.tiled: TiledMemory | None = None
        self.trees_pair = False
        super().__init__(network, num_slots, length, shape, window, memories)

    def pack(self) -> None:
        """Prepare the network's weights for inference without compiled graphs; the target's own are packed with it."""
        optimize_for_inference(self.network.moa)
        self.network.head.pack()

    def target_scratch_rows(self, shape: DraftShape) -> int:
        """Borrowed layers keep the keys and values of drafted nodes in the target's scratch rows."""
        return 1 + shape.depth * shape.breadth if self.borrowed else 0

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """LSA on newly verified tokens, CA's keys and values of their memory, SA's of their embeddings."""
        if self.tiled is not None:
            self._remember(self.tiled, verified, target_cache)
            return
        hidden = verified.tapped
        token_ids, previous, slots, positions = verified.rows
        if remember := self.compiled.get("remember"):
            windows = (layer for kv in (target_cache, *self.caches) for layer in kv.window(0, kv.num_slots))
            remember([token_ids, previous, slots, positions, *(() if hidden is None else (hidden,)), *windows])
            return
        self.note(token_ids, previous, slots, positions, hidden, target_cache)

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """As in TreeDrafter."""
        if not self.trees_pair:
            self.pair_newest(sequences)
        return super().propose(sequences, shape, target_cache)

    def pair_newest(self, sequences: Many[Sequence]) -> None:
        """Let the newest memory of texts know the token that follows it, where memory is paired."""
        if not self.config.paired:
            return
        newest = [each.tokens[each.num_computed] for each in sequences]
        slots, positions = [each.slot for each in sequences], [each.num_computed for each in sequences]
        tokens = torch.tensor([newest, [0] * len(newest), slots, positions], device=self.device)
        if self.tiled is not None:
            self.tiled.pair(tokens, self._all_slots(), self.scratches(0))
            return
        rows = tuple(each.flat_rows(tokens[2], tokens[3]) for each in self.caches)
        self.network.pair(tokens[0], tokens[3], self.caches, rows)

    def _remember(self, tiled: TiledMemory, verified: VerifiedTokens, target_cache: KVCache) -> None:
        windows = target_cache.window(0, target_cache.num_slots), self._all_slots(), self.scratches(target_cache.scratch)
        if verified.columns is not None:
            tokens = list(chain.from_iterable(verified.columns))
            tiled.remember_rows(tokens, verified.tapped_of_all, verified.places or [], *windows)
        else:
            hidden = verified.tapped
            tiled.remember(verified.rows.contiguous(), [] if hidden is None else [hidden.contiguous()], *windows)

    def _all_slots(self) -> list[Tensor]:
        return [each.window(0, each.num_slots)[0] for each in self.caches]

    def scratches(self, targets: int) -> list[int]:
        """How many rows of each slot are scratch rows: ``targets`` of the target's cache, and of each of the drafter's."""
        return [targets, *(each.scratch for each in self.caches)]

    def note(
        self,
        token_ids: Tensor,
        previous: Tensor,
        slots: Tensor,
        positions: Tensor,
        hidden: Tensor | None,
        target_cache: KVCache,
    ) -> None:
        """As ``extend``, by the network itself: all [n], the target's final hidden states [n, E] for an entry."""
        kv = target_cache.gather(target_cache.flat_rows(slots, positions))
        rows = tuple(each.flat_rows(slots, positions) for each in self.caches)
        self.network.remember(token_ids, previous, positions, kv, hidden, self.caches, rows)

    def memory(self, slot: int, first: int, end: int) -> tuple[Tensor, Tensor | None]:
        """CA's keys and values [n, 2·n_kv·d] of positions ``first`` … ``end``, and with an entry the newest memory [1, E].

        Where memory is paired, after ``pair_newest``.
        """
        ca, *memories = self.caches[1:]
        rows = ca.data[0, ca.flat_row(slot, first) : ca.flat_row(slot, end)]
        newest = memories[0].flat_row(slot, end if self.config.paired else end - 1) if memories else None
        return rows, None if newest is None else memories[0].data[0, newest : newest + 1]

    def through_borrowed(self, level: Level, feature: Tensor, target_cache: KVCache | None) -> Tensor:
        """As in MoATreeDrafter; the target's last N layers on the frontier."""
        if not self.borrowed:
            return feature
        assert target_cache is not None
        target = self.target
        return target.run_layers(
            feature.to(target.dtype),
            frontier_plan(target_cache, target.config.groups, level, level.frontier.inherited),
            target_cache,
            first_layer=target.config.num_layers - self.borrowed,
        )
