"""Drafters other than Mixture-of-Attentions ones on an edge, to compare with. They are loaded whole, beside the target's weights.

What travels for them: for EAGLE the features of all verified tokens, for a model of its own nothing but tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from models.eagle import ARCHITECTURE as EAGLE
from models.eagle import Eagle
from models.errors import CheckpointError
from models.kv_cache import KVCache
from models.llama import Llama
from models.loader import eos_token_ids, load_eagle, load_target, read_json, resolve_target
from speculative.common_prefix import common_prefix
from speculative.config import MemoryFormat, ModelInfo
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.eagle import EagleDrafter
from speculative.drafters.independent import IndependentDrafter
from speculative.drafters.moa_edge import ReceivedMemory
from speculative.drafters.tree_drafter import TreeDrafter
from speculative.edge.config import EdgeConfig
from speculative.edge.drafting import DrafterOfEach, EdgeModel
from speculative.errors import EngineLoadError
from speculative.fingerprints import pair_fingerprint
from speculative.loading import default_sampling, with_text
from speculative.policy import DraftShape
from speculative.remote.memory_codec import MemoryCodec, RowCodec
from speculative.sequence import Sequence
from speculative.texts import Texts
from speculative.tree import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_other(model: str, config: EdgeConfig) -> EdgeModel:
    """The drafter in the folder ``config.bundle`` for the target ``model``; raises EngineLoadError."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        with torch.inference_mode():
            return OtherEdgeModel(model, config.bundle, dtype, config.largest_shape, config.draft_lookup)
    except (CheckpointError, OSError) as error:
        raise EngineLoadError(str(error)) from error


class OtherEdgeModel(EdgeModel):
    """As `EdgeModel`, of whole folders instead of a bundle."""

    def __init__(self, model: str, drafter: Path, dtype: torch.dtype, largest: DraftShape, lookup: int) -> None:
        folder = resolve_target(model)
        self._target, self._tokenizer = load_target(folder, dtype=dtype)
        length = self._target.config.max_position_embeddings
        self.largest, self.eos_token_ids = largest, eos_token_ids(folder)
        is_eagle = EAGLE in (read_json(drafter, "config.json").get("architectures") or [])
        self._whole = load_eagle(drafter, self._target.config, dtype=dtype) if is_eagle else _model(self._target, drafter, dtype)
        self.info = ModelInfo(
            name=folder.name,
            max_model_len=length,
            vocab_size=self._target.config.vocab_size,
            dtype=str(dtype).removeprefix("torch."),
            device="cpu",
            drafter="eagle" if is_eagle else "independent",
            default_sampling=default_sampling(read_json(folder, "generation_config.json")),
            created=int(time.time()),
            # A server for a model of its own runs without a drafter.
            pair=pair_fingerprint(self._target, self._whole if is_eagle else None),
        )
        self.texts = Texts(self._tokenizer, self.info.vocab_size, self.eos_token_ids)
        first = self._another()
        first.pack()
        self._free = [first]
        self._drafters = DrafterOfEach()
        self._drafter = with_text(self._drafters, lookup)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's."""
        return self._tokenizer

    def codec(self, format: MemoryFormat) -> MemoryCodec:
        """Features, or nothing."""
        return MemoryCodec.of_hidden(self._target.config, format) if isinstance(self._whole, Eagle) else _Nothing()

    def _another(self) -> _OnEdge:
        network, length = self._whole, self.info.max_model_len
        if isinstance(network, Eagle):
            return EagleOnEdge(EagleDrafter(network, self._target, 1, length, self.largest))
        return ModelOnEdge(IndependentDrafter(network, 1, length, self.largest))


class _Nothing(MemoryCodec):
    """Of no bytes: there is no row of nothing to be written."""

    def __init__(self) -> None:
        object.__setattr__(self, "rows", RowCodec("int8", 1, 1))
        object.__setattr__(self, "newest", None)

    @property
    def bytes_per_token(self) -> int:
        return 0


class _OnEdge:
    """One text's drafter."""

    def __init__(self, drafter: TreeDrafter) -> None:
        self.inner = drafter
        self.caches: Many[KVCache] = drafter.caches

    def pack(self) -> None:
        """Prepare the weights for inference, once for all texts."""
        self.inner.pack()

    def extend(self, received: ReceivedMemory) -> None:
        """Take what the server tells: here nothing."""

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """As in Drafter."""
        return self.inner.propose(sequences, shape, target_cache)

    def forget(self, sequence: Sequence) -> None:
        """As in Drafter."""
        self.inner.forget(sequence)


class EagleOnEdge(_OnEdge):
    """Learns the features of verified tokens from the server."""

    inner: EagleDrafter

    def __init__(self, drafter: EagleDrafter) -> None:
        super().__init__(drafter)
        self._end = 0

    def forget(self, sequence: Sequence) -> None:
        """The next text's features begin anew."""
        super().forget(sequence)
        self._end = 0

    def pack(self) -> None:
        """The head too, which here is nobody else's."""
        super().pack()
        if self.inner.eagle.draft_vocabulary is None:
            self.inner.head.frequent.pack()

    def extend(self, received: ReceivedMemory) -> None:
        """Keep them, and the layer's keys and values; nothing is known before the first of a window."""
        first = int(received.positions[0])
        begin, self._end = first if first > self._end else 0, int(received.positions[-1]) + 1
        unread = torch.zeros_like(received.token_ids)  # EAGLE's layer does not ask what came before a token
        verified = VerifiedTokens(torch.stack((received.token_ids, unread, received.slots, received.positions)), begin=begin)
        self.inner.remember(verified, received.crossing.to(self.inner.dtype))


class ModelOnEdge(_OnEdge):
    """Reads verified tokens by itself."""

    inner: IndependentDrafter

    def __init__(self, drafter: IndependentDrafter) -> None:
        super().__init__(drafter)
        self._read: list[int] = []

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """Reads what is new of the text first."""
        (sequence,) = sequences
        text = sequence.tokens[:-1]
        first = common_prefix(self._read, text)
        if first < len(text):
            positions = range(first, len(text))
            previous = [sequence.token_before(position) for position in positions]
            rows = torch.tensor((text[first:], previous, [0] * len(positions), positions))
            own_cache = self.inner.cache  # the target's is elsewhere, and this drafter does not read it
            self.inner.extend(VerifiedTokens(rows), own_cache)
        self._read = text
        sequence.num_computed = len(text)
        return super().propose(sequences, shape, target_cache)


def _model(target: Llama, folder: Path, dtype: torch.dtype) -> Llama:
    model, _ = load_target(folder, dtype=dtype)
    if model.config.vocab_size != target.config.vocab_size:
        raise EngineLoadError(f"{folder} has {model.config.vocab_size} tokens and the model {target.config.vocab_size}")
    return model
