"""EngineConfig: what the engine needs to know, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from speculative.errors import EngineLoadError
from speculative.memory import MemoryLimit

BUNDLED = "bundled"
DType = Literal["auto", "float32", "bfloat16"]
DraftPolicy = Literal["adaptive", "fixed"]
Compile = Literal["auto", "on", "off"]
MemoryFormat = Literal["int8", "int4", "bfloat16"]
"""How a drafter's memory is written where it travels: see `remote.memory_codec`."""
MEMORY_FORMATS: tuple[MemoryFormat, ...] = get_args(MemoryFormat)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to load and run a target with its drafter.

    ``model`` is "bundled", a folder or a hub id. ``drafter`` is "auto" (the bundled MoA drafter with the bundled target, otherwise
    n-gram), "none", "ngram", a folder or a hub id. ``max_model_len`` counts prompt and output tokens of one sequence (None: the
    model's own limit), ``max_num_seqs`` the sequences decoded together, ``prefill_chunk`` the most prompt tokens run per step.
    ``prefix_cache_tokens`` of ended texts are kept for those that begin alike (0: none; None: half of what all slots hold).
    At most ``draft_depth`` levels are drafted, ``draft_breadth`` nodes wide, and at most the ``draft_nodes`` best are verified: as
    many as make the most tokens a second if ``draft_policy`` is "adaptive", all of them if it is "fixed". Drafting stops early
    once the kept nodes of a level have, together, a probability below ``draft_min_reach`` (None: what a level costs, or 0.2 if
    "fixed"), by the drafter's logits at ``draft_temperature``. Where the last ``draft_lookup`` tokens stand earlier in the text,
    what followed them is drafted instead (0: never). Of a prompt the drafter reads the last ``draft_window`` tokens (0: all; None:
    64 if it is a MoA drafter on a CPU, else all; others than MoA and EAGLE ones read all).
    Trees that are drafted elsewhere may have ``remote_tree_nodes``, or as many as are drafted here where that is more.
    With a ``memory_limit`` less is kept of ended texts, and fewer are decoded together, where that is what it takes to fit.
    ``compile`` makes machine code of the networks, on CPUs with a C++ compiler: "auto" where it can and pays.
    The target's layers are shared by ``tensor_parallel_size`` processes, each on a GPU of its own, or with ``num_threads`` of the
    CPU (None: an equal part of them).
    """

    model: str = BUNDLED
    drafter: str = "auto"
    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    prefill_chunk: int = 512
    prefix_cache_tokens: int | None = None
    draft_policy: DraftPolicy = "adaptive"
    draft_depth: int = 8
    draft_breadth: int = 4
    draft_nodes: int = 15
    draft_min_reach: float | None = None
    draft_temperature: float = 1.0
    draft_lookup: int = 2
    draft_window: int | None = None
    remote_tree_nodes: int = 32
    num_threads: int | None = None
    memory_limit: MemoryLimit | None = None
    compile: Compile = "auto"
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that cannot work, naming the setting."""
        for name in ("max_num_seqs", "prefill_chunk", "draft_depth", "draft_breadth", "draft_nodes", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise EngineLoadError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise EngineLoadError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if self.draft_min_reach is not None and not 0.0 <= self.draft_min_reach <= 1.0:
            raise EngineLoadError(f"draft_min_reach must be between 0 and 1, got {self.draft_min_reach}")
        if not self.draft_temperature > 0:
            raise EngineLoadError(f"draft_temperature must be above 0, got {self.draft_temperature}")
        if self.draft_lookup < 0:
            raise EngineLoadError(f"draft_lookup must be 0 (off) or more, got {self.draft_lookup}")
        if self.prefix_cache_tokens is not None and self.prefix_cache_tokens < 0:
            raise EngineLoadError(f"prefix_cache_tokens must be 0 (off) or more, got {self.prefix_cache_tokens}")
        if self.draft_window is not None and self.draft_window < 0:
            raise EngineLoadError(f"draft_window must be 0 (all) or more, got {self.draft_window}")
        if not 1 <= self.remote_tree_nodes <= 4096:
            raise EngineLoadError(f"remote_tree_nodes must be between 1 and 4096, got {self.remote_tree_nodes}")
        if self.draft_nodes < self.draft_depth:
            raise EngineLoadError(f"draft_nodes ({self.draft_nodes}) must be at least draft_depth ({self.draft_depth})")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the HTTP layer may know of a loaded model.

    ``default_sampling`` holds the sampling keys of the model's generation_config.json (temperature, top_p, top_k, min_p,
    repetition_penalty), with ``temperature`` 0 where it says ``do_sample: false``. Engines of equal ``fingerprint`` can use each
    other's key-value cache; "" can use nobody's. Engines of equal ``pair`` have the same target and drafter, whatever type their
    numbers are: an edge's bundle says of which pair it is. Engines of equal ``target`` write the same texts, whoever drafts for
    them: one can go on with what another has begun. ``memory`` has the bytes that an engine takes when all is in use, by
    what they are for (``memory.MemoryPlan``).
    """

    name: str
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    drafter: str
    default_sampling: dict[str, Any]
    created: int
    fingerprint: str = ""
    pair: str = ""
    target: str = ""
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RemoteInfo:
    """What those who draft elsewhere are told: the text's ends, the largest tree, and bytes of memory by format.

    ``memory_bytes`` has those of a verified token and of the newest memory; it is empty where there is no memory to send, and
    nobody can draft elsewhere then.
    """

    eos_token_ids: tuple[int, ...]
    tree_nodes: int
    memory_bytes: Mapping[MemoryFormat, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class EdgeStatus:
    """How an edge's link to its server is, and what it has carried; ``round_trip`` is in seconds, None where nothing is known.

    ``refuses``: a new text would end at once, as the server is away and nothing is to be written without it.
    """

    server_up: bool
    refuses: bool
    round_trip: float | None
    num_reconnects: int
    bytes_sent: int
    bytes_received: int
    offline_tokens: int
    corrected_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for metrics and probes: how many requests run and wait, and the share of KV slots in use (0 to 1).

    ``draft_depth`` and ``draft_nodes`` limit the latest step's trees (0: nothing was to be drafted); ``num_steps`` and
    ``phase_seconds`` are what `timing.StepClock` says. ``edge`` is there where a server verifies.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    draft_depth: int = 0
    draft_nodes: int = 0
    num_steps: int = 0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    edge: EdgeStatus | None = None
