"""Ahead-of-time compilation for CPUs: a network as one shared library, with neither Python nor dispatcher between its operations.

PyTorch spends some microseconds on an operation whatever its size, and a model of a few million parameters has hundreds of them a
step. Compiled (torch.export and AOTInductor, with weights frozen and packed), such a step takes a quarter of the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import cached_attention, tiled_linear
from models.attention import AttentionPlan
from models.digest import digest_weights
from models.graph_runner import keep, machine, prebuilt_runner
from models.kv_cache import KVWindow
from models.layers import Linear, RMSNorm, RotaryTable
from models.llama import Llama
from models.tiles import Instructions, instructions

logger = logging.getLogger("moaserve.engine")

DYNAMIC = torch.export.Dim.DYNAMIC
"""Marks a size that may differ from call to call; which of them are equal, the trace finds out."""


@dataclass(frozen=True, slots=True)
class Graph:
    """What is compiled: a module, inputs to trace it with, and which of their dimensions are dynamic (as torch.export takes it).

    Dynamic sizes of the examples must be 2 or more and differ from one another, or they would be taken for constants or for equal.
    ``settings`` names whatever else decides what the module computes, besides its weights and the shapes of the inputs.
    """

    name: str
    module: nn.Module
    examples: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    settings: str = ""


def unsupported(device: torch.device) -> str | None:
    """Why neither graphs nor operators can be had here, or None; for graphs ``without_compiler`` may speak against it."""
    if device.type != "cpu":
        return "compilation is for CPUs"
    return None if prebuilt_runner() else without_compiler()


def without_compiler(operators: Instructions | None = None) -> str | None:
    """What is wrong with this machine's compiler, or None; it must know ``operators``, those of this CPU unless told otherwise."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return "no C++ compiler found (install g++)"
    # Our operators are called wherever the CPU has what they are for, so they must be there.
    if (operators or instructions()) == "AVX512-BF16" and not _knows_tiles(compiler):
        return f"{compiler} does not know AVX512-BF16 and AMX (install g++ 11 or newer, or name one with CXX)"
    return None


@cache
def _knows_tiles(compiler: str) -> bool:
    """Whether a compiler has what ``tiles.h`` asks for; if not, that is logged once, as nobody is told of what goes without."""
    source = "#if !__has_include(<amxbf16intrin.h>)\nlacking\n#endif\n"
    asked = subprocess.run([compiler, "-E", "-P", "-x", "c++", "-"], input=source, capture_output=True, text=True, check=False)
    if "lacking" in asked.stdout:
        logger.warning(
            "%s does not know AVX512-BF16 and AMX, so neither graphs nor our operators are compiled: "
            "install g++ 11 or newer, or name one with CXX",
            compiler,
        )
        return False
    return True  # one that fails here says why when it compiles


def default_cache() -> Path:
    """Where compiled graphs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moaserve" / "compiled"


def fingerprint(graph: Graph) -> str:
    """Identifies what a graph computes: our code, its weights, PyTorch, the CPU and the threads it is tuned for."""
    digest = hashlib.sha256()
    shapes = [tuple(leaf.shape) for leaf in torch.utils._pytree.tree_leaves(graph.examples)]
    place = (machine(), f"operators {instructions()}", str(torch.get_num_threads()))
    for part in (*place, graph.name, graph.settings, str(shapes), *_constants(graph.module)):
        digest.update(part.encode())
    digest_weights(graph.module, digest)
    for folder in sorted({Path(__file__).parent, *_packages(Path(inspect.getfile(type(graph.module))))}):
        for source in sorted(file for file in folder.iterdir() if file.suffix in (".py", ".cpp", ".h")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _constants(module: nn.Module) -> Iterator[str]:
    """What becomes constants of a graph, and is no weight: sizes, angles and epsilons."""
    for each in module.modules():
        config = getattr(each, "config", None)
        if is_dataclass(config):
            yield repr(config)
        if isinstance(each, RotaryTable):
            yield str(each.head_dim)
        elif isinstance(each, RMSNorm):
            yield str(each.eps)


def _packages(source: Path) -> Iterator[Path]:
    """The folder of a source and those above it that are packages: what is traced may be of any of them."""
    yield source.parent
    for folder in source.parent.parents:
        if not (folder / "__init__.py").exists():
            return
        yield folder


def compile_graph(graph: Graph, path: Path) -> None:
    """Compile to ``path``, a .pt2 package; tens of seconds. The graph's module is not to be used after that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, _settings(folder):
        temporary = Path(folder) / "graph.pt2"
        for layer in graph.module.modules():
            if isinstance(layer, Linear):
                layer.tile()
        with torch.no_grad():
            exported = torch.export.export(graph.module, graph.examples, dynamic_shapes=graph.dynamic_shapes)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(temporary))
        keep(temporary, path)


@contextlib.contextmanager
def _settings(folder: str) -> Iterator[None]:
    """Inductor's settings: constant weights, its own matrix kernels (for few rows oneDNN is slower), and no trace left.

    A loop is shared among threads from 2,048 elements a thread on: at the few rows of a decoding step threads would mostly wait for
    one another, the more so where they share cores with others.
    """
    import torch._inductor.config as inductor

    environment = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        with inductor.patch(
            {
                "freezing": True,
                "max_autotune": True,
                "max_autotune_gemm_backends": "CPP",
                "compile_threads": 1,
                "cpp.min_chunk_size": 2048,
                "aot_inductor.custom_ops_to_c_shims": cached_attention.C_SHIMS | tiled_linear.C_SHIMS,
            }
        ):
            yield
    finally:
        if environment is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = environment


class _Decoder(nn.Module):
    """``Llama.run_layers`` from token ids on, over a window of the cache."""

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.target = target
        self.tiles = cached_attention.suits(target.dtype, target.config.head_dim)

    def forward(self, token_ids: Tensor, positions: Tensor, write: Tensor, mask: Tensor, layers: list[Tensor]) -> Tensor:
        config, (batch, rows) = self.target.config, token_ids.shape
        window = KVWindow(layers, config.num_kv_heads, config.head_dim, tiles=self.tiles)
        plan = AttentionPlan(0, batch, rows, positions.flatten(), write.flatten(), mask)
        return self.target.run_layers(self.target.embed(token_ids.flatten()), plan, window, first_layer=0)


DEEPEST = 4097
"""Positions that trees may reach past the end of a model's context, where nothing is accepted."""


def decoder_graph(target: Llama) -> Graph:
    """The target's layers, for any batch, rows and span."""
    config, batch, rows, span, slot_rows = target.config, 2, 3, 80, 96
    # The same for all engines, whatever room their trees have: a graph is kept for the next, and its table goes with it.
    target.rotary.reserve(config.max_position_embeddings + DEEPEST, target.embedding.weight)
    integers = torch.zeros(batch, rows, dtype=torch.long)
    layer = torch.zeros(batch, slot_rows, config.kv_size, dtype=target.dtype)
    inputs = (
        integers,
        integers.clone(),
        torch.arange(batch * rows).view(batch, rows),
        torch.zeros(batch, 1, rows * config.groups, span, dtype=target.dtype),
        [layer.clone() for _ in range(config.num_layers)],
    )
    sizes = (
        {0: DYNAMIC, 1: DYNAMIC},
        {0: DYNAMIC, 1: DYNAMIC},
        {0: DYNAMIC, 1: DYNAMIC},
        {0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC},
        [{0: DYNAMIC, 1: DYNAMIC}] * config.num_layers,
    )
    decoder = _Decoder(target)
    return Graph("decoder", decoder, inputs, sizes)
