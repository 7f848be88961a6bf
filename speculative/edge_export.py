"""From a target and its drafter to the bundle that an edge needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from models.architectures import ARCHITECTURES
from models.config import is_moa
from models.eagle import ARCHITECTURE as EAGLE
from models.edge_bundle import DType, Quantization, is_bundle
from models.edge_saving import write_bundle
from models.loader import BUNDLED as BUNDLED_FOLDERS
from models.loader import eos_token_ids, load_drafter, load_target, read_json, resolve, resolve_target
from speculative.config import BUNDLED
from speculative.errors import EngineLoadError
from speculative.fingerprints import pair_fingerprint

SUPPORTED = "only Mixture-of-Attentions drafters with N = 0 can be exported"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, in bytes, and the folders' weights that it was made of."""

    name: str
    fingerprint: str
    num_weight_files: int
    weight_bytes: int
    other_bytes: int
    target_weight_bytes: int
    drafter_weight_bytes: int


def export_edge(
    model: str,
    drafter: str,
    out: Path,
    *,
    dtype: DType = "bfloat16",
    quantization: Quantization | None = None,
    force: bool = False,
) -> Exported:
    """Write a bundle to ``out``; ``force`` replaces an earlier one there.

    ``model`` and ``drafter`` are "bundled", a folder or a hub id. Raises EngineLoadError or CheckpointError with what is wrong,
    before weights are loaded where that can be seen.
    """
    try:
        return _export(model, drafter, out, dtype, quantization, force)
    except (OSError, SafetensorError) as error:  # the latter of a full disk too
        raise EngineLoadError(f"cannot export to --out {out}: {error}") from error


def _export(model: str, drafter: str, out: Path, dtype: DType, quantization: Quantization | None, force: bool) -> Exported:
    _check_place(out, force)
    folder = resolve_target(model)
    drafter_folder = _drafter_folder(drafter)
    _check_kind(drafter, drafter_folder)
    # Fingerprints are of bfloat16 numbers, whatever is loaded.
    loaded_as = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    target, _ = load_target(folder, dtype=loaded_as)
    moa = load_drafter(drafter_folder, target.config, dtype=loaded_as)
    name, fingerprint = folder.name, pair_fingerprint(target, moa)
    write_bundle(
        out,
        target,
        moa,
        folder,
        name=name,
        fingerprint=fingerprint,
        eos_token_ids=eos_token_ids(folder),
        dtype=dtype,
        quantization=quantization,
    )
    sizes = {file.name: file.stat().st_size for file in out.iterdir() if file.is_file()}
    weights = [size for file, size in sizes.items() if file.endswith(".safetensors")]
    return Exported(
        name=name,
        fingerprint=fingerprint,
        num_weight_files=len(weights),
        weight_bytes=sum(weights),
        other_bytes=sum(sizes.values()) - sum(weights),
        target_weight_bytes=_weight_bytes(folder),
        drafter_weight_bytes=_weight_bytes(drafter_folder),
    )


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _check_place(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise EngineLoadError(f"--out {out} is a file: name a folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not is_bundle(out):
        raise EngineLoadError(f"--out {out} is not empty and holds no bundle: name another folder")
    if not force:
        raise EngineLoadError(f"--out {out} holds a bundle already: --force replaces it")


def _drafter_folder(drafter: str) -> Path:
    if drafter in ("none", "ngram"):
        raise EngineLoadError(f"--drafter {drafter}: this drafts without a network, so there is nothing to export; {SUPPORTED}")
    return BUNDLED_FOLDERS["drafter"] if drafter == BUNDLED else resolve(drafter)


def _check_kind(drafter: str, folder: Path) -> None:
    """Refuse what cannot draft on an edge, saying why."""
    raw = read_json(folder, "config.json")
    architecture = (raw.get("architectures") or [""])[0]
    if architecture == EAGLE:
        raise EngineLoadError(f"--drafter {drafter} is an EAGLE drafter, which reads the target's hidden states; {SUPPORTED}")
    if architecture in ARCHITECTURES and not is_moa(raw):
        raise EngineLoadError(
            f"--drafter {drafter} is a model of its own, which knows nothing of the target and needs no bundle; {SUPPORTED}"
        )
    if not is_moa(raw):
        raise EngineLoadError(f"--drafter {drafter} is no drafter that is known here; {SUPPORTED}")
    if borrowed := raw.get("target_layer_inference"):
        raise EngineLoadError(
            f"--drafter {drafter} runs through the target's last {borrowed} layers (target_layer_inference), which stay on the "
            f"server; {SUPPORTED}"
        )
