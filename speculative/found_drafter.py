"""Which drafter an engine gets, found and checked before any weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerBase

from models.architectures import ARCHITECTURES, PUBLISHED_MOA, SUPPORTED, architecture
from models.config import DecoderConfig, MoAConfig, is_moa
from models.eagle import ARCHITECTURE as EAGLE
from models.eagle import EagleConfig
from models.errors import CheckpointError
from models.llama import Llama
from models.loader import BUNDLED as BUNDLED_FOLDERS
from models.loader import check_made_for, load_decoder, load_tokenizer, read_config, resolve, tensor_files
from speculative.config import BUNDLED, EngineConfig
from speculative.errors import EngineLoadError

Kind = Literal["none", "ngram", "moa", "eagle", "independent"]


@dataclass(frozen=True, slots=True)
class FoundDrafter:
    """A drafter that fits its target; those with weights have a ``folder``, independent ones ``sizes`` of their own."""

    kind: Kind
    folder: Path | None = None
    sizes: DecoderConfig | None = None


def find_drafter(
    config: EngineConfig, target: DecoderConfig, tokenizer: PreTrainedTokenizerBase | None, length: int
) -> FoundDrafter:
    """The drafter of a target with ``tokenizer`` for texts of ``length`` tokens; raises EngineLoadError, CheckpointError."""
    found = _found(config, target, tokenizer, length)
    if config.draft_window and found.kind not in ("moa", "eagle"):
        raise EngineLoadError(
            f"--draft-window {config.draft_window}: only MoA and EAGLE drafters can leave out a prompt's beginning "
            f"(drafter: {found.kind})"
        )
    return found


def _found(config: EngineConfig, target: DecoderConfig, tokenizer: PreTrainedTokenizerBase | None, length: int) -> FoundDrafter:
    choice = config.drafter
    if choice == "auto":
        choice = str(BUNDLED_FOLDERS["drafter"]) if config.model == BUNDLED else "ngram"
    if choice == "none":
        return FoundDrafter("none")
    if choice == "ngram":
        return FoundDrafter("ngram")

    def check(raw: Mapping[str, Any]) -> tuple[Kind, DecoderConfig | None]:
        if is_moa(raw) or EAGLE in (raw.get("architectures") or ()):
            check_made_for(raw, target, Path(choice))
        try:
            return _checked(raw, target, length)
        except CheckpointError as error:
            raise EngineLoadError(f"--drafter {choice}: {error}") from error

    folder = resolve(choice, check)
    kind, sizes = check(read_config(folder))
    tensor_files(folder)
    if sizes is not None:
        _check_tokenizer(choice, (target, tokenizer), (sizes, load_tokenizer(folder)))
    return FoundDrafter(kind, folder, sizes)


def _checked(raw: Mapping[str, Any], target: DecoderConfig, length: int) -> tuple[Kind, DecoderConfig | None]:
    """What a config.json describes, and its sizes where they are its own."""
    name = PUBLISHED_MOA if is_moa(raw) else architecture(raw)
    if name == PUBLISHED_MOA:
        MoAConfig.from_hf(raw, target)
        return "moa", None
    if name == EAGLE:
        EagleConfig.from_hf(raw, target)
        return "eagle", None
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"architecture {name!r} cannot draft here; what can: Mixture-of-Attentions drafters, EAGLE drafters made by "
            f"'moaserve train', and small models with the target's tokenizer ({SUPPORTED})"
        )
    sizes = DecoderConfig.from_hf(raw)
    sizes.check_window(length)
    return "independent", sizes


Side = tuple[DecoderConfig, PreTrainedTokenizerBase | None]


def _check_tokenizer(choice: str, target: Side, drafter: Side) -> None:
    """Raise EngineLoadError where tokens of drafter and target are not the same.

    Tokenizers decide, as models of one family pad their vocabularies to different sizes. Added tokens may differ: fine-tunes give
    those that were reserved names of their own, and some have more of them.
    """
    (ours, our_tokenizer), (theirs, their_tokenizer) = target, drafter
    if our_tokenizer is None or their_tokenizer is None:
        if ours.vocab_size != theirs.vocab_size:
            raise EngineLoadError(
                f"--drafter {choice} has {theirs.vocab_size} tokens and the model {ours.vocab_size}, without tokenizers in both "
                "folders to compare: a drafter must share its target's tokenizer"
            )
        return
    known, other = ({number: token for token, number in each.get_vocab().items()} for each in (our_tokenizer, their_tokenizer))
    added = our_tokenizer.added_tokens_decoder.keys() | their_tokenizer.added_tokens_decoder.keys()
    for number in sorted((known.keys() & other.keys()) - added):
        if known[number] != other[number]:
            raise EngineLoadError(
                f"--drafter {choice} has another tokenizer than the model: token {number} is {other[number]!r} there and "
                f"{known[number]!r} here; a drafter must share its target's tokenizer"
            )


def load_independent(found: FoundDrafter, target: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> Llama:
    """A small model that reads all of a target's tokens, and proposes none besides; raises CheckpointError."""
    assert found.folder is not None and found.sizes is not None
    model = load_decoder(found.folder, found.sizes, dtype=dtype, device=device)
    _fit_vocabulary(model, target.vocab_size)
    return model.eval().requires_grad_(False)


def _fit_vocabulary(model: Llama, size: int) -> None:
    """Cut the rows of tokens off that a target of ``size`` tokens has not; those that the model has not read as zeros.

    Where the model has fewer, its LM head stays as short: tokens without an output cannot be proposed.
    """
    own = model.config.vocab_size
    if own < size:
        embedding = F.pad(model.embedding.weight.detach(), (0, 0, 0, size - own))
        model.embedding = nn.Embedding.from_pretrained(embedding)
        if model.config.tie_word_embeddings:
            model.lm_head.weight = nn.Parameter(embedding[:own], requires_grad=False)
    elif own > size:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach()[:size], requires_grad=False)
