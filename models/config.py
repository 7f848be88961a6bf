"""Frozen sizes of the networks, read from Hugging Face ``config.json`` files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.architectures import ARCHITECTURES, SUPPORTED, architecture, sliding_window
from models.errors import CheckpointError
from models.reading import number, whole_number
from models.rope import RopeConfig

COPYING_THETA = 1e6
"""Least RoPE base of new drafters that copy: with a small one only a few dimensions of a head can tell tokens apart from afar.

Measured with heads of 48 and texts of 1,024 tokens: docs/results/drafters.md, "Copying from the start".
"""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only target: Llama 2/3, Mistral, Qwen2/2.5 or Qwen3.

    ``sliding_window`` is that of layers which would see less than all positions. We compute none: see ``check_window``. It is no
    part of what names such a model, as nothing computed depends on it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Refuse sizes that there are not, and heads that do not divide."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise CheckpointError(
                f"{self.num_kv_heads} KV heads must divide {self.num_heads} heads, each of an even size (they have {self.head_dim})"
            )

    @property
    def kv_size(self) -> int:
        """E_kv: keys and values of one token in one layer, 2·n_kv·d."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def groups(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def check_window(self, length: int | None = None) -> None:
        """Raise CheckpointError where texts of ``length`` tokens, or any if it is not known, would outgrow a sliding window."""
        window = self.sliding_window
        if window is not None and (length is None or length > window):
            raise CheckpointError(
                f"sliding-window attention (sliding_window={window}) is not supported: serve texts that stay inside it with "
                f"--max-model-len {window}, or, to export or train, set it to null in config.json if yours do"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a ``config.json``; raises CheckpointError for what this decoder cannot compute."""
        try:
            return cls._from_hf(config)
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]!r}") from None
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise CheckpointError(f"config.json has a value that is of no use: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """The same as a ``config.json`` says it; the inverse of ``from_hf``."""
        return {
            "architectures": [self.architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            **self.rope.to_hf(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.output_bias,  # Qwen2's queries, keys and values have theirs unsaid
            "mlp_bias": self.mlp_bias,
            # Unsaid, Mistral's is 4,096.
            **({"sliding_window": self.sliding_window} if ARCHITECTURES.get(self.architecture) == "mistral" else {}),
        }

    @classmethod
    def _from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        name = architecture(config)
        if name not in ARCHITECTURES:
            raise CheckpointError(f"architecture {name!r} is not supported; supported: {SUPPORTED}")
        family = ARCHITECTURES[name]
        if quantized := config.get("quantization_config") or config.get("compression_config"):
            how = quantized.get("quant_method", "unnamed") if isinstance(quantized, Mapping) else quantized
            raise CheckpointError(f"quantized weights ({how}) are not supported: use the checkpoint that they were made of")
        rope = RopeConfig.from_hf(config)
        positions = max(whole_number(config, "max_position_embeddings", 2048), rope.reach)
        window = sliding_window(config, family)
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise CheckpointError(f"hidden_act {activation!r} is not supported (silu is)")
        heads, size = whole_number(config, "num_attention_heads"), whole_number(config, "hidden_size")
        kv_heads = whole_number(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
        head_dim = whole_number(config, "head_dim") if config.get("head_dim") else size // max(1, heads)
        if family == "qwen3" and "head_dim" not in config:
            head_dim = 128
        bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")  # the others' classes do not read it
        return cls(
            architecture=name,
            vocab_size=whole_number(config, "vocab_size"),
            hidden_size=size,
            intermediate_size=whole_number(config, "intermediate_size"),
            num_layers=whole_number(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
            max_position_embeddings=positions,
            rope=rope,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bias or family == "qwen2",
            output_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
            sliding_window=window if window is not None and window < positions else None,
        )


@dataclass(frozen=True, slots=True)
class MoAConfig:
    """Sizes of a Mixture-of-Attentions drafter for one target; key names in files are the authors'.

    ``draft_block_size`` positions are drafted in one pass (see ``block``); 0 is the paper's way, level by level. For ablations:
    without ``reads_all_layers`` memory is a projection of the last layer's keys and values alone (no LSA), without
    ``attends_to_all_memory`` CA sees the newest memory only. ``has_entry``: see ``entry``; the paper's drafter has none. With
    ``paired`` memory reads tokens and their neighbours (``entry.PairedEntry``), what CA tells the LM head is normalised, and a
    block's levels copy (``copying``).
    ``rope_theta`` is the drafter's own RoPE base, None the target's.
    """

    target: DecoderConfig
    lsa_num_kv_heads: int
    lsa_intermediate_size: int
    sa_num_kv_heads: int
    sa_intermediate_size: int
    ca_num_kv_heads: int
    ca_intermediate_size: int
    target_layer_inference: int = 0
    draft_block_size: int = 0
    draft_block_intermediate_size: int = 0
    reads_all_layers: bool = True
    attends_to_all_memory: bool = True
    has_entry: bool = False
    paired: bool = False
    rope_theta: float | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide or do not go together."""
        heads = self.target.num_heads
        for name in ("lsa_num_kv_heads", "sa_num_kv_heads", "ca_num_kv_heads"):
            if heads % getattr(self, name):
                raise CheckpointError(f"{name}={getattr(self, name)} does not divide the target's {heads} heads")
        if self.target.kv_size % (2 * heads):
            raise CheckpointError(f"layer self-attention cannot split E_kv={self.target.kv_size} into {heads} even-sized heads")
        if not 0 <= self.target_layer_inference < self.target.num_layers:
            raise CheckpointError(
                f"target_layer_inference={self.target_layer_inference} must be at least 0 and below the target's "
                f"{self.target.num_layers} layers"
            )
        if self.paired and not self.has_entry:
            raise CheckpointError("paired memory is an entry's: has_entry must be true")
        if self.draft_block_size:
            if self.draft_block_size < 2 or self.draft_block_intermediate_size < 1:
                raise CheckpointError("a draft block has at least 2 positions and 1 unit")
            if self.target_layer_inference:
                raise CheckpointError("a draft block cannot run through borrowed layers: target_layer_inference must be 0")

    @property
    def rope(self) -> RopeConfig:
        """How the drafter's own layers rotate."""
        return RopeConfig(theta=self.target.rope.theta if self.rope_theta is None else self.rope_theta)

    @property
    def normalises_output(self) -> bool:
        """Whether what leaves CA is normalised: a block's head and borrowed layers have norms of their own."""
        return self.paired and not self.draft_block_size and not self.target_layer_inference

    @property
    def copies(self) -> bool:
        """Whether a block's levels look for their tokens in memory: without pairs that would not say what followed."""
        return self.paired and self.draft_block_size > 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: DecoderConfig) -> MoAConfig:
        """Read the ``config.json`` of a published drafter (the target's config plus the MoA sizes)."""
        try:
            return cls(
                target=target,
                lsa_num_kv_heads=int(config["layer_self_attention_num_key_value_heads"]),
                lsa_intermediate_size=int(config["layer_self_attention_intermediate_size"]),
                sa_num_kv_heads=int(config["self_attention_num_key_value_heads"]),
                sa_intermediate_size=int(config["self_attention_intermediate_size"]),
                ca_num_kv_heads=int(config["cross_attention_num_key_value_heads"]),
                ca_intermediate_size=int(config["cross_attention_intermediate_size"]),
                target_layer_inference=int(config.get("target_layer_inference", 0)),
                draft_block_size=int(config.get("draft_block_size", 0)),
                draft_block_intermediate_size=int(config.get("draft_block_intermediate_size", 0)),
                reads_all_layers=bool(config.get("reads_all_layers", True)),
                attends_to_all_memory=bool(config.get("attends_to_all_memory", True)),
                has_entry=bool(config.get("has_entry", False)),
                paired=bool(config.get("paired", False)),
                rope_theta=float(config["draft_rope_theta"]) if "draft_rope_theta" in config else None,
            )
        except KeyError as error:
            raise CheckpointError(f"not a MoA drafter: config.json has no {error.args[0]!r}") from None

    def to_hf(self) -> dict[str, Any]:
        """The MoA keys as the authors name them, and ours for what the paper has not; the inverse of ``from_hf``."""
        block = {
            "draft_block_size": self.draft_block_size,
            "draft_block_intermediate_size": self.draft_block_intermediate_size,
        }
        return {
            "layer_self_attention_num_key_value_heads": self.lsa_num_kv_heads,
            "layer_self_attention_intermediate_size": self.lsa_intermediate_size,
            "self_attention_num_key_value_heads": self.sa_num_kv_heads,
            "self_attention_intermediate_size": self.sa_intermediate_size,
            "cross_attention_num_key_value_heads": self.ca_num_kv_heads,
            "cross_attention_intermediate_size": self.ca_intermediate_size,
            "target_layer_inference": self.target_layer_inference,
            **(block if self.draft_block_size else {}),
            **({} if self.reads_all_layers else {"reads_all_layers": False}),
            **({} if self.attends_to_all_memory else {"attends_to_all_memory": False}),
            **({"has_entry": True} if self.has_entry else {}),
            **({"paired": True} if self.paired else {}),
            **({} if self.rope_theta is None else {"draft_rope_theta": self.rope_theta}),
        }

    @classmethod
    def from_target(cls, target: DecoderConfig, **sizes: int) -> MoAConfig:
        """Sizes in the authors' proportions (Llama-3-8B: 4 and 8 KV heads, MLPs of 6144 and 3072), any of them overridden."""
        heads = target.num_heads
        defaults = {
            "lsa_num_kv_heads": target.num_kv_heads,
            "lsa_intermediate_size": target.kv_size * 3 // 2,
            "sa_num_kv_heads": max(1, target.num_kv_heads // 2) if heads % max(1, target.num_kv_heads // 2) == 0 else heads,
            "sa_intermediate_size": target.hidden_size * 3 // 2,
            "ca_num_kv_heads": max(1, target.num_kv_heads // 2) if heads % max(1, target.num_kv_heads // 2) == 0 else heads,
            "ca_intermediate_size": target.hidden_size * 3 // 2,
            "draft_block_intermediate_size": target.hidden_size if sizes.get("draft_block_size") else 0,
            "rope_theta": max(target.rope.theta, COPYING_THETA) if sizes.get("paired") else None,
        }
        return cls(target=target, **dict[str, Any]({**defaults, **sizes}))


def is_moa(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is a MoA drafter's; published ones may bear the target's architecture."""
    return "layer_self_attention_num_key_value_heads" in config
