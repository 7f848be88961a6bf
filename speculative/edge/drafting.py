"""What an edge computes: a bundle's drafter at work for texts whose target is elsewhere. Blocking; one thread runs it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from models.edge_bundle import EdgeBundle, networks_of, read_bundle, read_config
from models.errors import CheckpointError
from models.kv_cache import KVCache
from speculative.config import MemoryFormat, ModelInfo
from speculative.drafters.base import Drafter
from speculative.edge.compiling import compile_drafter, new_drafter, suits_whole
from speculative.edge.config import EdgeConfig
from speculative.edge.text import EdgeText, TextDrafter
from speculative.errors import EngineLoadError
from speculative.loading import default_sampling, with_text
from speculative.packages import compiles, or_uncompiled
from speculative.placement import torch_dtype
from speculative.policy import DraftShape
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import Request
from speculative.sequence import Sequence
from speculative.texts import Texts
from speculative.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from transformers import PreTrainedTokenizerBase


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
        self.texts = Texts(bundle.tokenizer, self.info.vocab_size, self.eos_token_ids)
        first = new_drafter(bundle, largest)
        if folder is not None:
            compile_drafter(first, folder, largest)
        first.pack()
        self._first = first
        self._free: list[TextDrafter] = [first]
        self._drafters = DrafterOfEach()
        self._drafter: Drafter = with_text(self._drafters, lookup)

    @classmethod
    def load(cls, config: EdgeConfig) -> EdgeModel:
        """Raises EngineLoadError with what is wrong with the bundle."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        return or_uncompiled(lambda choice: cls._load(replace(config, compile=choice)), config.compile)

    @classmethod
    def _load(cls, config: EdgeConfig) -> EdgeModel:
        try:
            with torch.inference_mode():
                described, cpu = read_config(config.bundle), torch.device("cpu")
                as_read = "int8 weights are widened as they are read" if described.quantization == "int8" else None
                networks = networks_of(described, config.bundle, dtype=torch.float32)
                networks.to(torch_dtype(config.dtype, cpu, compiled=True))
                whole = as_read is None and suits_whole(networks, described.draft_vocabulary_size, config.largest_shape)
                compiled = compiles(config.compile, networks.drafter, cpu, as_read, by_operators=whole)
                dtype = torch_dtype(config.dtype, cpu, compiled=compiled)
                bundle = read_bundle(config.bundle, dtype=dtype)
                return cls(bundle, config.largest_shape, config.draft_lookup, config.bundle if compiled else None)
        except (CheckpointError, OSError) as error:
            raise EngineLoadError(str(error)) from error

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's."""
        return self.bundle.tokenizer

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
        sequence = self.texts.begin(request, max_model_len)
        sequence.slot = 0  # of caches of its own
        return sequence

    @torch.inference_mode()
    def end(self, text: EdgeText) -> None:
        """Its drafter is another text's from now on."""
        self._drafter.forget(text.sequence)
        self._free.append(self._drafters.of.pop(text.sequence.request.request_id))

    def _another(self) -> TextDrafter:
        another = new_drafter(self.bundle, self.largest, self._first.network)
        another.compiled, another.trees = self._first.compiled, self._first.trees
        return another


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
