import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.cpp_builder import CppBuilder

from models import compiled, graph_runner, prebuilding
from models.compiled import Graph, default_cache, fingerprint, unsupported, without_compiler
from models.graph_runner import build_runner, intact, keep, machine, runner_fingerprint, runner_name, runner_path
from models.layers import RMSNorm, RotaryTable
from models.rope import RopeConfig
from models.tiles import Instructions, instructions

NORM = "from models.compiled import Graph, fingerprint; from models.layers import RMSNorm; import torch; torch.set_num_threads(1); "
NORM += "print(fingerprint(Graph('norm', RMSNorm(8, 1e-5), (torch.zeros(3, 8),), ({},))))"


class Configured(nn.Module):
    """Computes what its configuration says."""

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.config = config


def key_of(module: nn.Module) -> str:
    return fingerprint(Graph("graph", module, (torch.zeros(3, 8),), ({},)))


@pytest.fixture
def other_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a file says of the CPU; whatever writes it must say that the CPU is another: ``machine.cache_clear()``."""
    monkeypatch.setattr(graph_runner, "_CPU_INFO", tmp_path / "cpuinfo")
    yield tmp_path / "cpuinfo"
    machine.cache_clear()


def test_graphs_that_rotate_otherwise_are_told_apart() -> None:
    def of(theta: float) -> str:
        return fingerprint(Graph("rotary", RotaryTable(8, RopeConfig(theta=theta)), (torch.arange(3),), ({},), ""))

    assert of(10000.0) == of(10000.0) != of(500000.0)


def test_graphs_with_another_epsilon_or_configuration_are_told_apart() -> None:
    assert key_of(RMSNorm(8, 1e-5)) == key_of(RMSNorm(8, 1e-5)) != key_of(RMSNorm(8, 1e-6))
    within = [key_of(nn.Sequential(RMSNorm(8, eps))) for eps in (1e-5, 1e-6)]
    assert len(set(within)) == 2
    keys = [key_of(Configured(RopeConfig(factor=factor))) for factor in (1.0, 1.0, 8.0)]
    assert keys[0] == keys[1] != keys[2]


def test_another_process_finds_a_graph_under_the_same_key() -> None:
    printed = subprocess.check_output([sys.executable, "-c", NORM], text=True, cwd=Path(__file__).parents[2])
    assert printed.strip() == fingerprint(Graph("norm", RMSNorm(8, 1e-5), (torch.zeros(3, 8),), ({},)))


@pytest.mark.parametrize(
    "lines",
    [
        ("processor: 0\nflags\t\t: fpu avx512f avx512_vnni\n", "processor: 0\nflags\t\t: fpu avx512f\n"),
        ("Features\t: fp asimd sve\n", "Features\t: fp asimd\n"),
    ],
    ids=["x86", "arm"],
)
def test_cpus_of_a_class_that_can_do_different_things_share_nothing(other_cpu: Path, lines: tuple[str, str]) -> None:
    def keys(said: str) -> tuple[str, str]:
        other_cpu.write_text(said)
        machine.cache_clear()
        return runner_fingerprint(None), key_of(RMSNorm(8, 1e-5))

    first, second = keys(lines[0]), keys(lines[1])
    assert first == keys(lines[0] + "processor: 1\nflags: of another core\n")
    assert first[0] != second[0] and first[1] != second[1]


def test_without_word_of_a_cpu_its_name_counts(other_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(name: str) -> str:
        monkeypatch.setattr("platform.processor", lambda: name)
        machine.cache_clear()
        return runner_fingerprint(None)

    assert not other_cpu.exists()
    assert key("arm") == key("arm") != key("i386")


def test_a_library_of_operators_is_for_all_cpus_that_have_what_they_are_made_of(other_cpu: Path) -> None:
    found = set()
    for flags in ("avx2 fma", "avx2 fma avx512f"):
        other_cpu.write_text(f"flags\t\t: {flags}\n")
        machine.cache_clear()
        found.add((runner_fingerprint("AVX2"), runner_fingerprint("AVX512-BF16")))
    ((narrow, wide),) = found
    assert narrow != wide


def test_a_library_that_came_with_the_program_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runner, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu, cache = torch.device("cpu"), tmp_path / "cache"
    path = tmp_path / "prebuilt" / runner_name(instructions())
    assert runner_path(cache).parent == cache
    assert "no C++ compiler found" in (unsupported(cpu) or "")
    path.parent.mkdir()
    path.write_bytes(b"half of it")
    assert runner_path(cache).parent == cache  # damaged
    (tmp_path / "made").write_bytes(b"a library")
    keep(tmp_path / "made", path)
    assert runner_path(cache) == path
    assert unsupported(cpu) is None
    assert "no C++ compiler found" in (without_compiler() or "")
    assert unsupported(torch.device("cuda")) == "compilation is for CPUs"


def test_what_cannot_be_built_beforehand_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("sys.argv", ["prebuilding"])
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(SystemExit, match="operators are for x86-64, not aarch64"):
        prebuilding.main()
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(SystemExit, match="no C\\+\\+ compiler found"):
        prebuilding.main()


@pytest.mark.skipif(shutil.which("g++") is None, reason="asks the compiler what it is")
@pytest.mark.parametrize("operators", ["AVX512-BF16", "AVX2", None])
def test_the_library_is_compiled_for_all_cpus_that_its_operators_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operators: Instructions | None
) -> None:
    commands: list[str] = []

    def build(builder: CppBuilder) -> None:
        commands.append(builder.get_command_line())
        Path(builder.get_target_file_path()).write_bytes(b"a library")

    monkeypatch.setattr(CppBuilder, "build", build)
    monkeypatch.setattr(graph_runner, "instructions", lambda: None)
    build_runner(tmp_path / "runner.so", operators)
    assert intact(tmp_path / "runner.so")
    (command,) = commands
    said = {word for word in command.split() if word.startswith("-m")}
    assert said == {"-march=x86-64", "-mavx2", "-mfma"} or operators is None
    assert "CPU_CAPABILITY" not in command  # which the CPU that builds would choose


def test_graphs_with_our_operators_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for chosen in ("AVX512-BF16", "AVX2", None):
        monkeypatch.setattr(compiled, "instructions", lambda chosen=chosen: chosen)
        keys.append(key_of(RMSNorm(8, 1e-5)))
    assert len(set(keys)) == 3


def test_a_graph_is_of_all_packages_that_its_module_is_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "outside" / "outer" / "inner"
    inner.mkdir(parents=True)
    for package in (inner, inner.parent):
        (package / "__init__.py").touch()
    (inner / "network.py").write_text("from torch import nn\nfrom outer.helping import help\nclass Network(nn.Module): pass\n")
    helping, outside = inner.parent / "helping.py", tmp_path / "outside" / "other.py"
    helping.write_text("def help(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path / "outside")
    from outer.inner.network import Network  # type: ignore[import-not-found]

    before = key_of(Network())
    outside.touch()
    assert key_of(Network()) == before
    helping.write_text("def help(): return 2\n")
    assert key_of(Network()) != before


def test_a_cache_folder_that_is_empty_is_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_cache() == tmp_path / ".cache" / "moaserve" / "compiled"


@pytest.mark.parametrize("size", [1, 100, 3 << 20])
def test_files_are_intact_as_they_are_kept_and_in_no_other_way(tmp_path: Path, size: int) -> None:
    made, kept = tmp_path / "made", tmp_path / "kept"
    made.write_bytes(bytes(range(256)) * (size // 256) + b"e" * (size % 256))
    assert not intact(kept)
    keep(made, kept)
    assert intact(kept) and not made.exists()
    whole = kept.read_bytes()
    flipped = whole[: size // 2] + bytes([whole[size // 2] ^ 1]) + whole[size // 2 + 1 :]
    for damaged in (b"", b"hello", whole[:-1], whole[: len(whole) // 2], whole + b"e", flipped, bytes(len(whole))):
        kept.write_bytes(damaged)
        assert not intact(kept)


@pytest.fixture
def old_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is one that has no <amxbf16intrin.h>."""
    compiler = tmp_path / "g++-10"
    compiler.write_text("#!/bin/sh\ncat > /dev/null\necho lacking\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


@pytest.mark.usefixtures("old_compiler")
def test_a_compiler_that_is_too_old_for_the_cpu_compiles_nothing_and_that_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "instructions", lambda: "AVX512-BF16")
    for _ in range(2):
        assert "g++-10 does not know AVX512-BF16" in (unsupported(torch.device("cpu")) or "")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "install g++ 11 or newer" in record.getMessage()


@pytest.mark.usefixtures("old_compiler")
def test_for_other_cpus_it_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "instructions", lambda: "AVX2")
    assert unsupported(torch.device("cpu")) is None
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(RuntimeError, match="does not know AVX512-BF16"):
        prebuilding.prebuild()


def test_a_compiler_that_fails_says_so_when_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(compiled, "instructions", lambda: "AVX512-BF16")
    assert unsupported(torch.device("cpu")) is None
