"""Penalties, bias, ends and log-probabilities: what transformers gives, and the same with speculation on and off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from speculative.errors import EngineLoadError, InvalidRequestError
from speculative.loading import default_sampling
from speculative.logprobs import LOGPROB_ROWS, text_logprobs, token_logprobs
from speculative.request import RequestOutput, SamplingParams, TokenLogprob
from speculative.sampler import Sampler
from tests.speculative.conftest import DRAFTERS, N0, N1, MakeEngine, request, run, tokens

PROMPT = [7, 7, 30, 7, 7, 30, 7]
PARAMETERS = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.9},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": ((9, 4.0), (30, -100.0), (12, 3.5))},
    "min tokens": {"min_tokens": 15, "stop_token_ids": tuple(range(2, 160, 4))},
    "all": {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": ((9, 1.0),),
        "min_tokens": 9,
        "stop_token_ids": (5, 6, 7, 30),
        "logprobs": 3,
        "prompt_logprobs": 2,
    },
}
SAMPLING = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.2, "top_k": 40}]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(N0 / "target")
    return reference


def generated(make_engine: MakeEngine, drafter: str = "moa", **params: object) -> list[int]:
    given = {"max_tokens": 40, "temperature": 0.0, **params}
    return tokens(run(make_engine(N0, drafter), [request("r", PROMPT, **given)]))["r"]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("name", PARAMETERS)
def test_output_is_the_same_with_speculation_on_and_off(make_engine, name: str, sampling: dict[str, object]) -> None:
    given = {"max_tokens": 18, "seed": 3, **sampling, **PARAMETERS[name]}
    requests = [request(str(n), [*PROMPT, n], **given) for n in range(4)]
    # One at a time and plain; then with others beside, drafted in every way: each drafter meets all parameters together with one
    # of the samplings, and half of them alone.
    expected = tokens(run(make_engine(N0, "none", max_num_seqs=1), requests))
    assert len({tuple(ids) for ids in expected.values()}) > 1
    turn, every = SAMPLING.index(sampling) + list(PARAMETERS).index(name), 3 if name == "all" else 6
    for drafter in DRAFTERS[turn % every :: every]:
        lookup = (DRAFTERS.index(drafter) + list(PARAMETERS).index(name)) % 2
        engine = make_engine(N0, drafter, max_num_seqs=3, prefill_chunk=4, draft_lookup=lookup)
        assert tokens(run(engine, requests)) == expected, drafter


@pytest.mark.parametrize("penalty", [1.4, 0.7])
def test_repetition_penalty_is_that_of_transformers(make_engine, model: PreTrainedModel, penalty: float) -> None:
    expected = greedy(model, GenerationConfig(max_new_tokens=40, repetition_penalty=penalty, eos_token_id=None))
    assert generated(make_engine, repetition_penalty=penalty) == expected != generated(make_engine)


def test_repetition_counts_in_prompt_and_output_and_the_other_penalties_in_the_output_alone() -> None:
    logits, prompt, output = torch.linspace(-2, 2, 160), (3, 150), (80, 20)
    text = torch.tensor([[*prompt, *output]])

    def adjusted(**params: float) -> Tensor:
        sampler = Sampler(SamplingParams(**params), 0, prompt, ())  # type: ignore[arg-type]
        for token in output:
            sampler.take(token)
        return sampler.adjust(logits)

    expected = RepetitionPenaltyLogitsProcessor(1.4)(text, logits.unsqueeze(0).clone())[0]
    torch.testing.assert_close(adjusted(repetition_penalty=1.4), expected)
    expected = logits.index_add(0, torch.tensor(output), torch.full((2,), -1.5 - 0.5))
    torch.testing.assert_close(adjusted(frequency_penalty=1.5, presence_penalty=0.5), expected)


def test_bias_is_that_of_transformers(make_engine, model: PreTrainedModel) -> None:
    bias = ((9, 4.0), (30, -100.0), (12, 3.5))
    sequence_bias = [[[token], value] for token, value in bias]
    expected = greedy(model, GenerationConfig(max_new_tokens=40, sequence_bias=sequence_bias, eos_token_id=None))
    assert generated(make_engine, logit_bias=bias) == expected != generated(make_engine)


def test_no_end_before_min_tokens_as_in_transformers(make_engine, model: PreTrainedModel) -> None:
    ends = list(range(2, 160, 4))
    expected = greedy(model, GenerationConfig(max_new_tokens=40, min_new_tokens=15, eos_token_id=ends))
    assert generated(make_engine, stop_token_ids=tuple(ends), min_tokens=15) == expected
    assert 15 < len(expected) < 40
    assert len(generated(make_engine, stop_token_ids=tuple(ends))) < 15


@pytest.mark.parametrize(("frequency", "presence"), [(1.5, 0.0), (0.0, 2.0), (-0.5, 0.6)])
def test_penalties_are_openais_formula(make_engine, model: PreTrainedModel, frequency: float, presence: float) -> None:
    text = list(PROMPT)
    while len(text) < len(PROMPT) + 40:
        logits = logits_of(model, text)[-1].tolist()
        said = text[len(PROMPT) :]
        for token in set(said):
            logits[token] -= said.count(token) * frequency + presence
        text.append(max(range(len(logits)), key=logits.__getitem__))
    ours = generated(make_engine, frequency_penalty=frequency, presence_penalty=presence)
    assert ours == text[len(PROMPT) :] != generated(make_engine)


@pytest.mark.parametrize("drafter", ["none", "moa"])
@pytest.mark.parametrize("count", [0, 3, 20])
def test_log_probabilities_are_the_models_own(make_engine, model: PreTrainedModel, drafter: str, count: int) -> None:
    # Whatever bends the choice, what is told is what the model thinks.
    params = {"temperature": 1.2, "seed": 5, "repetition_penalty": 1.3, "logprobs": count, "prompt_logprobs": count}
    outputs = run(make_engine(N0, drafter, prefill_chunk=3), [request("r", PROMPT, max_tokens=30, **params)])["r"]
    text = [*PROMPT, *tokens({"r": outputs})["r"]]
    expected = torch.log_softmax(logits_of(model, text), dim=-1)
    assert outputs[0].prompt_logprobs is not None
    told = [*outputs[0].prompt_logprobs, *all_logprobs(outputs)]
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    assert [each.token_id for each in told] == text[1:]
    for each, row in zip(told, expected, strict=False):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
        best = row.topk(count)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [logprob for _, logprob in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_log_probabilities_end_with_the_text(make_engine) -> None:
    free = generated(make_engine)
    outputs = run(make_engine(), [request("r", PROMPT, max_tokens=40, temperature=0.0, stop_token_ids=(free[10],), logprobs=0)])[
        "r"
    ]
    assert [each.token_id for each in all_logprobs(outputs)] == tokens({"r": outputs})["r"] == free[: free.index(free[10]) + 1]


def test_a_long_text_is_scored_in_parts_as_in_one(make_engine) -> None:
    target = make_engine(N0).target
    generator = torch.Generator().manual_seed(0)
    length = 2 * LOGPROB_ROWS + 5
    hidden = torch.randn(length, target.config.hidden_size, generator=generator)
    following = torch.randint(target.config.vocab_size, (length,), generator=generator).tolist()
    with torch.inference_mode():
        parts, whole = text_logprobs(target, hidden, following, 2), token_logprobs(target.logits(hidden), following, 2)
    assert [each.token_id for each in parts] == following
    for ours, theirs in zip(parts, whole, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize("prompt", [PROMPT, [7]])
@pytest.mark.parametrize("folder", [N0, N1])
def test_a_prompt_can_be_scored_without_generating(make_engine, folder, prompt: list[int]) -> None:
    engine = make_engine(folder, "moa", max_num_seqs=2)
    requests = [request(str(n), prompt, max_tokens=limit, prompt_logprobs=0) for n, limit in enumerate((0, 3, 0))]
    outputs = run(engine, requests)
    assert [[output.finish_reason for output in outputs[name]][-1] for name in "012"] == ["length"] * 3
    assert [len(ids) for ids in tokens(outputs).values()] == [0, 3, 0]
    scores = [outputs[name][0].prompt_logprobs for name in "012"]
    assert scores[0] == scores[1] == scores[2]
    assert len(scores[0] or ()) == len(prompt) - 1


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_values_out_of_range_are_refused_by_name(params: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize("params", [{"logit_bias": ((160, 1.0),)}, {"stop_token_ids": (3, 160)}], ids=str)
def test_tokens_that_do_not_exist_are_refused(make_engine, params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="token id 160 is outside the vocabulary") as caught:
        make_engine().validate(request("r", PROMPT, **params))
    assert caught.value.param in params


def test_a_prediction_of_tokens_that_do_not_exist_is_refused(make_engine) -> None:
    with pytest.raises(InvalidRequestError, match="token id 160 is outside the vocabulary") as caught:
        make_engine().validate(replace(request("r", PROMPT), prediction=(3, 160)))
    assert caught.value.param == "prediction"


def greedy(model: PreTrainedModel, config: GenerationConfig) -> list[int]:
    config.do_sample = False
    out: Tensor = model.generate(torch.tensor([PROMPT]), generation_config=config)
    generated: list[int] = out[0, len(PROMPT) :].tolist()
    return generated


@torch.inference_mode()
def logits_of(model: PreTrainedModel, text: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([text])).logits[0]
    return logits


def all_logprobs(outputs: list[RequestOutput]) -> list[TokenLogprob]:
    return [each for output in outputs for each in output.logprobs or ()]


def test_what_a_model_says_of_sampling_is_checked_once() -> None:
    assert default_sampling({"top_k": -1, "temperature": 0.6, "num_beams": 3}) == {"top_k": 0, "temperature": 0.6}
    for wrong in ({"top_p": 0.0}, {"temperature": "warm"}, {"top_k": -2}):
        with pytest.raises(EngineLoadError, match=r"generation_config\.json"):
            default_sampling(wrong)
