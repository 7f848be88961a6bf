"""Where an engine computes and how: its device, the type of its numbers, and whether it is compiled."""

from __future__ import annotations

from pathlib import Path

import torch

from models.config import DecoderConfig
from models.eagle import ARCHITECTURE as EAGLE
from models.eagle import EagleConfig
from models.llama import Llama
from models.loader import read_json, resolve, target_config
from models.tiled_decoder import suits_whole
from models.tiles import has_operators, multiplies_bfloat16
from speculative.config import EngineConfig
from speculative.errors import EngineLoadError
from speculative.packages import compiles


def torch_device(name: str) -> torch.device:
    """What a device is called on the command line -> the device; raises EngineLoadError where it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EngineLoadError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}; try --device cpu") from error
    return device


def torch_dtype(name: str, device: torch.device, *, compiled: bool) -> torch.dtype:
    """What a type is called on the command line -> the type that weights have on that device.

    Our operators widen bfloat16 as they read it, on CPUs that multiply float32 alone; PyTorch's take twice as long by it there.
    """
    if name == "auto":
        fast = multiplies_bfloat16(device) or (compiled and has_operators())
        return torch.bfloat16 if fast else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def engine_dtype(config: EngineConfig, folder: Path, device: torch.device) -> torch.dtype:
    """The type of an engine's numbers, before anything of the target in ``folder`` is loaded."""
    if config.dtype != "auto" or device.type != "cpu":
        return torch_dtype(config.dtype, device, compiled=False)
    target = target_config(folder)
    with torch.device("meta"):
        sizes = Llama(target)
    return torch_dtype("auto", device, compiled=engine_compiles(config, sizes, device, _taps(config, target)))


def engine_compiles(config: EngineConfig, target: Llama, device: torch.device, taps: tuple[int, ...] = ()) -> bool:
    """Whether to compile for a drafter with ``taps``; raises EngineLoadError where it was asked for and cannot be."""
    reason = None
    if any(tap < target.config.num_layers for tap in taps):
        reason = "this drafter reads inner layers of the target, which a compiled one hides"
    if config.tensor_parallel_size > 1:
        reason = f"with --tensor-parallel-size {config.tensor_parallel_size} layers wait for other processes, which no graph can"
    return compiles(config.compile, target, device, reason, by_operators=suits_whole(target))


def _taps(config: EngineConfig, target: DecoderConfig) -> tuple[int, ...]:
    """The layers that an EAGLE drafter reads; other drafters read none but the last."""
    if config.drafter in ("auto", "none", "ngram"):
        return ()
    raw = read_json(resolve(config.drafter), "config.json")
    return EagleConfig.from_hf(raw, target).taps if (raw.get("architectures") or [""])[0] == EAGLE else ()
