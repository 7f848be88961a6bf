"""A tree and a chain made one tree."""

from __future__ import annotations

import random

import pytest
import torch

from speculative.drafters.merging import Chain, merged
from speculative.tree import DraftTree

Paths = dict[tuple[int, ...], float]


def tree_of(*texts: tuple[list[int], list[int], list[float]]) -> DraftTree:
    width = max(len(tokens) for tokens, _, _ in texts)
    padded = [[[*row, *[0] * (width - len(row))] for row in text] for text in texts]
    tokens, parents = (torch.tensor([text[kind] for text in padded]) for kind in (0, 1))
    probabilities = torch.tensor([text[2] for text in padded], dtype=torch.float32)
    return DraftTree(tokens, parents, tuple(len(tokens) for tokens, _, _ in texts), probabilities=probabilities)


def paths(tree: DraftTree, index: int = 0) -> Paths:
    """What leads to each node, and how likely it is; parents must stand before their children."""
    assert tree.probabilities is not None
    found: list[tuple[int, ...]] = [()]
    for node in range(tree.sizes[index]):
        parent = int(tree.parents[index, node])
        assert parent <= node
        found.append((*found[parent], int(tree.tokens[index, node])))
    return dict(zip(found[1:], tree.probabilities[index].tolist(), strict=False))


def test_what_both_foresee_is_as_likely_as_the_more_certain_says_and_goes_on() -> None:
    tree = tree_of(([5, 6, 7], [0, 1, 0], [0.6, 0.4, 0.2]))
    both = merged(tree, [Chain([5, 8, 9], [0.7, 0.5, 0.3])], 8)
    assert paths(both) == pytest.approx({(5,): 0.7, (5, 8): 0.5, (5, 6): 0.4, (5, 8, 9): 0.3, (7,): 0.2})
    assert both.tokens.tolist() == [[5, 8, 6, 9, 7]], "the likeliest first"


def test_the_least_likely_nodes_make_room() -> None:
    tree = tree_of(([5, 6, 7], [0, 1, 0], [0.6, 0.4, 0.2]))
    assert paths(merged(tree, [Chain([8, 9], [0.5, 0.3])], 3)) == pytest.approx({(5,): 0.6, (8,): 0.5, (5, 6): 0.4})


def test_a_chain_that_adds_nothing_leaves_a_tree_as_it_is() -> None:
    tree = tree_of(([5, 6, 7], [0, 1, 0], [0.6, 0.4, 0.2]))
    assert merged(tree, [Chain([8, 9], [0.2, 0.1])], 3) is tree
    assert merged(tree, [Chain([5, 6], [0.5, 0.3])], 8) is tree
    assert merged(tree, [None], 8) is tree


def test_texts_are_merged_each_with_its_own() -> None:
    tree = tree_of(([5, 6], [0, 1], [0.6, 0.4]), ([], [], []), ([7, 8], [0, 0], [0.5, 0.4]))
    both = merged(tree, [Chain([9], [0.5]), Chain([9], [0.5]), None], 8)
    assert both.sizes == (3, 0, 2)
    assert paths(both, 0) == pytest.approx({(5,): 0.6, (9,): 0.5, (5, 6): 0.4})
    assert paths(both, 2) == pytest.approx({(7,): 0.5, (8,): 0.4})
    assert both.parents[2].tolist() == [0, 0, 0], "padding hangs at the root"


def test_of_all_paths_the_likeliest_stay() -> None:
    """Against the same by dictionaries of paths, of random trees and chains."""
    numbers = random.Random(0)
    for _ in range(200):
        most, ours = numbers.randint(1, 12), {(): 1.0}
        while len(ours) <= most:
            above = numbers.choice(list(ours))
            ours.setdefault((*above, numbers.randrange(4)), ours[above] * numbers.uniform(0.2, 0.95))
        ranked = sorted(list(ours)[1:], key=lambda path: -ours[path])
        rows = {(): 0} | {path: row for row, path in enumerate(ranked, 1)}
        tree = tree_of(([path[-1] for path in ranked], [rows[path[:-1]] for path in ranked], [ours[path] for path in ranked]))
        likely, length = numbers.uniform(0.2, 0.95), numbers.randint(1, 6)
        chain = Chain([numbers.randrange(4) for _ in range(length)], [likely**further for further in range(1, length + 1)])
        theirs = {tuple(chain.tokens[: end + 1]): chain.probabilities[end] for end in range(length)}
        union = {path: max(ours.get(path, 0.0), theirs.get(path, 0.0)) for path in [*ranked, *theirs]}
        best = sorted(union, key=lambda path: -union[path])[:most]
        assert paths(merged(tree, [chain], most)) == pytest.approx({path: union[path] for path in best})
