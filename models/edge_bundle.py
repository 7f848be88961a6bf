"""The folder that an edge drafts from: its format, and reading it (``edge_saving`` writes it).

``config.json`` says what is in it and of which target and drafter, safetensors files hold the weights of ``models.edge`` under our
names (int8 weights beside ``….scales``), and the target's tokenizer, chat template and generation defaults come along as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from models.config import DecoderConfig, MoAConfig
from models.edge import EdgeMoA, EdgeNetworks, EdgeTarget
from models.errors import CheckpointError
from models.int8 import with_int8_weights
from models.loader import load_tokenizer, read_json, read_tensors

ARCHITECTURE = "MoAServeEdgeBundle"
FORMAT_VERSION = 1
DRAFT_VOCABULARY = "drafter.draft_vocabulary"
_CHUNK = 2**20

DType = Literal["bfloat16", "float16", "float32"]
Quantization = Literal["int8"]


class BundleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle's ``config.json``.

    ``dtype`` is the type of all weights that ``quantization`` leaves as they are; ``fingerprint`` is the pair's, as the server's
    ``ModelInfo.pair``. ``target`` and ``drafter`` hold sizes as in their own files. ``files`` are digests of what must not change,
    by name. ``model_type`` is the target's: transformers may choose the tokenizer's class by it.
    """

    architectures: list[str]
    format_version: int
    name: str
    dtype: DType
    quantization: Quantization | None
    fingerprint: str
    max_model_len: Annotated[int, msgspec.Meta(ge=2)]
    eos_token_ids: list[int]
    draft_vocabulary_size: Annotated[int, msgspec.Meta(ge=1)] | None
    target: dict[str, Any]
    drafter: dict[str, Any]
    files: dict[str, str]
    model_type: str | None = None


@dataclass(frozen=True, slots=True)
class EdgeBundle:
    """A bundle that was read; ``generation`` is the target's generation_config.json, {} where it has none."""

    config: BundleConfig
    target: EdgeTarget
    drafter: EdgeMoA
    tokenizer: PreTrainedTokenizerBase | None
    generation: dict[str, Any]


def is_bundle(folder: Path) -> bool:
    """Whether a folder says that it is one."""
    return ARCHITECTURE in (read_json(folder, "config.json").get("architectures") or [])


def read_bundle(folder: Path, *, dtype: torch.dtype) -> EdgeBundle:
    """Read a bundle, to compute in ``dtype``; int8 weights stay what they are.

    Raises CheckpointError for a folder that is none, or of which something is missing, damaged or does not fit the rest.
    """
    config = read_config(folder)
    for name, digest in config.files.items():
        _check_file(folder, name, digest)
    networks = networks_of(config, folder, dtype=dtype)
    target, tensors = networks.target.config, read_tensors(folder)
    vocabulary = _draft_vocabulary(tensors, config, target, folder)
    if target.tie_word_embeddings:
        tied = {name: tensor for name, tensor in tensors.items() if name.startswith("target.embedding.")}
        tensors |= {name.replace("embedding", "lm_head"): tensor for name, tensor in tied.items()}
    wanted = networks.state_dict()
    _check_tensors(tensors, wanted, folder)
    # Copied, since tensors stand in a file's memory where they may, and products of integers must not begin just anywhere.
    state = {
        name: tensor.to(wanted[name].dtype if is_quantized(name, wanted) else dtype, copy=True) for name, tensor in tensors.items()
    }
    networks.load_state_dict(state, assign=True)
    networks.eval().requires_grad_(False)
    networks.drafter.draft_vocabulary = vocabulary
    generation = read_json(folder, "generation_config.json")
    return EdgeBundle(config, networks.target, networks.drafter, load_tokenizer(folder), generation)


def is_quantized(name: str, places: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is a quantized weight or the scales of one."""
    return places[name].dtype == torch.int8 or (name.endswith(".scales") and name in places)


def networks_of(config: BundleConfig, folder: Path, *, dtype: torch.dtype) -> EdgeNetworks:
    """What ``config`` of the bundle in ``folder`` describes, without weights; raises CheckpointError where it fits nothing."""
    try:
        target = DecoderConfig.from_hf(config.target)
        return empty_networks(target, MoAConfig.from_hf(config.drafter, target), config.quantization, dtype=dtype)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def empty_networks(
    target: DecoderConfig, drafter: MoAConfig, quantization: Quantization | None, *, dtype: torch.dtype
) -> EdgeNetworks:
    """Networks of these sizes on the meta device, to compute in ``dtype`` where they are quantized."""
    with torch.device("meta"):
        networks = EdgeNetworks(target, drafter)
        if quantization is not None:
            with_int8_weights(networks, dtype)
    return networks


def read_config(folder: Path) -> BundleConfig:
    """A bundle's ``config.json``; raises CheckpointError for a folder that has none of ours."""
    if not folder.is_dir():
        raise CheckpointError(f"no folder {str(folder)!r}")
    raw = read_json(folder, "config.json")
    if not raw:
        raise CheckpointError(f"{folder} has no config.json, so it is no bundle: moaserve export-edge writes one")
    if not is_bundle(folder):
        kind = ", ".join(map(str, raw.get("architectures") or ["of no known architecture"]))
        raise CheckpointError(f"{folder} is no bundle ({kind}): moaserve export-edge writes one of a model and its drafter")
    if raw.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} is a bundle of format {raw.get('format_version')}, and this moaserve reads {FORMAT_VERSION}: export it again"
        )
    try:
        return msgspec.convert(raw, BundleConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{folder / 'config.json'} is damaged ({error}); fetch it again") from error


def digest_of(file: Path) -> str:
    """What ``BundleConfig.files`` says of a file."""
    digest = blake2b(digest_size=16)
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
    return f"blake2b:{digest.hexdigest()}"


def _check_file(folder: Path, name: str, digest: str) -> None:
    file = folder / name
    if Path(name).name != name or not file.is_file():
        raise CheckpointError(f"{folder} lacks {name}: copy the whole bundle again")
    if digest_of(file) != digest:
        raise CheckpointError(f"{file} is not what was exported: copy the whole bundle again")


def _draft_vocabulary(tensors: dict[str, Tensor], config: BundleConfig, target: DecoderConfig, folder: Path) -> Tensor | None:
    """Taken out of ``tensors``; None where all tokens may be drafted."""
    vocabulary = tensors.pop(DRAFT_VOCABULARY, None)
    size = None if vocabulary is None else vocabulary.numel()
    if size != config.draft_vocabulary_size:
        raise CheckpointError(
            f"{folder}: config.json says {config.draft_vocabulary_size} draft tokens, and the weights have {size}"
        )
    if vocabulary is None:
        return None
    integers = vocabulary.dim() == 1 and not vocabulary.is_floating_point()
    if not integers or not 0 <= int(vocabulary.min()) <= int(vocabulary.max()) < target.vocab_size:
        raise CheckpointError(f"{folder}: the draft vocabulary holds what is no token of the {target.vocab_size}")
    return vocabulary.long()


def _check_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], folder: Path) -> None:
    for what, names in (("lacks weights for", wanted.keys() - tensors.keys()), ("has weights for", tensors.keys() - wanted.keys())):
        if names:
            rest = " …" if len(names) > 5 else ""
            raise CheckpointError(f"{folder} {what} {', '.join(sorted(names)[:5])}{rest}: its config.json says otherwise")
    for name, tensor in tensors.items():
        shape, expected = tuple(tensor.shape), wanted[name]
        if shape != tuple(expected.shape):
            raise CheckpointError(f"{folder}: {name} has shape {shape}, the config asks for {tuple(expected.shape)}")
        fits = tensor.dtype == expected.dtype if is_quantized(name, wanted) else tensor.is_floating_point()
        if not fits:
            raise CheckpointError(f"{folder}: {name} holds {tensor.dtype}, the config asks for {expected.dtype}")
