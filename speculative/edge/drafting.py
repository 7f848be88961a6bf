"""What an edge computes: a bundle's drafter at work for texts whose target is elsewhere. Blocking; one thread runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from models.edge_bundle import EdgeBundle, read_bundle
from models.errors import CheckpointError
from models.kv_cache import KVCache
from speculative.config import MemoryFormat, ModelInfo
from speculative.detokenizer import Detokenizer
from speculative.drafters.base import Drafter
from speculative.drafters.moa_edge import EdgeDrafter, EdgeNetwork, ReceivedMemory
from speculative.edge.compiling import compiled_graphs, new_drafter
from speculative.edge.config import EdgeConfig
from speculative.edge.session import Gain, Rows
from speculative.errors import EngineLoadError, ServerUnreachableError
from speculative.grammar import Grammars
from speculative.loading import MOA_WINDOW, default_sampling, with_text
from speculative.logprobs import token_logprobs
from speculative.packages import compiles
from speculative.policy import DraftShape
from speculative.prediction import Prediction
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import OfferedTree, Request, RequestOutput, Written
from speculative.sampler import Sampler
from speculative.sequence import Sequence
from speculative.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Many

    from transformers import PreTrainedTokenizerBase

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


class EdgeModel:
    """A bundle, ready to draft: trees within ``largest``, and with ``lookup`` as ``draft_lookup`` of EngineConfig.

    It drafts by compiled graphs where it was read from a ``folder`` to be compiled.
    """

    def __init__(self, bundle: EdgeBundle, largest: DraftShape, lookup: int, folder: Path | None = None) -> None:
        config, block = bundle.config, bundle.drafter.block
        if block is not None:  # it was trained for so many levels
            largest = replace(largest, depth=min(largest.depth, block.size))
        self.bundle, self.largest = bundle, largest
        self.eos_token_ids = frozenset(config.eos_token_ids)
        self.info = ModelInfo(
            name=config.name,
            max_model_len=config.max_model_len,
            vocab_size=bundle.target.config.vocab_size,
            dtype=str(bundle.target.dtype if config.quantization is None else config.quantization).removeprefix("torch."),
            device="cpu",
            drafter="moa",
            default_sampling=default_sampling(bundle.generation),
            created=int(time.time()),
            pair=config.fingerprint,
        )
        tokenizer = bundle.tokenizer
        self._text = tokenizer._tokenizer if tokenizer is not None and hasattr(tokenizer, "_tokenizer") else None
        self.grammars = Grammars(tokenizer, self.info.vocab_size, sorted(self.eos_token_ids)) if tokenizer is not None else None
        first = new_drafter(bundle, largest)
        if folder is not None:
            first.compiled = compiled_graphs(first, folder, largest)
        first.pack()
        assert isinstance(first.network, EdgeNetwork)
        self._network, self._compiled = first.network, first.compiled
        self._free: list[TextDrafter] = [first]
        self._drafters = DrafterOfEach()
        self._drafter: Drafter = with_text(self._drafters, lookup)

    @classmethod
    def load(cls, config: EdgeConfig) -> EdgeModel:
        """Raises EngineLoadError with what is wrong with the bundle."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        try:
            with torch.inference_mode():
                bundle = read_bundle(config.bundle, dtype=torch.float32)
                as_read = "int8 weights are widened as they are read" if bundle.config.quantization == "int8" else None
                compiled = compiles(config.compile, bundle.drafter, bundle.target.device, as_read)
                # Draft levels have a handful of rows, whose products take twice as long in bfloat16; compiled, half as long.
                auto = torch.bfloat16 if compiled and torch.cpu._is_avx512_bf16_supported() else torch.float32
                dtype = auto if config.dtype == "auto" else getattr(torch, config.dtype)
                if dtype != torch.float32:
                    bundle = read_bundle(config.bundle, dtype=dtype)
                return cls(bundle, config.largest_shape, config.draft_lookup, config.bundle if compiled else None)
        except (CheckpointError, OSError) as error:
            raise EngineLoadError(str(error)) from error

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's."""
        return self.bundle.tokenizer

    @property
    def num_drafters(self) -> int:
        """How many there are: one for each text that is written, and those that wait for texts."""
        return len(self._free) + len(self._drafters.of)

    def codec(self, format: MemoryFormat) -> MemoryCodec:
        """How memory travels to this drafter."""
        return MemoryCodec.of(self.bundle.drafter.config, format)

    def begin(self, request: Request, max_model_len: int) -> EdgeText:
        """A text, before its first token; its seed must be known. ``end`` it, as it takes a drafter's caches."""
        sequence = self._sequence(request, max_model_len)
        with torch.inference_mode():
            own = self._free.pop() if self._free else self._another()
        self._drafters.of[request.request_id] = own
        return EdgeText(sequence, self._drafter, own, self.eos_token_ids, lambda: self._sequence(request, max_model_len))

    def _sequence(self, request: Request, max_model_len: int) -> Sequence:
        params, prompt = request.params, request.prompt_token_ids
        assert params.seed is not None
        grammar = self.grammars.follow(params.grammar) if self.grammars is not None and params.grammar is not None else None
        return Sequence(
            request=request,
            sampler=Sampler(params, params.seed, prompt, self.eos_token_ids, grammar),
            max_length=max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens,
            detokenizer=Detokenizer(self._text, params.stop, params.min_tokens),
            tokens=list(prompt),
            prediction=Prediction(request.prediction) if request.prediction else None,
            slot=0,
        )

    @torch.inference_mode()
    def end(self, text: EdgeText) -> None:
        """Its drafter is another text's from now on."""
        self._drafter.forget(text.sequence)
        self._free.append(self._drafters.of.pop(text.sequence.request.request_id))

    def _another(self) -> TextDrafter:
        bundle = self.bundle
        another = EdgeDrafter(bundle.drafter, bundle.target, 1, bundle.config.max_model_len, self.largest, network=self._network)
        another.compiled = self._compiled
        return another


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
        """Go on by one token, as if the drafter were the model.

        Log-probabilities are its own, and so is its idea of which tokens there are. Raises ServerUnreachableError where the drafter
        can only draft.
        """
        sequence, own = self.sequence, self._own
        if not isinstance(own, EdgeDrafter):
            raise ServerUnreachableError("cut off from the server, and this drafter cannot write alone")
        last = len(sequence.tokens) - 1
        if not sequence.num_computed:  # nothing has been heard of it: its end will do, as for drafts
            sequence.drafter_start = sequence.num_computed = max(0, sequence.num_prompt_tokens - MOA_WINDOW)
        if sequence.num_computed < last:
            own.foresee(0, sequence.num_computed, sequence.tokens[sequence.num_computed : last])
            sequence.num_computed = last
        # Where a grammar leaves only what is never drafted, that has to come all the same.
        logits = own.logits(sequence).clamp(min=_UNLIKELY)
        token = sequence.sampler.choose(logits, int(logits.argmax()))
        count = sequence.request.params.logprobs
        logprobs = None if count is None else token_logprobs(logits.unsqueeze(0), [token], count)
        return replace(sequence.append((token,), 0, logprobs, self._eos_token_ids), num_accepted=1, written=Written())

    @torch.inference_mode()
    def remember(self, received: Many[Rows], codec: MemoryCodec) -> None:
        """Take the memory of tokens that are known; raises InvalidMemoryError."""
        sequence = self.sequence
        for each in received:
            rows = codec.rows.decode(each.rows)
            newest = codec.newest.decode(each.newest) if codec.newest is not None and each.newest else None
            end = each.first + len(rows)
            slots, positions = torch.zeros(len(rows), dtype=torch.long), torch.arange(each.first, end)
            token_ids = torch.tensor(sequence.tokens[each.first : end])
            self._own.extend(ReceivedMemory(slots, positions, token_ids, rows, slots[:1], self._newest(newest)))
            if each.first > sequence.num_computed:
                sequence.drafter_start = each.first
            sequence.num_computed = end

    def _newest(self, newest: Tensor | None) -> Tensor | None:
        """Only the last chunk of several comes with it; until then nobody drafts."""
        own = self._own
        if newest is not None or not isinstance(own, EdgeDrafter) or len(own.caches) < 3:
            return newest
        return torch.zeros(1, own.network.moa.config.target.hidden_size)

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


class DrafterOfEach:
    """Each text has a drafter with caches of its own, as texts do not wait for each other; the network is shared."""

    name = "moa"
    taps: tuple[int, ...] = ()
    window: int | None = None
    caches: Many[KVCache] = ()

    def __init__(self) -> None:
        self.of: dict[str, TextDrafter] = {}

    def extend(self, verified: object, target_cache: KVCache) -> None:
        """Nothing to note: memory comes from elsewhere, to each text's own drafter (`EdgeText.remember`)."""

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """As in Drafter, of one sequence."""
        (sequence,) = sequences
        return self.of[sequence.request.request_id].propose(sequences, shape, target_cache)

    def forget(self, sequence: Sequence) -> None:
        """As in Drafter."""
        self.of[sequence.request.request_id].forget(sequence)

    def target_scratch_rows(self, shape: DraftShape) -> int:
        """None."""
        return 0


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
