"""A text on an edge: what is known of it, and what is drafted or written behind that. Blocking; one thread runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from models.kv_cache import KVCache
from speculative.drafters.base import Drafter
from speculative.drafters.moa_edge import EdgeDrafter, ReceivedMemory
from speculative.edge.session import Gain, Rows
from speculative.errors import ServerUnreachableError
from speculative.loading import MOA_WINDOW
from speculative.logprobs import token_logprobs
from speculative.policy import DraftShape
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import OfferedTree, RequestOutput, Written
from speculative.sequence import Sequence
from speculative.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Many

_UNLIKELY = -1e4
"""The logit of a token that is never drafted."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tree and what it took: the levels it has, and the seconds in which it was drafted."""

    tree: OfferedTree
    depth: int
    seconds: float


class TextDrafter(Protocol):
    """What drafts for one text on an edge, and keeps what it needs of that text alone.

    ``caches`` are its own; drafters of one model may share a network. An `EdgeDrafter` can write alone besides.
    """

    caches: Many[KVCache]

    def extend(self, received: ReceivedMemory) -> None:
        """Take what the server tells of verified tokens; raises ValueError where something is missing."""

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """As in Drafter, of one sequence."""

    def forget(self, sequence: Sequence) -> None:
        """Its text has ended; the next one's is another."""


class EdgeText:
    """One text on an edge: its tokens, whose choice is the server's, and what is drafted after them."""

    def __init__(
        self, sequence: Sequence, drafter: Drafter, own: TextDrafter, eos_token_ids: frozenset[int], fresh: Callable[[], Sequence]
    ) -> None:
        self.sequence, self._drafter, self._own, self._eos_token_ids, self._fresh = sequence, drafter, own, eos_token_ids, fresh

    @property
    def room(self) -> int:
        """Nodes of a chain behind the last token, of which the target's own follows the last."""
        return max(0, self.sequence.max_length - len(self.sequence.tokens) - 1)

    def take(self, gain: Gain) -> None:
        """Go on as the server says."""
        sequence, now = self.sequence, time.monotonic()
        if gain.tokens:
            sequence.first_token_time = sequence.first_token_time or now
            sequence.last_token_time = now
        if gain.drafted:
            sequence.count_verification(gain.drafted, gain.num_accepted)
        for token in gain.tokens:
            sequence.sampler.take(token)
            sequence.detokenizer.add(token)
        sequence.tokens += gain.tokens
        if sequence.prediction is not None:
            sequence.prediction.follow(gain.tokens)

    def rewind(self, tokens: list[int], memory_end: int) -> None:
        """Let the text be ``tokens``, prompt and output, of which there is memory up to ``memory_end``."""
        sequence, fresh = self.sequence, self._fresh()
        output = tokens[sequence.num_prompt_tokens :]
        for token in output:
            fresh.sampler.take(token)
            fresh.detokenizer.add(token)
        if fresh.prediction is not None:
            fresh.prediction.follow(output)
        sequence.sampler, sequence.detokenizer, sequence.prediction = fresh.sampler, fresh.detokenizer, fresh.prediction
        sequence.tokens, sequence.num_computed = list(tokens), memory_end
        sequence.finish_reason = None
        if not memory_end:
            sequence.drafter_start = 0

    @torch.inference_mode()
    def write_alone(self) -> RequestOutput:
        """Go on by one token, as if the drafter were the model, or end where there is no room for one.

        Log-probabilities are its own, and so is its idea of which tokens there are. Raises ServerUnreachableError where the drafter
        can only draft.
        """
        sequence, own = self.sequence, self._own
        if not isinstance(own, EdgeDrafter):
            raise ServerUnreachableError("cut off from the server, and this drafter cannot write alone")
        if len(sequence.tokens) >= sequence.max_length:  # none are wanted
            return sequence.finish("length")
        last = len(sequence.tokens) - 1
        if not sequence.num_computed:  # nothing has been heard of it: its end will do, as for drafts
            sequence.drafter_start = sequence.num_computed = max(0, sequence.num_prompt_tokens - MOA_WINDOW)
        if sequence.num_computed < last:
            own.foresee(0, sequence.num_computed, sequence.tokens[sequence.num_computed : last])
            sequence.num_computed = last
        # Where a grammar leaves only what is never drafted, that has to come all the same.
        logits = own.logits(sequence).clamp(min=_UNLIKELY)
        token = sequence.sampler.choose(lambda: logits, int(logits.argmax()))
        count = sequence.request.params.logprobs
        logprobs = None if count is None else token_logprobs(logits.unsqueeze(0), [token], count)
        return replace(sequence.append((token,), 0, logprobs, self._eos_token_ids), num_accepted=1, written=Written())

    @torch.inference_mode()
    def remember(self, received: Many[Rows], codec: MemoryCodec) -> None:
        """Take the memory of tokens that are known; raises InvalidMemoryError."""
        sequence = self.sequence
        for each in received:
            rows = codec.rows.decode(each.rows)
            newest = None
            if codec.newest is not None:  # only the last chunk of several comes with it; until then nobody drafts
                newest = codec.newest.decode(each.newest) if each.newest else torch.zeros(1, codec.newest.numbers)
            end = each.first + len(rows)
            slots, positions = torch.zeros(len(rows), dtype=torch.long), torch.arange(each.first, end)
            token_ids = torch.tensor(sequence.tokens[each.first : end])
            self._own.extend(ReceivedMemory(slots, positions, token_ids, rows, slots[:1], newest))
            if each.first > sequence.num_computed:
                sequence.drafter_start = each.first
            sequence.num_computed = end

    @torch.inference_mode()
    def draft(self, shape: DraftShape, chain_nodes: int) -> Drafted:
        """A tree behind the text's last token, as far as there is room; without nodes where none is wanted."""
        sequence, began = self.sequence, time.perf_counter()
        room = self.room
        if room < 1 or not sequence.drafts_here:
            return Drafted(OfferedTree(len(sequence.tokens)), 0, 0.0)
        tree = self._drafter.propose([sequence], replace(shape, depth=min(shape.depth, room)), None)
        offered, depth = _offered(tree, len(sequence.tokens), room, chain_nodes)
        return Drafted(offered, depth, time.perf_counter() - began)


def _offered(tree: DraftTree, length: int, room: int, chain_nodes: int) -> tuple[OfferedTree, int]:
    """The one tree of a batch, as it is offered for a text of ``length``, and its depth: at most ``room``."""
    size = tree.sizes[0]
    tokens, parents = tree.tokens[0, :size].tolist(), tree.parents[0, :size].tolist()
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    if parents == list(range(size)):
        room = min(room, chain_nodes)
    if max(depths) > room:  # chains of what a text or a grammar foretells know no room
        kept = [row for row in range(1, size + 1) if depths[row] <= room]
        place = {0: 0} | {row: number for number, row in enumerate(kept, 1)}
        tokens, parents = [tokens[row - 1] for row in kept], [place[parents[row - 1]] for row in kept]
    return OfferedTree(length, tuple(tokens), tuple(parents)), min(max(depths), room)
