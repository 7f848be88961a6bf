from math import isnan

import pytest
import torch

from speculative.tree import DraftTree, ancestors
from speculative.verification import verify_tree


def test_ancestors_written_out() -> None:
    #      0 (root)
    #     / \
    #    1   2
    #   / \    \
    #  3   4    5
    #  |
    #  6
    tree = DraftTree(torch.tensor([[9, 8, 7, 6, 5, 4]]), torch.tensor([[0, 0, 1, 1, 2, 3]]), (6,))
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 0, 1],
    ]
    assert ancestors(tree.parents, tree.num_rows - 1)[0].int().tolist() == expected


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 31, 62])
def test_a_chain_sees_all_before_it(nodes: int) -> None:
    tree = DraftTree.from_chains([list(range(nodes))])
    assert torch.equal(ancestors(tree.parents, tree.num_rows - 1)[0], torch.ones(nodes + 1, nodes + 1).tril().bool())


def test_chains_of_different_lengths_are_padded_under_the_root() -> None:
    tree = DraftTree.from_chains([[5, 6, 7], [], [8]])
    assert tree.sizes == (3, 0, 1)
    assert tree.parents.tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0]]
    assert tree.num_rows == 4


def test_no_chains_make_an_empty_tree() -> None:
    assert DraftTree.from_chains([[], []]).num_rows == 1


def choices(*tokens: int):
    return lambda row: tokens[row]


def test_the_walk_follows_the_targets_choices_to_the_bonus_token() -> None:
    # Rows: 0 root; 1 "a"=10, 2 "b"=11 under the root; 3 "c"=12 under row 2.
    acceptance = verify_tree([10, 11, 12], [0, 0, 2], choices(11, 99, 12, 13), limit=100)
    assert acceptance.rows == (2, 3)
    assert acceptance.tokens == (11, 12, 13)


def test_without_a_matching_child_only_the_bonus_token_is_gained() -> None:
    acceptance = verify_tree([10, 11], [0, 0], choices(5, 6, 7), limit=100)
    assert (acceptance.rows, acceptance.tokens) == ((), (5,))


def test_a_child_of_another_parent_is_not_taken() -> None:
    acceptance = verify_tree([10, 11, 12], [0, 0, 1], choices(11, 0, 12, 0), limit=100)
    assert (acceptance.rows, acceptance.tokens) == ((2,), (11, 12))


def test_the_walk_stops_at_the_limit() -> None:
    acceptance = verify_tree([1, 2, 3], [0, 1, 2], choices(1, 2, 3, 4), limit=2)
    assert (acceptance.rows, acceptance.tokens) == ((1,), (1, 2))


def test_of_equal_siblings_the_first_is_taken() -> None:
    assert verify_tree([4, 4], [0, 0], choices(4, 5, 6), limit=9).rows == (1,)


def test_trees_are_the_same_in_lists_and_tensors() -> None:
    tokens, parents, known = [[9, 8, 7], [6, 5, 0]], [[0, 0, 1], [0, 1, 0]], [[0.5, 0.25, 0.125], [1.0, 0.5, 0.0]]
    listed = DraftTree(tokens, parents, (3, 2), (), known)
    made = DraftTree(torch.tensor(tokens), torch.tensor(parents), (3, 2), (), torch.tensor(known))
    for tree in (listed, made):
        assert tree.num_rows == 4 and tree.tokens.dtype == tree.parents.dtype == torch.long
        assert (tree.token_lists, tree.parent_lists, tree.probability_lists) == (tokens, parents, known)
        assert tree.probabilities is not None and tree.probabilities.dtype == torch.float32
        assert (tree.tokens.tolist(), tree.parents.tolist(), tree.probabilities.tolist()) == (tokens, parents, known)
        first = tree.cut(2)
        assert (
            first.sizes == (2, 2) and first.token_lists == [[9, 8], [6, 5]] and first.probability_lists == [[0.5, 0.25], [1.0, 0.5]]
        )
        second = tree.only([1])
        assert second.sizes == (2,) and second.tokens.tolist() == [[6, 5, 0]] and second.probability_lists == [[1.0, 0.5, 0.0]]


def test_the_empty_tree_has_tensors_of_no_columns() -> None:
    assert DraftTree.empty(2).tokens.shape == DraftTree.empty(2).parents.shape == (2, 0)
    assert DraftTree.from_chains([[], []]).tokens.shape == (2, 0)


def test_other_trees_take_the_place_of_some() -> None:
    tree = DraftTree([[9, 8, 7], [6, 5, 0]], [[0, 0, 1], [0, 1, 0]], (3, 2), (), [[0.5, 0.25, 0.125], [1.0, 0.5, 0.0]])
    mixed = tree.with_trees([None, ([1, 2, 3, 4], [0, 0, 2, 3])])
    assert (
        mixed.sizes == (3, 4)
        and mixed.token_lists == [[9, 8, 7, 0], [1, 2, 3, 4]]
        and mixed.parent_lists == [[0, 0, 1, 0], [0, 0, 2, 3]]
    )
    assert mixed.probability_lists is not None and mixed.probability_lists[0] == [0.5, 0.25, 0.125, 0.0]
    assert all(isnan(each) for each in mixed.probability_lists[1])
