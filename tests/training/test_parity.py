"""The training pass and its losses against the authors' numbers, in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.config import MoAConfig
from models.llama import Llama
from models.loader import load_drafter, load_target
from models.moa import MoA
from tests.models.plain_moa import plain_forward
from training.forward import DraftForward, DraftRows
from training.losses import draft_loss
from training.masks import cross_attention_mask, proposing_positions, self_attention_mask, verification_boundaries

FIXTURES = Path(__file__).parents[1] / "fixtures"


class Reference:
    """A target, its drafter, the authors' numbers, and our forward pass at wanted positions."""

    def __init__(self, name: str) -> None:
        folder = FIXTURES / name
        self.expected = load_file(folder / "expected.safetensors")
        self.target: Llama = load_target(folder / "target", dtype=torch.float32)[0]
        self.drafter: MoA = load_drafter(folder / "drafter", self.target.config, dtype=torch.float32).requires_grad_(True)
        self.response = self.expected["response_mask"].bool()
        self.boundaries = ~self.response
        inferred = self.drafter.config.target_layer_inference
        self.truth = self.target.encode(
            self.expected["input_ids"], layer_input=self.target.config.num_layers - inferred if inferred else None
        )
        self.arguments = (
            self.target,
            self.expected["input_ids"],
            self.truth,
            self_attention_mask(self.boundaries, torch.zeros(len(self.response), dtype=torch.bool)),
            cross_attention_mask(self.boundaries),
            self.boundaries,
        )

    def draft(self, wanted: Tensor) -> DraftRows:
        rows: DraftRows = DraftForward(self.drafter)(*self.arguments, wanted)
        return rows


@pytest.fixture(params=["llama-n0", "llama-n1"])
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param)


def test_features_and_logits_at_all_positions(reference: Reference):
    expected = reference.expected
    draft = reference.draft(torch.ones_like(reference.response))
    torch.testing.assert_close(draft.feature, expected["draft_features"].flatten(0, 1), atol=1e-4, rtol=0)
    torch.testing.assert_close(reference.target.logits(draft.feature), expected["draft_logits"].flatten(0, 1), atol=1e-4, rtol=0)


def test_losses_over_response_positions(reference: Reference):
    expected = reference.expected
    rows = reference.response.flatten().nonzero().squeeze(1)
    loss = draft_loss(
        reference.target.lm_head.weight,
        reference.truth,
        reference.draft(reference.response),
        rows,
        kl_weight=0.1,
        feature_weight=1.0,
    )
    for ours, theirs in (
        (loss.loss, "loss"),
        (loss.parts["kl"].value, "forward_kl"),
        (loss.parts["feature"].value, "feature_loss"),
    ):
        torch.testing.assert_close(ours.reshape(1), expected[theirs], atol=1e-4, rtol=0)


def test_agreement_is_where_the_best_tokens_are_equal(reference: Reference):
    expected, response = reference.expected, reference.response
    rows = response.flatten().nonzero().squeeze(1)
    loss = draft_loss(
        reference.target.lm_head.weight,
        reference.truth,
        reference.draft(response),
        rows,
        kl_weight=1.0,
        feature_weight=0.0,
        agreement=True,
    )
    assert loss.correct is not None
    assert torch.equal(loss.correct, (expected["draft_logits"].argmax(-1) == expected["target_logits"].argmax(-1))[response])


def test_gradients_equal_those_of_the_plain_forward_pass(reference: Reference):
    """Chunks, wanted rows and gradients found ahead change nothing: a plain pass and textbook losses give the same."""
    response, target, drafter, truth = reference.response, reference.target, reference.drafter, reference.truth
    rows = response.flatten().nonzero().squeeze(1)
    draft_loss(target.lm_head.weight, truth, reference.draft(response), rows, kl_weight=0.3, feature_weight=0.7).loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters() if parameter.grad is not None}
    drafter.zero_grad()

    plain = plain_forward(drafter, *reference.arguments)
    logits, hidden = target.logits(plain.feature[response]), truth.hidden[response]
    kl = -(target.logits(hidden).softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    smooth = torch.nn.functional.smooth_l1_loss(plain.feature[response], hidden)
    if plain.predicted_input is not None and truth.layer_input is not None:
        predicted = torch.nn.functional.smooth_l1_loss(plain.predicted_input[response], truth.layer_input[response])
        smooth = (smooth + predicted) / 2
    (0.3 * kl + 0.7 * smooth).backward()
    assert ours.keys() == {name for name, _ in drafter.named_parameters()}
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


# Drafters of other sizes are fresh ones, which infer no layers of the target.
@pytest.mark.parametrize(
    ("reference", "sizes"),
    [
        ("llama-n0", {}),
        ("llama-n0", {"has_entry": True}),
        ("llama-n0", {"has_entry": True, "draft_block_size": 13}),
        ("llama-n0", {"has_entry": True, "paired": True}),
        ("llama-n0", {"has_entry": True, "paired": True, "draft_block_size": 13}),
        ("llama-n1", {}),
    ],
    indirect=["reference"],
    ids=str,
)
def test_several_draws_of_boundaries_are_as_many_passes(reference: Reference, sizes: dict[str, int]):
    torch.manual_seed(0)
    moa = MoA(MoAConfig.from_target(reference.target.config, **sizes)) if sizes else reference.drafter
    proposing = proposing_positions(reference.response)

    def draft(*intervals: int) -> tuple[DraftRows, Tensor]:
        draws = proposing.repeat(len(intervals), 1)
        each = torch.tensor(intervals).repeat_interleave(len(proposing))
        boundaries = verification_boundaries(draws, each)
        stairs = each > 4
        wanted = draws & ~boundaries
        masks = self_attention_mask(boundaries, stairs), cross_attention_mask(boundaries)
        rows: DraftRows = DraftForward(moa)(
            reference.target, reference.expected["input_ids"], reference.truth, *masks, boundaries, wanted
        )
        return rows, wanted

    together, wanted = draft(3, 7)
    parts = [draft(3)[0], draft(7)[0]]
    assert len(together.feature) == wanted.sum() > 0
    torch.testing.assert_close(together.feature, torch.cat([part.feature for part in parts]), atol=1e-5, rtol=1e-5)
    if together.predicted_input is not None:
        predicted = [part.predicted_input for part in parts if part.predicted_input is not None]
        torch.testing.assert_close(together.predicted_input, torch.cat(predicted), atol=1e-5, rtol=1e-5)
