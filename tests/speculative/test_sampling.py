import numpy as np
import pytest
import torch
from scipy import stats
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from speculative.errors import InvalidRequestError
from speculative.request import SamplingParams
from speculative.sampling import choose, choose_rows, gumbel_noise, noise_key, noise_keys, noise_stream, process

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
]


def reference_probabilities(logits: torch.Tensor, settings: dict[str, float]) -> torch.Tensor:
    """What transformers' own warpers leave, as probabilities [V]."""
    scores = TemperatureLogitsWarper(settings["temperature"])(None, logits[None].clone())
    if settings.get("top_k"):
        scores = TopKLogitsWarper(int(settings["top_k"]))(None, scores)
    if settings.get("top_p", 1.0) < 1.0:
        scores = TopPLogitsWarper(settings["top_p"])(None, scores)
    if settings.get("min_p"):
        scores = MinPLogitsWarper(settings["min_p"])(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("vocabulary", [50, 3000])
def test_processed_logits_are_those_of_transformers(settings: dict[str, float], vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    ids, scores = process(logits, SamplingParams(**settings))  # type: ignore[arg-type]
    probabilities = torch.zeros(vocabulary).scatter_(0, ids, scores.softmax(-1))
    torch.testing.assert_close(probabilities, reference_probabilities(logits, settings), atol=1e-6, rtol=1e-4)


def test_top_p_looks_beyond_the_head_when_the_distribution_is_flat() -> None:
    logits = torch.linspace(0, 0.01, 3000)
    ids, _ = process(logits, SamplingParams(temperature=1.0, top_p=0.5))
    assert len(ids) == pytest.approx(1500, rel=0.02)


@pytest.mark.parametrize("settings", SETTINGS)
def test_sampled_tokens_follow_the_exact_distribution(settings: dict[str, float]) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1)) * 0.6
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    draws = 3000
    counts = np.bincount([choose(logits, params, seed=7, position=i) for i in range(draws)], minlength=24)
    expected = reference_probabilities(logits, settings).double().numpy() * draws
    assert counts[expected == 0].sum() == 0
    # Cells expected below 5 are pooled, as the χ² approximation asks.
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    cells = wanted > 0
    assert cells.sum() >= 3
    assert stats.chisquare(observed[cells], wanted[cells] * draws / wanted.sum()).pvalue > 1e-3


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(torch.tensor(noise_key(3, 11)), torch.arange(100_000))
    assert stats.kstest(noise.double().numpy(), "gumbel_r").pvalue > 1e-3


def test_noise_of_a_token_does_not_depend_on_the_tensor_it_is_asked_in() -> None:
    key = torch.tensor(noise_key(-5, 2))
    everything = gumbel_noise(key, torch.arange(8192))
    some = torch.tensor([8191, 3, 4000])
    assert torch.equal(gumbel_noise(key, some), everything[some])


def test_noise_differs_between_seeds_positions_and_tokens() -> None:
    ids = torch.arange(2000)
    streams = [gumbel_noise(torch.tensor(noise_key(seed, position)), ids) for seed in (0, 1, -1, 2**63) for position in (0, 1, 500)]
    correlations = np.corrcoef(torch.stack(streams).numpy())
    assert np.abs(correlations - np.eye(len(streams))).max() < 0.1


def test_keys_of_many_positions_are_those_of_each() -> None:
    seeds, positions = [0, 1, -7, 2**63 - 1, 2**64 + 5], [0, 3, 10_000]
    keys = noise_keys(torch.tensor([noise_stream(seed) for seed in seeds]).unsqueeze(1), torch.tensor(positions))
    assert keys.tolist() == [[noise_key(seed, position) for position in positions] for seed in seeds]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 300},
        {"top_k": 300, "top_p": 0.9},
        {"top_k": 40, "top_p": 0.7, "min_p": 0.02, "temperature": 1.4},
    ],
)
@pytest.mark.parametrize("vocabulary", [100, 2000])
def test_rows_drawn_together_are_drawn_as_each(settings: dict[str, float], vocabulary: int) -> None:
    torch.manual_seed(3)
    logits, positions = 4 * torch.randn(40, vocabulary), torch.arange(7, 47)
    params = SamplingParams(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    together = choose_rows(logits, params, 11, positions).tolist()
    alone = [choose(row, params, 11, position) for row, position in zip(logits, positions.tolist(), strict=True)]
    known = [token >= 0 for token in together]
    assert [token for token in together if token >= 0] == [token for token, sure in zip(alone, known, strict=True) if sure]
    assert sum(known) >= 35


def test_where_a_sorted_head_does_not_hold_enough_nothing_is_drawn() -> None:
    flat = torch.zeros(2, 3000)
    assert choose_rows(flat, SamplingParams(temperature=1.0, top_p=0.9), 1, torch.tensor([3, 4])).tolist() == [-1, -1]


def test_temperature_zero_takes_the_first_of_the_largest() -> None:
    assert choose(torch.tensor([0.0, 2.0, 1.0, 2.0]), SamplingParams(temperature=0.0), seed=1, position=0) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("top_p", 0.0), ("top_k", -1), ("min_p", 1.5), ("max_tokens", -1), ("stop", ("",))],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
