from collections.abc import Iterator

import pytest
import torch

from models.tiles import has_operators, has_tiles, instructions


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    instructions.cache_clear()
    yield
    instructions.cache_clear()


@pytest.mark.parametrize(
    ("avx512_bf16", "avx2", "most", "expected"),
    [
        (True, True, None, "AVX512-BF16"),
        (True, True, "AVX512_CORE_BF16", "AVX512-BF16"),
        (True, True, "AVX2", "AVX2"),
        (False, True, None, "AVX2"),
        (False, False, None, None),
    ],
)
def test_operators_are_of_the_best_that_a_cpu_has_and_may_use(
    avx512_bf16: bool, avx2: bool, most: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: avx2)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if most is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    assert instructions() == expected
    assert has_operators() == (expected is not None) and has_tiles() == (expected == "AVX512-BF16")


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "x86_64"), ("Linux", "aarch64")])
def test_there_are_none_for_other_machines(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert instructions() is None
