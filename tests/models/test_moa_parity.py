"""The MoA drafter against numbers of the authors' implementation, and drafting step by step against the training forward."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.attention import cached_attention, full_attention
from models.errors import CheckpointError
from models.kv_cache import KVCache
from models.llama import Llama, TargetActivations
from models.loader import load_drafter, load_target
from models.moa import MoA
from models.saving import save_drafter
from tests.models.plain_moa import DraftActivations, plain_forward
from tests.models.plans import chain, plan

FIXTURES = Path(__file__).parents[1] / "fixtures"


@dataclass(frozen=True)
class Case:
    folder: Path
    target: Llama
    drafter: MoA
    expected: dict[str, Tensor]

    @property
    def token_ids(self) -> Tensor:
        """[2, S]"""
        return self.expected["input_ids"]

    @property
    def first_borrowed_layer(self) -> int:
        return self.target.config.num_layers - self.drafter.config.target_layer_inference

    @property
    def boundaries(self) -> Tensor:
        """[2, S]: the positions whose memory a following row may see."""
        return self.expected["response_mask"] == 0

    def activations(self) -> TargetActivations:
        return self.target.encode(self.token_ids, layer_input=self.first_borrowed_layer)

    def train_forward(self, boundaries: Tensor, activations: TargetActivations | None = None) -> DraftActivations:
        """The training forward: SA causal, CA up to the last boundary at or before a row."""
        activations = activations or self.activations()
        length = self.token_ids.shape[1]
        index = torch.arange(length)
        last_boundary = torch.where(boundaries, index, -1).cummax(dim=1).values
        sa_mask = (index[None] <= index[:, None])[None, None]
        ca_mask = (index[None, None] <= last_boundary[:, :, None])[:, None]
        return plain_forward(self.drafter, self.target, self.token_ids, activations, sa_mask, ca_mask, boundaries)


@pytest.fixture(scope="module", params=["llama-n0", "llama-n1"])
def case(request: pytest.FixtureRequest) -> Case:
    folder = FIXTURES / request.param
    target, _ = load_target(folder / "target", dtype=torch.float32)
    drafter = load_drafter(folder / "drafter", target.config, dtype=torch.float32)
    return Case(folder, target, drafter, load_file(folder / "expected.safetensors"))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("with_gradients", [False, True])
class TestParityWithTheAuthors:
    """With gradients and without, because the norms take different ways."""

    @pytest.fixture(autouse=True)
    def _gradients(self, with_gradients: bool):
        with torch.set_grad_enabled(with_gradients):
            yield

    def test_target_keys_and_values_as_lsa_reads_them(self, case: Case) -> None:
        assert_close(case.activations().kv, case.expected["target_kv"])

    def test_target_logits(self, case: Case) -> None:
        assert_close(case.target.logits(case.activations().hidden), case.expected["target_logits"])

    def test_memory(self, case: Case) -> None:
        memory = case.drafter.memory(case.expected["target_kv"].flatten(0, 1))
        assert_close(memory.view_as(case.expected["memory"]), case.expected["memory"])

    def test_draft_features(self, case: Case) -> None:
        assert_close(case.train_forward(case.boundaries).feature, case.expected["draft_features"])

    def test_draft_logits(self, case: Case) -> None:
        feature = case.train_forward(case.boundaries).feature
        assert_close(case.target.logits(feature), case.expected["draft_logits"])

    def test_losses(self, case: Case) -> None:
        """From the training forward, over response tokens, the formulas of the fixtures' README."""
        response = case.expected["response_mask"].bool()
        activations, draft = case.activations(), case.train_forward(case.boundaries)
        target_probabilities = case.target.logits(activations.hidden)[response].softmax(-1)
        forward_kl = -(target_probabilities * case.target.logits(draft.feature)[response].log_softmax(-1)).sum(-1).mean()
        feature_loss = torch.nn.functional.smooth_l1_loss(draft.feature[response], activations.hidden[response])
        assert_close(forward_kl, case.expected["forward_kl"][0])
        assert_close(feature_loss, case.expected["feature_loss"][0])
        if draft.predicted_input is not None and activations.layer_input is not None:
            input_loss = torch.nn.functional.smooth_l1_loss(draft.predicted_input[response], activations.layer_input[response])
            feature_loss = (feature_loss + input_loss) / 2
        assert_close(0.1 * forward_kl + feature_loss, case.expected["loss"][0])


def test_training_reaches_every_weight_of_the_drafter_and_none_of_the_target(case: Case) -> None:
    drafter = load_drafter(case.folder / "drafter", case.target.config, dtype=torch.float32).requires_grad_(True)
    trained = Case(case.folder, case.target, drafter, case.expected)
    case.target.logits(trained.train_forward(case.boundaries).feature).square().mean().backward()
    without = [name for name, weight in drafter.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []
    assert all(weight.grad is None for weight in case.target.parameters())


def test_gradients_agree_with_finite_differences(case: Case) -> None:
    """In-place rotary embedding and fused projections must not corrupt autograd (float64: the differences are tiny)."""
    target, _ = load_target(case.folder / "target", dtype=torch.float64)
    drafter = load_drafter(case.folder / "drafter", target.config, dtype=torch.float64).requires_grad_(True)
    double = Case(case.folder, target, drafter, case.expected)
    single = case.activations()
    layer_input = single.layer_input.double() if single.layer_input is not None else None
    activations = TargetActivations(single.kv.double(), single.hidden.double(), layer_input)

    def loss() -> Tensor:
        return target.logits(double.train_forward(case.boundaries, activations).feature).square().mean()

    loss().backward()
    generator, step = torch.Generator().manual_seed(0), 1e-6
    for part in (drafter.lsa, drafter.to_memory, drafter.sa, drafter.ca):
        weights = list(part.parameters())
        directions = [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in weights]
        expected = sum((weight.grad * way).sum().item() for weight, way in zip(weights, directions, strict=True))
        ends = []
        for distance in (step, -2 * step):  # forwards, then as far to the other side
            for weight, way in zip(weights, directions, strict=True):
                weight.data.add_(way, alpha=distance)
            ends.append(loss().item())
        for weight, way in zip(weights, directions, strict=True):
            weight.data.add_(way, alpha=step)
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(expected, rel=1e-4, abs=1e-6)


class StepwiseDrafter:
    """Drafts one token at a time with caches, as the engine does: memory of verified tokens only, SA over everything."""

    def __init__(self, case: Case, verified: list[int]) -> None:
        self.case, drafter, target = case, copy.deepcopy(case.drafter), case.target
        drafter.read_cache_layout()
        self.drafter = drafter
        config = drafter.config
        length = case.token_ids.shape[1]
        head_dim = target.config.head_dim
        self.sa_cache = KVCache(1, 1, 0, length, config.sa_num_kv_heads, head_dim, dtype=torch.float32)
        self.ca_cache = KVCache(1, 1, 0, length, config.ca_num_kv_heads, head_dim, dtype=torch.float32)
        self.target_cache = target.new_cache(1, 0, length)
        drafter.rotary.reserve(length, drafter.to_memory.weight)
        self.verified = 0
        # In two pieces, as by a prefill and a verification: memory is written once and never revised.
        self.verify(verified[: len(verified) // 2])
        self.verify(verified[len(verified) // 2 :])

    def verify(self, tokens: list[int]) -> None:
        drafter, target = self.drafter, self.case.target
        first, self.verified = self.verified, self.verified + len(tokens)
        token_ids, positions = torch.tensor(tokens), torch.arange(first, self.verified)
        target(token_ids, plan(self.target_cache, target.config.groups, [chain(first, len(tokens))]), self.target_cache)
        rope = drafter.rotary(positions)
        memory = drafter.memory(self.target_cache.gather(positions))
        self.ca_cache.write(0, positions, drafter.cross_keys_values(memory, rope))
        self.sa_cache.write(0, positions, drafter.self_keys_values(target.embed(token_ids), rope))

    def draft(self, token: int, position: int) -> Tensor:
        """The token at ``position`` -> drafter logits [V] for the next one."""
        drafter, target = self.drafter, self.case.target
        heads = target.config.num_heads
        step = plan(self.sa_cache, heads // self.sa_cache.num_kv_heads, [chain(position, 1)])
        rope = drafter.rotary(step.positions)
        hidden = drafter.sa(target.embed(torch.tensor([token])), rope, cached_attention(self.sa_cache, 0, step, heads))
        queries = drafter.cross_queries(hidden, rope).unsqueeze(0)
        keys, values = (x.transpose(1, 2) for x in self.ca_cache.read(0, 0, 1, self.verified))
        hidden = drafter.ca.finish(hidden, full_attention(queries, keys, values, None).flatten(0, 1))
        if drafter.config.target_layer_inference:
            step = plan(self.target_cache, target.config.groups, [chain(position, 1)])
            hidden = target.run_layers(hidden, step, self.target_cache, first_layer=self.case.first_borrowed_layer)
        return target.logits(hidden)[0]


@torch.inference_mode()
@pytest.mark.parametrize("sequence", [0, 1])
@pytest.mark.parametrize("verified", [6, 17])
def test_drafting_step_by_step_equals_the_training_forward(case: Case, sequence: int, verified: int) -> None:
    tokens = case.token_ids[sequence].tolist()
    boundaries = (torch.arange(len(tokens)) < verified).expand_as(case.token_ids)
    expected = case.target.logits(case.train_forward(boundaries).feature[sequence])
    drafter = StepwiseDrafter(case, tokens[:verified])
    for position in range(verified, len(tokens)):
        assert_close(drafter.draft(tokens[position], position), expected[position])


@torch.inference_mode()
@pytest.mark.parametrize("sequence", [0, 1])
def test_drafting_after_the_prompt_gives_the_authors_logits(case: Case, sequence: int) -> None:
    tokens = case.token_ids[sequence].tolist()
    response = case.expected["response_mask"][sequence].tolist()
    start = response.index(1)
    drafter = StepwiseDrafter(case, tokens[:start])
    for position in range(start, response.index(0, start)):
        assert_close(drafter.draft(tokens[position], position), case.expected["draft_logits"][sequence, position])


class TestDrafterFiles:
    @pytest.mark.parametrize("max_shard", ["15MB", "40KB"])
    def test_a_saved_drafter_is_loaded_unchanged(self, case: Case, tmp_path: Path, max_shard: str) -> None:
        save_drafter(case.drafter, tmp_path / "copy", dtype=torch.float32, max_shard=max_shard)
        copy = load_drafter(tmp_path / "copy", case.target.config, dtype=torch.float32)
        assert copy.config == case.drafter.config
        for name, weight in case.drafter.state_dict().items():
            assert torch.equal(copy.state_dict()[name], weight), name

    def test_a_saved_drafter_has_the_tensors_of_the_published_layout(self, case: Case, tmp_path: Path) -> None:
        save_drafter(case.drafter, tmp_path, dtype=torch.float32)
        saved, published = load_file(tmp_path / "model.safetensors"), load_file(case.folder / "drafter" / "model.safetensors")
        assert saved.keys() == published.keys()
        for name, tensor in published.items():
            assert torch.equal(saved[name], tensor), name

    def test_a_saved_config_keeps_the_published_sizes(self, case: Case, tmp_path: Path) -> None:
        save_drafter(case.drafter, tmp_path, dtype=torch.float32)
        saved = json.loads((tmp_path / "config.json").read_text())
        published = json.loads((case.folder / "drafter" / "config.json").read_text())
        assert {key: published[key] for key in saved} == saved

    def test_drafters_are_saved_as_bfloat16_by_default(self, case: Case, tmp_path: Path) -> None:
        save_drafter(case.drafter, tmp_path)
        assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}

    def test_names_under_a_wrapping_model_are_understood(self, case: Case, tmp_path: Path) -> None:
        published = load_file(case.folder / "drafter" / "model.safetensors")
        save_file({f"model.{name}": tensor for name, tensor in published.items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((case.folder / "drafter" / "config.json").read_bytes())
        loaded = load_drafter(tmp_path, case.target.config, dtype=torch.float32)
        for name, weight in case.drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], weight), name

    def test_a_drafter_for_another_target_is_refused(self, case: Case) -> None:
        other = {"llama-n0": "llama-n1", "llama-n1": "llama-n0"}[case.folder.name]
        with pytest.raises(CheckpointError):
            load_drafter(FIXTURES / other / "drafter", case.target.config, dtype=torch.float32)

    def test_a_target_is_not_a_drafter(self, case: Case) -> None:
        with pytest.raises(CheckpointError, match="not a MoA drafter"):
            load_drafter(case.folder / "target", case.target.config, dtype=torch.float32)
