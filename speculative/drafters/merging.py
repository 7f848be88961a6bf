"""One tree of a tree and of a chain that both go on from the same text: what the one foresees the other often does not."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from speculative.tree import DraftTree, children, padded


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens that may follow a text, and how likely each of them is reached."""

    tokens: list[int]
    probabilities: list[float]


@dataclass(frozen=True, slots=True)
class _Nodes:
    """A tree of one text, as in DraftTree without padding: no node is likelier than its parent, and the likeliest come first."""

    tokens: list[int]
    parents: list[int]
    probabilities: list[float]


def merged(tree: DraftTree, chains: Many[Chain | None], most: int) -> DraftTree:
    """The likeliest nodes, at most ``most`` of each text, of its tree and its chain together.

    Nodes that both have are as likely as the one says that believes in them more. ``tree`` has probabilities; texts without nodes
    stay without.
    """
    assert tree.probability_lists is not None
    texts = [
        _Nodes(tokens[:size], parents[:size], probabilities[:size])
        for tokens, parents, probabilities, size in zip(
            tree.token_lists, tree.parent_lists, tree.probability_lists, tree.sizes, strict=True
        )
    ]
    both = [
        nodes if chain is None or not nodes.tokens else _merged(nodes, chain, most)
        for nodes, chain in zip(texts, chains, strict=True)
    ]
    if all(one is other for one, other in zip(texts, both, strict=True)):
        return tree
    return padded([nodes.tokens for nodes in both], [nodes.parents for nodes in both], [nodes.probabilities for nodes in both])


def _merged(nodes: _Nodes, chain: Chain, most: int) -> _Nodes:
    """``nodes`` themselves where the chain changes nothing."""
    tokens, parents, probabilities = list(nodes.tokens), list(nodes.parents), list(nodes.probabilities)
    known = children(tokens, parents)
    least = probabilities[-1] if len(tokens) >= most else 0.0
    row, changed = 0, False
    for token, probability in zip(chain.tokens, chain.probabilities, strict=True):
        if probability <= least:
            break
        child = known.get((row, token))
        if child is None:
            tokens.append(token)
            parents.append(row)
            probabilities.append(probability)
            child, changed = len(tokens), True
        elif probability > probabilities[child - 1]:
            probabilities[child - 1], changed = probability, True
        row = child
    if not changed:
        return nodes
    # Of equally likely ones parents stand before their children already.
    kept = sorted(range(len(tokens)), key=lambda node: -probabilities[node])[:most]
    place = {0: 0} | {node + 1: row for row, node in enumerate(kept, 1)}
    return _Nodes([tokens[node] for node in kept], [place[parents[node]] for node in kept], [probabilities[node] for node in kept])
