"""A Mixture-of-Attentions drafter on an edge: its target, and what makes memory of it, are on a server."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from models.edge import EdgeMoA, EdgeTarget
from models.kv_cache import KVCache, KVWindow
from models.loader import optimize_for_inference
from speculative.drafters.growth import Candidates, Level, Text
from speculative.drafters.moa_network import DraftNetwork
from speculative.drafters.moa_trees import MoATreeDrafter
from speculative.drafters.tree_drafter import number, place
from speculative.policy import DraftShape
from speculative.sequence import Sequence

_EVERYWHERE = 2**62


@dataclass(frozen=True, slots=True)
class ReceivedMemory:
    """What a server tells of n tokens that its target has verified, sequences mixed; each sequence's in order.

    ``slots``, ``positions`` and ``token_ids`` are [n], ``crossing`` [n, 2·n_kv·d] CA's rotated keys and its values of the tokens'
    memory. For a drafter with an entry ``newest`` [m, E] is the memory of the last token of each of the slots ``newest_slots`` [m].
    """

    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    crossing: Tensor
    newest_slots: Tensor | None = None
    newest: Tensor | None = None


class EdgeDrafter(MoATreeDrafter):
    """Drafts what ``MoADrafter`` drafts beside the target, from the memory that comes from there.

    ``propose`` needs no cache of the target's; window and shape are to be the server's. Weights are those of a bundle
    (``models.edge_bundle``); drafters that are given one ``network`` share them. Where a text is longer than the memory that has
    come (``foresee``), what follows is drafted from that memory and the text's own tokens.
    """

    network: EdgeNetwork

    def __init__(
        self,
        moa: EdgeMoA,
        target: EdgeTarget,
        num_slots: int,
        length: int,
        shape: DraftShape,
        window: int | None = None,
        network: EdgeNetwork | None = None,
    ) -> None:
        network = network or EdgeNetwork(moa, target)
        size = moa.config.target.hidden_size
        memories = None
        if moa.entry is not None:
            memories = NewestMemory(num_slots, size, dtype=network.dtype, device=target.device)
        super().__init__(network, num_slots, length, shape, window, memories)
        # Up to where memory has come in slots where something was foreseen; elsewhere it is never short.
        self._memory_ends = [_EVERYWHERE] * num_slots

    def pack(self) -> None:
        """Prepare the weights for inference, the LM head's included."""
        optimize_for_inference(self.network.moa)
        self.network.head.frequent.pack()

    def extend(self, received: ReceivedMemory) -> None:
        """Keep what the server tells, and SA's keys and values of the same tokens; raises ValueError where something is missing."""
        network, (sa, ca, *memories) = self.network, self.caches
        slots, positions = received.slots, received.positions
        if memories:
            if received.newest is None or received.newest_slots is None:
                raise ValueError("this drafter has an entry: it must be told the newest memory too")
            memories[0].write(0, received.newest_slots, received.newest.to(network.dtype))
        sa.write(0, sa.flat_rows(slots, positions), network.of_tokens(received.token_ids, positions))
        ca.write(0, ca.flat_rows(slots, positions), received.crossing.to(network.dtype))
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            self._memory_ends[slot] = max(self._memory_ends[slot], position + 1)

    def foresee(self, slot: int, first: int, token_ids: Many[int]) -> None:
        """Keep SA's keys and values of tokens from position ``first`` on, of which memory has not come yet, or never will.

        A slot in which something was foreseen is not moved to another.
        """
        sa = self.caches[0]
        self._memory_ends[slot] = min(self._memory_ends[slot], first)
        tokens = torch.tensor(token_ids, dtype=torch.long, device=self.device)
        positions = torch.arange(first, first + len(tokens), device=self.device)
        sa.write(0, sa.flat_rows(torch.full_like(positions, slot), positions), self.network.of_tokens(tokens, positions))

    def forget(self, sequence: Sequence) -> None:
        """What was foreseen in its slot is nobody's any more."""
        super().forget(sequence)
        self._memory_ends[sequence.slot] = _EVERYWHERE

    def memory_ends(self, lengths: list[int]) -> list[int]:
        """As far as memory has come."""
        return [min(length, end) for length, end in zip(lengths, self._memory_ends, strict=False)]

    def logits(self, sequence: Sequence) -> Tensor:
        """What would come next in slot 0's text if the drafter were the model: logits [V], −inf for what is not drafted."""
        network, text = self.network, self.text([sequence])
        frontier = self.roots([sequence], text)
        root = Candidates(frontier.scores, frontier.tokens, frontier.numbers)
        level = Level(frontier, root, text, place(0, 0, self.device), number(1.0, self.device), None)
        if network.moa.block is None:
            entering = network.feature(level, self.caches).unsqueeze(1)
        else:
            entering = network.opening(level, network.block(frontier.tokens, text, self.caches), self.caches)
        logits: Tensor = network.head(entering, text)[0, 0]
        ids = network.moa.draft_vocabulary
        if ids is None:
            return logits
        if text.rare is not None:
            ids = torch.cat((ids, text.rare[0]))
        vocabulary = logits.new_full((network.target.config.vocab_size,), float("-inf"))
        return vocabulary.index_copy_(0, ids[ids >= 0], logits[ids >= 0])


class NewestMemory(KVCache):
    """Memory of each slot's newest token, one row [E] a slot: of older ones an edge needs CA's keys and values alone."""

    def __init__(self, num_slots: int, size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__(1, num_slots, 0, 1, 1, size // 2, dtype=dtype, device=device)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """As in KVCache, however long the text is."""
        super().move_slot(source, destination, 1)


class EdgeNetwork(DraftNetwork):
    """As it stands on an edge."""

    def _newest_rows(self, text: Text, memories: KVCache | KVWindow) -> Tensor:
        """As in DraftNetwork, of ``NewestMemory``."""
        return torch.arange(text.lengths.shape[0], device=text.lengths.device)
