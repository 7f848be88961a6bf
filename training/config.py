"""Everything that decides what is trained, and how, in one frozen place."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from training.choices import Method, TokenLossKind
from training.errors import ConfigError
from training.run_config import RunConfig, check_finite, check_not_negative, check_positive

MAX_UNROLL = 16
"""Each draft step of EAGLE-3 attends to the keys and values of all before it, so that time and memory grow faster than steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(RunConfig):
    """Training a drafter; the defaults are the paper's where it gives any (arXiv 2410.03804).

    ``None`` for a size means the authors' proportion for this target.
    """

    target: str
    method: Method = "moa"
    init_from: str | None = None
    activations: Path | None = None
    shard_target: bool = False
    regenerate: int | None = None
    regenerate_temperature: float = 0.0

    lsa_kv_heads: int | None = None
    lsa_mlp: int | None = None
    sa_kv_heads: int | None = None
    sa_mlp: int | None = None
    ca_kv_heads: int | None = None
    ca_mlp: int | None = None
    layers_inferred: int = 0
    draft_block: int | None = None
    draft_block_mlp: int | None = None
    without_entry: bool = False
    paired: bool = False
    without_lsa: bool = False
    without_ca: bool = False
    draft_kv_heads: int | None = None
    draft_mlp: int | None = None
    draft_layers: int | None = None
    draft_hidden: int | None = None

    draft_vocabulary: int | None = None

    token_loss: TokenLossKind = "kl"
    kl_weight: float = 0.1
    feature_weight: float = 1.0
    target_temperature: float = 1.0
    min_interval: int = 6
    max_interval: int = 14
    draws: int = 1
    staircase_until: float = 0.5
    feature_noise: float = 0.1
    unroll: int = 5

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        RunConfig.__post_init__(self)
        check_positive(
            self,
            "min_interval",
            "draws",
            "target_temperature",
            "draft_vocabulary",
            *("lsa_kv_heads", "lsa_mlp", "sa_kv_heads", "sa_mlp", "ca_kv_heads", "ca_mlp"),
            "draft_block",
            "draft_block_mlp",
            "draft_kv_heads",
            "draft_mlp",
            "draft_layers",
            "draft_hidden",
            "unroll",
            "regenerate",
        )
        check_not_negative(
            self, "kl_weight", "feature_weight", "staircase_until", "layers_inferred", "regenerate_temperature", "feature_noise"
        )
        check_finite(self, "kl_weight", "feature_weight", "target_temperature", "regenerate_temperature", "feature_noise")
        self._check_source()
        self._check_method()
        if self.kl_weight == self.feature_weight == 0:
            raise ConfigError("kl_weight and feature_weight are both 0: nothing would be learnt")
        if not 2 <= self.min_interval <= self.max_interval:
            raise ConfigError(f"intervals need 2 ≤ min ≤ max, not {self.min_interval} … {self.max_interval}")
        if self.draft_block is not None and self.draft_block < self.max_interval - 1:
            raise ConfigError(
                f"intervals of up to {self.max_interval} draft {self.max_interval - 1} positions: raise --draft-block to that, "
                "or lower --max-interval"
            )
        if self.draft_block is None and self.draft_block_mlp is not None:
            raise ConfigError("--draft-block-mlp needs --draft-block")

    def _check_source(self) -> None:
        """What is learnt from comes from the target beside, or from its activations on disk."""
        if self.activations is None:
            if self.data is None:
                raise ConfigError("say what to train on: --data, or --activations that were made of it")
            return
        if self.regenerate is not None:
            raise ConfigError("--regenerate takes the target itself: say it to moaserve activations, not beside --activations")
        if self.shard_target:
            raise ConfigError("--shard-target: with --activations the target is not run, so there is nothing to shard")

    def _check_method(self) -> None:
        """Every method has sizes of its own."""
        eagle = ("draft_kv_heads", "draft_mlp")
        own = {"moa": (), "eagle2": eagle, "eagle3": eagle, "independent": (*eagle, "draft_layers", "draft_hidden")}[self.method]
        moa = ("lsa_kv_heads", "lsa_mlp", "sa_kv_heads", "sa_mlp", "ca_kv_heads", "ca_mlp", "draft_block", "draft_block_mlp")
        refused = ("draft_kv_heads", "draft_mlp", "draft_layers", "draft_hidden", *(moa if self.method != "moa" else ()))
        for name in refused:
            if name not in own and getattr(self, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is no option of --method {self.method}")
            if name in own and self.init_from is not None and getattr(self, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: with --init-from the drafter keeps its sizes, so leave it out")
        if self.paired and self.without_entry:
            raise ConfigError("--paired is a kind of entry: leave out --without-entry")
        if self.init_from == "bundled" and self.method != "moa":
            raise ConfigError(
                f"--init-from bundled is a drafter of --method moa, not {self.method}: name one of this method, or leave it out"
            )
        if self.unroll > MAX_UNROLL:
            raise ConfigError(f"--unroll {self.unroll}: at most {MAX_UNROLL} draft steps can be unrolled")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        of_moa = ("draws", "layers_inferred", "without_entry", "paired", "without_lsa", "without_ca")
        of_others = () if self.method == "moa" else of_moa
        for name in of_others if self.method == "eagle3" else (*of_others, "unroll"):
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"--{name.replace('_', '-')} is no option of --method {self.method}")
        if self.method == "independent" and self.draft_vocabulary is not None:
            raise ConfigError("--draft-vocabulary is no option of --method independent: its own LM head knows all tokens")

    @property
    def sizes(self) -> dict[str, int]:
        """The MoA sizes that were given, under MoAConfig's names."""
        given = {
            "lsa_num_kv_heads": self.lsa_kv_heads,
            "lsa_intermediate_size": self.lsa_mlp,
            "sa_num_kv_heads": self.sa_kv_heads,
            "sa_intermediate_size": self.sa_mlp,
            "ca_num_kv_heads": self.ca_kv_heads,
            "ca_intermediate_size": self.ca_mlp,
            "target_layer_inference": self.layers_inferred,
            "draft_block_size": self.draft_block,
            "draft_block_intermediate_size": self.draft_block_mlp,
            # A drafter that is trained on stays what it is.
            "has_entry": False if self.without_entry else True if self.init_from is None else None,
            "paired": True if self.paired else None,
            "reads_all_layers": False if self.without_lsa else None,
            "attends_to_all_memory": False if self.without_ca else None,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig(RunConfig):
    """Training a target from ``base``, a model folder or hub id whose tokenizer, template and generation settings are kept.

    Its weights are kept too unless ``fresh``; then sizes may differ from its own. Tokens that no assistant wrote count for
    ``prompt_weight``.
    """

    base: str
    fresh: bool = False
    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    mlp: int | None = None
    prompt_weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        RunConfig.__post_init__(self)
        if self.data is None:
            raise ConfigError("say what to train on: --data")
        check_positive(self, "hidden_size", "layers", "heads", "kv_heads", "mlp")
        check_not_negative(self, "prompt_weight")
        check_finite(self, "prompt_weight")
        if self.sizes and not self.fresh:
            raise ConfigError("other sizes than the base's make a new network: say --fresh, or leave them out")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that were given, under DecoderConfig's names."""
        given = {
            "hidden_size": self.hidden_size,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "intermediate_size": self.mlp,
        }
        return {name: value for name, value in given.items() if value is not None}
