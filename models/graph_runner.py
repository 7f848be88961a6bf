"""Loads compiled graphs, and lets other threads of Python go on while long ones run."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from models.llama import CompiledGraph
from models.tiles import Instructions, instructions

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where ``prebuilding`` puts libraries, for machines without a compiler."""

_CPU_INFO = Path("/proc/cpuinfo")

_EVERY_CPU = ("march=x86-64", "mavx2", "mfma")
"""What the library asks of CPUs besides what its operators are made of, whose functions name that themselves.

x86-64-v3 is little more, and compilers before g++ 11 do not know it.
"""


@cache
def machine() -> str:
    """What compiled code depends on besides its sources: PyTorch, and all that the CPU can do.

    Compilers are told to use whatever this CPU has, which its class alone ("AVX512" since Skylake-X) does not say.
    """
    flags = hashlib.sha256(_cpu_flags().encode()).hexdigest()[:24]
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {flags}"


def _cpu_flags() -> str:
    """Of the first core, as Linux tells them; elsewhere the processor's name."""
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86, ARM
                return " ".join(sorted(value.split()))
    return platform.processor()


def runner_fingerprint(operators: Instructions | None) -> str:
    """Identifies the library that ``build_runner`` makes: its sources, PyTorch, and what it is made of or, without, the CPU."""
    place = machine() if operators is None else f"{torch.__version__} {operators} {_EVERY_CPU}"
    return hashlib.sha256(place.encode() + b"".join(source.read_bytes() for source in (*SOURCES, *HEADERS))).hexdigest()[:24]


def runner_name(operators: Instructions | None) -> str:
    """What the file is called."""
    return f"runner-{runner_fingerprint(operators)}.so"


def prebuilt_runner() -> Path | None:
    """The library for this machine, where it came with the program."""
    path = PREBUILT / runner_name(instructions())
    return path if intact(path) else None


def runner_path(cache: Path) -> Path:
    """Where it is: with the program, or else where ``build_runner`` is to put it among the compiled graphs in ``cache``."""
    return prebuilt_runner() or cache / runner_name(instructions())


def build_runner(path: Path, operators: Instructions | None = None) -> None:
    """Compile the library that runs graphs, and has the operators that they use, to ``path``; half a minute.

    It has ``operators``, those of this CPU unless told otherwise, and then runs on all CPUs that have these. All sources are
    compiled as one: PyTorch's headers take most of the time.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    operators, options = operators or instructions(), CppTorchOptions()
    if operators is not None:
        flags = options.get_cflags()  # a list that may be changed; not all versions of PyTorch have a setting for it
        flags[:] = [flag for flag in flags if not flag.startswith("march=")] + list(_EVERY_CPU)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        together = Path(folder) / "together.cpp"
        chosen = "#define MOASERVE_AVX2 1\n" if operators == "AVX2" else ""
        together.write_text(chosen + "".join(f'#include "{source}"\n' for source in SOURCES))
        builder = CppBuilder("runner", [str(together)], options, folder)
        builder.build()
        keep(Path(builder.get_target_file_path()), path)


def keep(made: Path, path: Path) -> None:
    """Move a library or package that was made to ``path``, with a checksum at its end, which those who load it do not look at."""
    with made.open("r+b") as file:
        file.write(_checksum(file, made.stat().st_size))
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave the name without what it names
    made.replace(path)


def intact(path: Path) -> bool:
    """Whether there is what ``keep`` left there: one that is damaged may end the process that loads it."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - xxhash.xxh3_128().digest_size
        return size > 0 and _checksum(file, size) == file.read()
    return False


def _checksum(file: BinaryIO, size: int) -> bytes:
    """Of the next ``size`` bytes."""
    digest = xxhash.xxh3_128()
    while size > 0 and (part := file.read(min(size, 1 << 20))):
        digest.update(part)
        size -= len(part)
    return digest.digest()


def load_runner(runner: Path) -> None:
    """Load what ``build_runner`` made, before the first graph.

    At another path it would register all again, which ends the process, so it is loaded once.
    """
    try:
        _graph_class()
    except RuntimeError:
        # Its symbols are for the graphs that are loaded after it.
        ctypes.CDLL(str(runner), mode=ctypes.RTLD_GLOBAL)
    torch.cpu._init_amx()  # graphs take it for granted that they may multiply tiles, which Linux grants on request


def load_graph(package: Path) -> CompiledGraph:
    """A compiled graph as a function from its inputs' tensors to its outputs', both in a flat list; what it writes to is dense.

    It keeps the interpreter's lock: for graphs that take a millisecond or less, since letting go of it takes 40 µs.
    """
    # The package's own call parses its structure from JSON every time, which takes longer than a drafted level.
    return of_dense(torch._inductor.aoti_load_package(str(package)).loader.run)


def load_long_graph(package: Path) -> CompiledGraph:
    """The same, but other threads go on while it runs."""
    return of_dense(_graph_class()(str(package)).run)


def _graph_class() -> Callable[[str], Any]:
    made: Callable[[str], Any] = torch.classes.moaserve.Graph
    return made


def of_dense(run: CompiledGraph) -> CompiledGraph:
    """For what takes all its inputs for dense: graphs are traced with such, and do not check."""

    def graph(inputs: list[Tensor]) -> list[Tensor]:
        return run([tensor.contiguous() for tensor in inputs])

    return graph
