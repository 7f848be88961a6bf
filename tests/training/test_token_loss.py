"""Gradients found chunk by chunk on the way forward are those of the textbook's formula."""

import pytest
import torch
import torch.nn.functional as F

from training.choices import TokenLossKind
from training.token_loss import distribution, token_loss


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.token_loss.CHUNK_ROWS", 3)
    torch.manual_seed(0)


def textbook(kind: TokenLossKind, wanted: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Losses of rows, from the wanted distributions and our logits."""
    if kind == "kl":
        return -(wanted * ours.log_softmax(-1)).sum(-1)
    overlap = torch.minimum(wanted, ours.softmax(-1)).sum(-1)
    return 1 - overlap if kind == "tv" else -overlap.log()


@pytest.mark.parametrize("kind", ["kl", "tv", "lk"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_against_a_distribution(kind: TokenLossKind, temperature: float, weighted: bool):
    head, hidden = torch.randn(20, 8), torch.randn(10, 8)
    features, weight = torch.randn(10, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    weights = torch.rand(10) if weighted else None
    ours = token_loss(weight, features, distribution(head, hidden, temperature), weights, kind=kind, agreement=True)
    losses = textbook(kind, (hidden @ head.T / temperature).softmax(-1), features @ weight.T)
    whole = losses.mean() if weights is None else (losses * weights).sum() / weights.sum()
    torch.testing.assert_close(ours.mean, whole)
    torch.testing.assert_close(ours.losses, losses)
    assert torch.equal(ours.correct, (hidden @ head.T).argmax(-1) == (features @ weight.T).argmax(-1))
    given = torch.autograd.grad(2 * ours.mean, [features, weight])
    torch.testing.assert_close(given, torch.autograd.grad(2 * whole, [features, weight]))


def test_against_labels():
    features, weight = torch.randn(10, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.randint(0, 20, (10,))
    ours = token_loss(weight, features, lambda rows: labels[rows], agreement=True)
    whole = F.cross_entropy(features @ weight.T, labels)
    torch.testing.assert_close(ours.mean, whole)
    assert torch.equal(ours.correct, (features @ weight.T).argmax(-1) == labels)
    given = torch.autograd.grad(3 * ours.mean, [features, weight])
    torch.testing.assert_close(given, torch.autograd.grad(3 * whole, [features, weight]))


def test_a_frozen_head_gets_no_gradient_and_agreement_only_when_asked():
    features, weight = torch.randn(4, 8, requires_grad=True), torch.randn(20, 8)
    ours = token_loss(weight, features, distribution(weight, torch.randn(4, 8)))
    ours.mean.backward()
    assert weight.grad is None and features.grad is not None and not len(ours.correct)


def test_no_rows_give_no_loss_and_no_gradient():
    features = torch.zeros(0, 8, requires_grad=True)
    loss = token_loss(torch.eye(8), features, distribution(torch.eye(8), torch.zeros(0, 8)))
    loss.mean.backward()
    assert loss.mean == 0
