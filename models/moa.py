"""The Mixture-of-Attentions drafter (arXiv 2410.03804): one class for training and serving.

Layer self-attention (LSA) summarises the target's keys and values of a verified token into its *memory*; self-attention (SA) reads
token embeddings; cross-attention (CA) asks memory. What leaves CA enters the target's LM head (N = 0) or stands for the input of
the target's layer L−N and runs through its last N layers first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import masked_attention
from models.block import BlockHead, block_head
from models.config import MoAConfig
from models.entry import Entry, PairedEntry, TokenEntry
from models.kv_cache import lsa_layout
from models.layers import Attend, DecoderLayer, Linear, RMSNorm, Rope, RotaryTable, keys_values, queries


class DraftingMoA(nn.Module):
    """What of a drafter drafts, given memory: SA, CA's queries, and what else it may have. Subclasses say which of it they hold.

    ``draft_vocabulary`` [K] holds the token ids that are proposed when drafting, besides those of the text itself; None stands for
    all: a head over frequent tokens costs a fraction of the target's. Training always sees the whole vocabulary.
    """

    config: MoAConfig
    sa: DecoderLayer
    ca: DecoderLayer
    entry: TokenEntry | None
    block: BlockHead | None
    output_norm: RMSNorm | None
    draft_vocabulary: Tensor | None
    rotary: RotaryTable

    def start(self, embeddings: Tensor, previous: Tensor | None, newest: Tensor | None) -> Tensor:
        """The residual stream of drafted positions [n, E]: their embeddings, or by an entry, with their ``newest`` memory.

        Where memory is paired, also with the embeddings ``previous`` to theirs; all [n, E].
        """
        if self.entry is None:
            return embeddings
        assert newest is not None
        return self.entry.of_tokens(embeddings, previous) + newest

    def self_keys_values(self, embeddings: Tensor, rope: Rope) -> Tensor:
        """Token embeddings [n, E] -> SA's rotated keys and its values [n, 2·n_kv·d].

        SA is one layer over embeddings, so a token's keys and values depend on nothing but itself and its position.
        """
        return keys_values(self.sa, embeddings, rope)

    def attend_to_tokens(
        self, embeddings: Tensor, previous: Tensor | None, newest: Tensor | None, rope: Rope, attend: Attend
    ) -> Tensor:
        """SA on drafted positions: their embeddings, and what ``start`` needs, [n, E] -> [n, E]."""
        attended = attend(*self.sa.project(self.sa.input_norm(embeddings), rope))
        return self.sa.finish(self.start(embeddings, previous, newest), attended)

    def cross_queries(self, x: Tensor, rope: Rope) -> Tensor:
        """SA's output [n, E] -> CA's rotated queries [n, h, d]."""
        return queries(self.ca, x, rope)

    def leave(self, x: Tensor, attended: Tensor) -> Tensor:
        """SA's output [n, E] and what CA attended to [n, h·d] -> what enters the head, a block or borrowed layers [n, E]."""
        out = self.ca.finish(x, attended)
        return out if self.output_norm is None else self.output_norm(out)


class MoA(DraftingMoA):
    """LSA, SA and CA. Embeddings, LM head and borrowed layers belong to the target and are passed in."""

    entry: Entry | None

    def __init__(self, config: MoAConfig) -> None:
        super().__init__()
        self.config = config
        target = config.target
        heads, eps, kv_size = target.num_heads, target.rms_norm_eps, target.kv_size
        self.lsa: DecoderLayer | None = None
        if config.reads_all_layers:
            self.lsa = DecoderLayer(kv_size, heads, config.lsa_num_kv_heads, kv_size // heads, config.lsa_intermediate_size, eps)
        self.to_memory = Linear(kv_size, target.hidden_size, bias=True)
        self.sa = DecoderLayer(target.hidden_size, heads, config.sa_num_kv_heads, target.head_dim, config.sa_intermediate_size, eps)
        self.ca = DecoderLayer(target.hidden_size, heads, config.ca_num_kv_heads, target.head_dim, config.ca_intermediate_size, eps)
        self.entry = (PairedEntry if config.paired else Entry)(target.hidden_size, eps) if config.has_entry else None
        self.output_norm = RMSNorm(target.hidden_size, eps) if config.normalises_output else None
        self.block = block_head(config)
        self.draft_vocabulary = None
        self.reads_cache_layout = False
        self.rotary = RotaryTable(target.head_dim, config.rope)
        self.layer_rotary = RotaryTable(kv_size // heads, config.rope)
        self._layer_ropes: Rope = (torch.empty(0), torch.empty(0))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.to_memory.weight.dtype

    @torch.no_grad()
    def read_cache_layout(self) -> None:
        """For serving: let ``memory`` take keys and values as caches hold them (k0 k1 … v0 v1 …), not as LSA was trained on them.

        LSA's weights are put in that order once, instead of every token's layers.
        """
        if self.reads_cache_layout:
            return
        target, lsa, weight = self.config.target, self.lsa, self.to_memory.weight
        order = lsa_layout(torch.arange(target.kv_size, device=weight.device), target.num_kv_heads, target.head_dim).argsort()
        weight.copy_(weight[:, order])
        if lsa is not None:
            for norm in (lsa.input_norm, lsa.mlp_norm):
                norm.reorder(order)
            for reading in (lsa.qkv, lsa.mlp.gate_up):
                reading.weight.copy_(reading.weight[:, order])
            for writing in (lsa.output, lsa.mlp.down):
                writing.weight.copy_(writing.weight[order])
        self.reads_cache_layout = True

    def memory(self, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Layer self-attention (or, without it, the last layer): n verified tokens' keys and values [n, L, E_kv] -> memory [n, E].

        In ``lsa_layout``, or after ``read_cache_layout`` in a cache's. A drafter with an entry needs ``hidden`` [n, E] too, the
        target's final hidden states; paired memory still lacks ``with_own`` and ``with_following``.
        """
        n, layers, _ = kv.shape
        summary = kv[:, -1]
        if self.lsa is not None:
            rope, attend = self._layer_rope(n, kv), attention_over_layers(n, self.lsa, kv.device)
            summary = self.lsa(kv.flatten(0, 1), rope, attend).view(n, layers, -1).mean(dim=1)
        return self.with_top(self.to_memory(summary), hidden)

    def with_top(self, memory: Tensor, hidden: Tensor | None) -> Tensor:
        """Memory [n, E] of keys and values -> with what an entry reads besides: the target's final hidden states [n, E]."""
        if self.entry is None:
            return memory
        if hidden is None:
            raise ValueError("a drafter with an entry reads the target's final hidden states too")
        return memory + self.entry.of_target(hidden.to(memory.dtype))

    def with_own(self, memory: Tensor, embeddings: Tensor, previous: Tensor) -> Tensor:
        """Paired memory of tokens with ``embeddings``, ``previous`` ones before them, all [n, E] -> with what it reads of both."""
        assert isinstance(self.entry, PairedEntry)
        return memory + self.entry.of_own(embeddings, previous)

    def with_following(self, memory: Tensor, embeddings: Tensor) -> Tensor:
        """The same of the tokens behind those, which makes it what CA reads: ``embeddings`` [n, E] are theirs."""
        assert isinstance(self.entry, PairedEntry)
        return memory + self.entry.of_following(embeddings)

    def of_pairs(self, memory: Tensor, embeddings: Tensor, previous: Tensor) -> Tensor:
        """Memory [B·S, E] of whole texts, with embeddings as ``with_own`` has them [B, S, E] -> what CA reads of them.

        Behind a text's last token stands its first, for nobody: only what comes after it sees its memory.
        """
        memory = self.with_own(memory, embeddings.flatten(0, 1), previous.flatten(0, 1))
        return self.with_following(memory, embeddings.roll(-1, dims=1).flatten(0, 1))

    def _layer_rope(self, n: int, like: Tensor) -> Rope:
        """Rotations of layers 0 … L−1, once for each of n tokens; the table is kept, as serving asks for it at every step."""
        layers = self.config.target.num_layers
        if torch.compiler.is_compiling() or like.device.type != "cpu":  # a recorded graph must not hold what is made anew later
            cos, sin = self.layer_rotary(torch.arange(layers, device=like.device))
            return cos.repeat(n, 1, 1, 1), sin.repeat(n, 1, 1, 1)
        cos, sin = self._layer_ropes
        if len(cos) < n * layers or cos.dtype != like.dtype or cos.device != like.device:
            self.layer_rotary.reserve(layers, like)
            cos, sin = self._layer_ropes = self.layer_rotary(torch.arange(layers, device=like.device).repeat(max(n, 16)))
        return cos[: n * layers], sin[: n * layers]

    def cross_keys_values(self, memory: Tensor, rope: Rope) -> Tensor:
        """Memory [n, E] -> CA's rotated keys and its values [n, 2·n_kv·d]."""
        return keys_values(self.ca, memory, rope)


def tokens_before(token_ids: Tensor) -> Tensor:
    """Whole texts [B, S] -> the tokens before theirs [B, S]: before a text's first stands 0."""
    return F.pad(token_ids[:, :-1], (1, 0))


def attention_over_layers(count: int, layer: DecoderLayer, device: torch.device) -> Attend:
    """Attention within each of ``count`` sequences as short as the target has layers; all see all.

    On a CPU the backward pass of scaled_dot_product_attention is eight times slower for these than products written out.
    AOTInductor, in float32, makes a constant of those products' batch size, so an exported graph keeps to the former.
    """
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
    if device.type != "cpu" or torch.compiler.is_exporting():
        return masked_attention(count, heads, kv_heads, None)
    groups = heads // kv_heads

    def attend(queries: Tensor, kv: Tensor) -> Tensor:
        keys, values = kv.view(count, -1, 2, kv_heads, size).unbind(2)
        length = keys.shape[1]
        # Heads are group-major: the queries of one KV head become rows of one product.
        queries = queries.view(count, length, groups, kv_heads, size).permute(0, 3, 2, 1, 4)
        queries = queries.reshape(count * kv_heads, groups * length, size)
        keys = keys.permute(0, 2, 3, 1).reshape(count * kv_heads, size, length)
        values = values.transpose(1, 2).reshape(count * kv_heads, length, size)
        weights = torch.softmax(torch.bmm(queries * size**-0.5, keys), dim=-1)
        out = torch.bmm(weights.to(values.dtype), values).view(count, kv_heads, groups, length, size)
        return out.permute(0, 3, 2, 1, 4).reshape(count * length, heads * size)

    return attend
