from collections.abc import Iterator

import pytest
import torch

from speculative.drafters.growth import Candidates, Frontier, Sampling, best_tree, grow, perturb, seeing_themselves

SCRATCH = 16


def planted(batch: int) -> tuple[Candidates, Frontier]:
    scores, numbers = torch.zeros(batch, 1), torch.zeros(batch, 1, dtype=torch.long)
    roots = torch.arange(batch).unsqueeze(1) + 100
    mask = torch.full((batch, 1, SCRATCH), float("-inf"))
    mask[..., 0] = 0.0
    return Candidates(scores, roots, numbers), Frontier(roots, scores, numbers, mask)


def levels(depth: int, breadth: int, log_probs: torch.Tensor) -> Iterator[tuple[Candidates, Frontier, torch.Tensor]]:
    """Trees as they grow when every node's candidates have the same log-probabilities and the tokens 0, 1, …"""
    batch, count = log_probs.shape
    grown, frontier = planted(batch)
    row = 0
    for _ in range(depth):
        width = frontier.tokens.shape[1]
        each = log_probs.unsqueeze(1).expand(-1, width, -1)
        ids = torch.arange(count).expand(each.shape)
        grown, frontier, reach = grow(frontier, grown, each, ids, breadth)
        row += width
        frontier = seeing_themselves(frontier, torch.tensor([row]))
        yield grown, frontier, reach


def test_nodes_see_their_ancestors_and_themselves() -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    (_, first, _), (_, second, _) = levels(2, 2, log_probs)
    # Row 0 is the root's; the first level's two nodes have rows 1 and 2, the second's 3 and 4.
    assert [(row == 0).nonzero().flatten().tolist() for row in first.inherited[0]] == [[0, 1], [0, 2]]
    # The best paths are 0-0 (0.25) and 0-1 or 1-0 (0.15).
    assert second.tokens[0, 0] == 0
    assert (second.inherited[0, 0] == 0).nonzero().flatten().tolist() == [0, 1, 3]
    assert (second.inherited[0, 1] == 0).nonzero().flatten().tolist() in ([0, 1, 4], [0, 2, 4])


def test_reach_is_the_probability_of_the_frontier() -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]]).log()
    (_, _, first), (_, _, second) = levels(2, 2, log_probs)
    assert float(first) == pytest.approx((0.8 + 1.0) / 2, abs=2e-3)
    assert float(second) == pytest.approx((0.25 + 0.15 + 0.81 + 0.09) / 2, abs=4e-3)


@pytest.mark.parametrize("nodes", [1, 4, 9])
@pytest.mark.parametrize("probs", [[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
def test_the_best_candidates_form_a_tree(nodes: int, probs: list[float]) -> None:
    *_, (grown, _, _) = levels(4, 3, torch.tensor([probs, probs[::-1]]).log())
    tokens, parents, probabilities = best_tree(grown, torch.arange(nodes + 1))
    assert tokens.shape == parents.shape == probabilities.shape == (2, nodes)
    assert (probabilities.diff() <= 0).all()
    assert (parents >= 0).all() and (parents <= torch.arange(nodes)).all()
    for sequence in range(2):
        children = list(zip(parents[sequence].tolist(), tokens[sequence].tolist(), strict=True))
        assert len(set(children)) == nodes


def test_certain_candidates_make_a_chain() -> None:
    *_, (grown, _, _) = levels(4, 3, torch.tensor([[1.0, 0.0, 0.0]]).log())
    tokens, parents, probabilities = best_tree(grown, torch.arange(5))
    torch.testing.assert_close(probabilities, torch.ones(1, 4), atol=0.01, rtol=0)
    assert tokens.tolist() == [[0, 0, 0, 0]]
    assert parents.tolist() == [[0, 1, 2, 3]]


def sampling(**settings: float) -> Sampling:
    values = {"greedy": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    return Sampling(torch.tensor([11]), *(torch.tensor([values[name]]) for name in Sampling._fields[1:]))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"top_k": 2}, 2), ({"top_p": 0.6}, 2), ({"min_p": 0.5}, 2), ({"top_k": 1, "temperature": 0.1}, 1), ({}, 4)],
)
def test_only_tokens_that_sampling_allows_are_likely(settings: dict[str, float], kept: int) -> None:
    logits = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log()
    ids = torch.tensor([[[7, 5, 3, 1]]])
    log_probs, chosen = perturb(logits, ids, torch.tensor([9]), sampling(**settings), torch.ones(1), 4)
    assert int(log_probs.isfinite().sum()) == kept
    assert set(chosen[log_probs.isfinite()].tolist()) == set(ids[0, 0, :kept].tolist())


def test_greedy_sequences_get_no_noise() -> None:
    logits = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)).sort(descending=True).values
    ids = torch.arange(8).expand(1, 3, 8)
    log_probs, chosen = perturb(logits, ids, torch.tensor([9]), sampling(greedy=True), torch.ones(1), 4)
    assert torch.equal(chosen, ids[..., :4])
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[..., :4])


def test_a_lower_draft_temperature_sharpens() -> None:
    logits, ids = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log(), torch.arange(4).view(1, 1, 4)
    plain, _ = perturb(logits, ids, torch.tensor([9]), sampling(greedy=True), torch.ones(1), 4)
    sharp, _ = perturb(logits, ids, torch.tensor([9]), sampling(greedy=True), torch.tensor([0.5]), 4)
    torch.testing.assert_close(sharp, (2 * plain).log_softmax(-1))
