"""What an edge holds of a target and its drafter: enough to draft for a server that runs the target.

Left to the server: the target's layers, and all that makes memory and what cross-attention reads of it (LSA and its projection,
what an entry reads of the target, CA's keys and values). Their results come over the network. Borrowed layers would be the
target's, so such a drafter (N > 0) cannot be split.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.block import block_head
from models.config import DecoderConfig, MoAConfig
from models.entry import TokenEntry
from models.errors import CheckpointError
from models.layers import DecoderLayer, Linear, RMSNorm, RotaryTable
from models.llama import Llama
from models.moa import DraftingMoA, MoA


class EdgeTarget(nn.Module):
    """A target's two ends, its embeddings and its LM head; tied they are one table."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Linear(config.hidden_size, config.vocab_size)
        self.lm_head = self.embedding if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of embeddings and logits."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def embeddings(self) -> Tensor:
        """Of all tokens [V, E]."""
        return self.embedding.weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., E]."""
        return self.embedding.rows(token_ids)

    def head_over(self, vocabulary: Tensor | None) -> Linear:
        """As in Llama."""
        return self.lm_head if vocabulary is None else self.lm_head.select(vocabulary)


class EdgeMoA(DraftingMoA):
    """A drafter without what makes memory; its CA has no keys and values of its own."""

    def __init__(self, config: MoAConfig) -> None:
        super().__init__()
        if config.target_layer_inference:
            raise CheckpointError(
                f"this drafter runs through the target's last {config.target_layer_inference} layers (target_layer_inference), "
                "which an edge does not hold: only drafters with N = 0 can draft there"
            )
        self.config = config
        target = config.target
        size, heads, head_dim, eps = target.hidden_size, target.num_heads, target.head_dim, target.rms_norm_eps
        self.sa = DecoderLayer(size, heads, config.sa_num_kv_heads, head_dim, config.sa_intermediate_size, eps)
        self.ca = DecoderLayer(size, heads, 0, head_dim, config.ca_intermediate_size, eps)
        self.entry = TokenEntry(size, eps, paired=config.paired) if config.has_entry else None
        self.block = block_head(config)
        self.output_norm = RMSNorm(size, eps) if config.normalises_output else None
        self.draft_vocabulary = None
        self.rotary = RotaryTable(head_dim, config.rope)


class EdgeNetworks(nn.Module):
    """Both, which is what a bundle holds."""

    def __init__(self, target: DecoderConfig, drafter: MoAConfig) -> None:
        super().__init__()
        self.target, self.drafter = EdgeTarget(target), EdgeMoA(drafter)


def edge_weights(target: Llama, drafter: MoA) -> dict[str, Tensor]:
    """The weights of ``EdgeNetworks`` by name, cut out of the whole networks; those shared by two places stand under both."""
    with torch.device("meta"):
        parts = EdgeNetworks(target.config, drafter.config)
    weights = {"target.embedding.weight": target.embedding.weight, "target.lm_head.weight": target.lm_head.weight}
    whole = drafter.state_dict()
    for name, part in parts.drafter.state_dict().items():
        # Queries come first, then keys and values.
        weights[f"drafter.{name}"] = whole[name][: drafter.ca.q_size] if name.startswith("ca.qkv.") else whole[name]
        assert weights[f"drafter.{name}"].shape == part.shape
    return {name: weight.detach() for name, weight in weights.items()}
