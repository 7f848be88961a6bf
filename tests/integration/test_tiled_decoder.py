"""Products and whole decoders by operators, in bfloat16 and float32, against PyTorch's in float32."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.attention import AttentionPlan, additive
from models.config import DecoderConfig
from models.kv_cache import KVCache
from models.llama import LayersInTwoGoes, Llama
from models.rope import RopeConfig
from models.tiled_decoder import suits, tiled_decoder
from models.tiled_linear import tiled, tiled_linear
from models.tiles import TYPES, has_tiles

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("operators"),
]

CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=160,
    hidden_size=96,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=48,
    intermediate_size=128,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope=RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.14),
    tie_word_embeddings=True,
)


OFF = {torch.bfloat16: {"atol": 0.05, "rtol": 0.01}, torch.float32: {"atol": 1e-3, "rtol": 1e-4}}
"""How far products may be off."""

both_types = pytest.mark.parametrize("dtype", TYPES, ids=list(TYPES.values()))


def weight(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs)).to(dtype)


def rows(count: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (480, 288), (96, 768), (8192, 64), (64, 4128)])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33, 35, 80, 257])
@both_types
def test_products_are_pytorchs(outputs: int, inputs: int, count: int, dtype: torch.dtype) -> None:
    x, matrix = rows(count, inputs, dtype), weight(outputs, inputs, dtype)
    out = tiled_linear(x, tiled(matrix))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), x.float() @ matrix.float().T, **OFF[dtype])


@pytest.mark.parametrize("inputs", [288, 4128])
@both_types
def test_a_rows_products_are_the_same_whatever_comes_with_it(inputs: int, dtype: torch.dtype) -> None:
    x, matrix = rows(100, inputs, dtype), tiled(weight(480, inputs, dtype))
    together = tiled_linear(x, matrix)
    for count in (1, 5, 16, 17, 33, 47):
        assert torch.equal(tiled_linear(x[:count], matrix), together[:count])
        assert torch.equal(tiled_linear(x[100 - count :], matrix), together[100 - count :])


@both_types
def test_products_take_rows_as_they_lie(dtype: torch.dtype) -> None:
    x, matrix = rows(20, 3 * 64 + 1, dtype), weight(96, 64, dtype)
    for part in (x[:, 64:128], x[::2, 1:65], x.t().contiguous().t()[:, :64], x[:0, :64]):
        torch.testing.assert_close(tiled_linear(part, tiled(matrix)).float(), part.float() @ matrix.float().T, **OFF[dtype])
    batched = x[:, :64].unflatten(0, (4, 5))
    assert torch.equal(tiled_linear(batched, tiled(matrix)), tiled_linear(x[:, :64], tiled(matrix)).unflatten(0, (4, 5)))


@pytest.mark.parametrize(
    ("x", "dtype"), [(rows(2, 32), torch.bfloat16), (rows(2, 64), torch.float32), (rows(2, 64).double(), torch.bfloat16)]
)
def test_what_does_not_belong_together_is_refused(x: Tensor, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="do not belong together"):
        tiled_linear(x, tiled(weight(32, 64, dtype)))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, weights in float32 are laid out as such, whatever could hold them."""
    return lambda: monkeypatch.setattr("models.tiled_linear._narrowed", lambda weight: weight)


@pytest.mark.parametrize("count", [1, 2, 5, 12, 16, 23, 70])
def test_weights_that_bfloat16_holds_are_half_as_large_and_give_the_same(wide: Callable[[], None], count: int) -> None:
    x, matrix = rows(count, 4128, torch.float32), weight(96, 4128).float()
    narrow = tiled(matrix)
    assert narrow.dtype == torch.bfloat16
    assert tiled(matrix + 1e-6).dtype == torch.float32, "not even nearly is held"
    wide()
    assert tiled(matrix).dtype == torch.float32
    assert torch.equal(tiled_linear(x, narrow), tiled_linear(x, tiled(matrix)))


def target(dtype: torch.dtype = torch.bfloat16, config: DecoderConfig = CONFIG) -> Llama:
    """The same weights in every type."""
    torch.manual_seed(1)
    made = Llama(config).bfloat16().requires_grad_(False)
    for name, parameter in made.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return made.to(dtype)


def cache_of(model: Llama, slots: int = 4) -> KVCache:
    """With a text of 100 tokens in each slot."""
    cache = model.new_cache(slots, 40, 200)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
    return cache


def inputs(cache: KVCache, batch: int, count: int, first_slot: int = 0) -> list[Tensor]:
    """Trees of ``count`` rows behind the texts of ``batch`` slots, as compiled decoders take them; masks are random."""
    slots, numbers = torch.arange(first_slot, first_slot + batch).view(-1, 1), torch.arange(count)
    token_ids = (slots * 31 + numbers * 7) % CONFIG.vocab_size
    positions = 100 + numbers // 3 + 0 * slots
    write = (slots - first_slot) * cache.rows_per_slot + numbers
    seen = torch.rand(4, count, 40, generator=torch.Generator().manual_seed(3))[first_slot : first_slot + batch] < 0.5
    mask = torch.ones(batch, count, 140, dtype=torch.bool)
    mask[..., :40] = seen & (torch.arange(40) < count)
    mask = mask.repeat_interleave(CONFIG.groups, dim=1).unsqueeze(1)
    return [token_ids, positions, write, additive(mask, cache.data.dtype), *cache.window(first_slot, batch)]


SIZES = [(1, 1), (1, 33), (3, 1), (3, 10), (1, 39)]

LIKE_QWEN = {"qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": True}, "both": {"attention_bias": True, "qk_norm": True}}

every_family = pytest.mark.parametrize(
    "config", [CONFIG, *(replace(CONFIG, **each) for each in LIKE_QWEN.values())], ids=["llama", *LIKE_QWEN]
)


def by_pytorch(model: Llama, cache: KVCache, batch: int, count: int) -> Tensor:
    token_ids, positions, write, mask = inputs(cache, batch, count)[:4]
    plan = AttentionPlan(0, batch, count, positions.flatten(), write.flatten(), mask)
    return model.run_layers(model.embed(token_ids.flatten()), plan, cache, first_layer=0)


@pytest.mark.parametrize(("batch", "count"), SIZES)
@every_family
def test_a_decoder_is_as_near_to_float32_as_pytorchs(batch: int, count: int, config: DecoderConfig) -> None:
    model, exact = target(config=config), target(torch.float32, config)
    caches = [cache_of(model), cache_of(model), cache_of(exact)]
    assert suits(model)
    hidden = tiled_decoder(model)(inputs(caches[0], batch, count))[0].float()
    plain, expected = by_pytorch(model, caches[1], batch, count).float(), by_pytorch(exact, caches[2], batch, count)
    assert (hidden - expected).abs().mean() <= 1.1 * (plain - expected).abs().mean()
    torch.testing.assert_close(hidden, expected, atol=0.15, rtol=0.05)
    torch.testing.assert_close(caches[0].data.float(), caches[2].data, atol=0.1, rtol=0.03)


@pytest.mark.parametrize(("batch", "count"), SIZES)
@every_family
def test_in_float32_a_decoder_is_pytorchs(batch: int, count: int, config: DecoderConfig) -> None:
    model = target(torch.float32, config)
    ours, theirs = cache_of(model), cache_of(model)
    assert suits(model)
    hidden = tiled_decoder(model)(inputs(ours, batch, count))[0]
    torch.testing.assert_close(hidden, by_pytorch(model, theirs, batch, count), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.data, theirs.data, atol=1e-4, rtol=1e-4)


def test_a_decoder_of_wide_weights_is_the_same(wide: Callable[[], None]) -> None:
    model = target(torch.float32)
    narrow, before, after = tiled_decoder(model), cache_of(model), cache_of(model)
    wide()
    assert torch.equal(narrow(inputs(before, 3, 10))[0], tiled_decoder(model)(inputs(after, 3, 10))[0])
    assert torch.equal(before.data, after.data)


@both_types
@every_family
def test_a_texts_rows_are_the_same_whoever_shares_the_pass(dtype: torch.dtype, config: DecoderConfig) -> None:
    model = target(dtype, config)
    decoder, together, alone = tiled_decoder(model), cache_of(model), cache_of(model)
    hidden = decoder(inputs(together, 4, 10))[0].view(4, 10, -1)
    for slot in range(4):
        assert torch.equal(decoder(inputs(alone, 1, 10, first_slot=slot))[0], hidden[slot])
    assert torch.equal(together.data, alone.data)


@pytest.mark.parametrize(("count", "wanted"), [(1, 0), (33, 1), (39, 20), (39, 38), (39, 39)])
@both_types
def test_rows_that_are_not_wanted_leave_keys_and_values_alone(count: int, wanted: int, dtype: torch.dtype) -> None:
    model = target(dtype)
    decoder, whole, part = tiled_decoder(model), cache_of(model), cache_of(model)
    hidden = decoder(inputs(whole, 1, count, first_slot=2))[0]
    assert torch.equal(decoder(inputs(part, 1, count, first_slot=2), wanted)[0], hidden[wanted:])
    assert torch.equal(part.data, whole.data)


@pytest.mark.parametrize(("count", "wanted", "told"), [(33, 32, 0), (39, 38, 20), (39, 38, 38), (39, 39, 7), (5, 0, 0)])
@both_types
def test_what_is_told_later_is_what_it_would_have_been_at_once(count: int, wanted: int, told: int, dtype: torch.dtype) -> None:
    model = target(dtype)
    decoder, whole, part = tiled_decoder(model), cache_of(model), cache_of(model)
    hidden = decoder(inputs(whole, 1, count, first_slot=2))[0]
    assert isinstance(decoder, LayersInTwoGoes)
    last, later = decoder.in_two_goes(inputs(part, 1, count, first_slot=2), wanted, told)
    assert torch.equal(last, hidden[wanted:]) and torch.equal(part.data, whole.data)
    part.data.zero_()  # what was read may have gone meanwhile
    assert torch.equal(later(), hidden[told:])


@pytest.mark.parametrize(("batch", "wanted"), [(2, 1), (1, 4), (1, -1)])
def test_rows_that_are_not_there_cannot_be_wanted(batch: int, wanted: int) -> None:
    model = target()
    with pytest.raises(RuntimeError, match="no rows of one text"):
        tiled_decoder(model)(inputs(cache_of(model), batch, 3), wanted)


@both_types
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype) -> None:
    model, threads = target(dtype), torch.get_num_threads()
    decoder, one, three = tiled_decoder(model), cache_of(model), cache_of(model)
    alone = decoder(inputs(one, 4, 33))[0]
    torch.set_num_threads(3)
    try:
        assert torch.equal(decoder(inputs(three, 4, 33))[0], alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("which", "value", "said"),
    [(0, CONFIG.vocab_size, "no token 160"), (1, 256, "no position 256"), (2, 9999, "no cache row")],
)
def test_what_lies_outside_is_refused(which: int, value: int, said: str) -> None:
    model = target()
    given = inputs(cache_of(model), 2, 3)
    given[which][1, 2] = value
    with pytest.raises(RuntimeError, match=said):
        tiled_decoder(model)(given)


@pytest.mark.parametrize(
    "changes",
    [{"output_bias": True}, {"mlp_bias": True}, {"head_dim": 24}, {"hidden_size": 80}],
)
def test_other_decoders_are_left_to_the_compiler(changes: dict[str, int]) -> None:
    assert not suits(target(config=replace(CONFIG, **changes)))  # type: ignore[arg-type]
    assert not suits(target(torch.float64))


@pytest.mark.parametrize(
    "less",
    [
        pytest.param("AVX512_CORE_BF16", marks=pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs AMX")),
        pytest.param("AVX2", marks=pytest.mark.skipif(not has_tiles(), reason="needs AVX512-BF16")),
    ],
)
def test_a_cpu_that_may_use_less_does_the_same(less: str) -> None:
    """All of these tests and those of the other operators once more, as on a CPU that has no more."""
    here = Path(__file__)
    others = [str(here.with_name(f"test_{name}.py")) for name in ("cached_attention", "tiled_drafter", "sampled_token")]
    again = [str(here), *others, "-q", "-k", "not may_use_less", "-p", "no:cacheprovider"]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": less}
    ended = subprocess.run([sys.executable, "-m", "pytest", *again], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
