"""`moaserve bench gpu`: what steps of large models take beside the least that their memory allows, and the bundled pair.

Weights are random: what a step costs does not depend on them, and nothing has to be downloaded. The least time of a pass is that of
reading its weights, keys and values once; how fast memory is read is measured first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from models.config import DecoderConfig, MoAConfig
from models.llama import Llama
from models.loader import empty
from models.moa import MoA
from models.replay import rerun
from models.rope import RopeConfig
from speculative.config import ModelInfo
from speculative.drafters.moa import MoADrafter
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.policy import DraftShape, FixedPolicy
from speculative.replaying import replay_engine
from speculative.request import Request, SamplingParams
from speculative.timing import StepClock

PROMPT_TOKENS = 256
BLOCK = 9
"""Positions that the drafter's block has, as the bundled one."""

DRAFT_VOCABULARY = 32_768
"""Tokens that the drafter proposes, at most: those that a corpus has need of."""

_PREPARED, _TIMED = 4, 20
"""Steps before those that are timed, in which graphs are recorded, and steps that are timed."""


NoRoomError = torch.OutOfMemoryError
"""A GPU has no room for a model and its texts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, without its weights."""

    name: str
    target: DecoderConfig
    max_model_len: int = 2048


def _llama(**sizes: Any) -> DecoderConfig:
    rope = RopeConfig(theta=500_000.0)
    return DecoderConfig("LlamaForCausalLM", rms_norm_eps=1e-5, max_position_embeddings=8192, rope=rope, **sizes)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "8b",
            _llama(
                vocab_size=128_256,
                hidden_size=4096,
                intermediate_size=14_336,
                num_layers=32,
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
            ),
        ),
        Shape(
            "1b",
            _llama(
                vocab_size=128_256,
                hidden_size=2048,
                intermediate_size=8192,
                num_layers=16,
                num_heads=32,
                num_kv_heads=8,
                head_dim=64,
                tie_word_embeddings=True,
            ),
        ),
        Shape(
            "tiny",
            _llama(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16),
            512,
        ),
    )
}
"""Llama-3-8B, Llama-3.2-1B (their published config.json files), and one that any machine runs in a moment."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians in seconds of steps of ``batch`` texts: plain ones, and with a tree of ``nodes`` nodes drafted, verified and kept.

    ``level`` is one more drafted level; ``floor`` the least that a verification takes, by what it reads.
    """

    batch: int
    nodes: int
    replayed: bool
    plain: float
    draft: float
    level: float
    verify: float
    commit: float
    floor: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        times = {name: getattr(self, name) for name in ("plain", "draft", "level", "verify", "commit", "floor")}
        ratios = {"verify_over_floor": self.verify / self.floor, "floor_over_level": self.floor / max(self.level, 1e-9)}
        return {"batch": self.batch, "nodes": self.nodes, "replayed": self.replayed, **times, **ratios}


@dataclass(frozen=True, slots=True)
class ShapeCosts:
    """All of one shape; ``read_bytes`` are those of the weights that a pass reads."""

    shape: Shape
    parameters: int
    drafter_parameters: int
    read_bytes: int
    steps: tuple[StepCost, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "shape": self.shape.name,
            "parameters": self.parameters,
            "drafter_parameters": self.drafter_parameters,
            "read_bytes": self.read_bytes,
            "steps": [step.as_dict() for step in self.steps],
        }


def bandwidth(device: torch.device, megabytes: int = 1024) -> float:
    """Bytes per second that copying reads and writes: the fastest of some tries."""
    source = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    settle = settling(device)
    seconds = []
    for _ in range(10):
        settle()
        began = time.perf_counter()
        into.copy_(source)
        settle()
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds)


def settling(device: torch.device) -> Callable[[], None]:
    """What waits until a device has done all that it was told."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def random_engine(shape: Shape, drafting: DraftShape, max_num_seqs: int, device: torch.device, dtype: torch.dtype) -> Engine:
    """An engine of that shape with a MoA drafter in the authors' proportions, both with random weights."""
    generator = torch.Generator(device).manual_seed(0)

    def fill(module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data.normal_(std=0.02, generator=generator) if parameter.dim() > 1 else parameter.data.fill_(1.0)

    target = empty(lambda: Llama(shape.target), dtype, device).eval().requires_grad_(False)
    if shape.target.tie_word_embeddings:
        target.tie_embeddings()
    fill(target)
    config = MoAConfig.from_target(shape.target, draft_block_size=BLOCK)
    moa = empty(lambda: MoA(config), dtype, device).eval().requires_grad_(False)
    fill(moa)
    moa.draft_vocabulary = torch.arange(min(DRAFT_VOCABULARY, shape.target.vocab_size), device=device)
    info = ModelInfo(shape.name, shape.max_model_len, shape.target.vocab_size, str(dtype), str(device), "moa", {}, 0)
    return Engine(
        target,
        None,
        lambda slots, length: MoADrafter(moa, target, slots, length, drafting, window=length),
        FixedPolicy(drafting),
        drafting,
        info,
        max_num_seqs=max_num_seqs,
        prefill_chunk=512,
    )


def measure_shape(
    shape: Shape,
    batches: Sequence[int],
    nodes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    bytes_per_second: float,
    *,
    progress: Callable[[], None] = lambda: None,
) -> ShapeCosts:
    """Steps of every batch size and number of nodes, launched one operation after another and as recorded graphs.

    Raises NoRoomError.
    """
    drafting = DraftShape(BLOCK - 1, 4, max(nodes))
    engine = random_engine(shape, drafting, max(batches), device, dtype)
    read = _read_bytes(engine.target)
    steps: list[StepCost] = []
    for replayed in (False, True):
        if replayed:
            replay_engine(engine, None if device.type == "cuda" else lambda: rerun)
        for batch in batches:
            with _texts(engine, batch):
                plain = _medians(engine, None)["verify"]
                kept = batch * (PROMPT_TOKENS + _PREPARED) * shape.target.kv_size * shape.target.num_layers
                floor = (read + kept * engine.cache.data.element_size()) / bytes_per_second
                for count in nodes:
                    asked = replace(drafting, nodes=count)
                    whole, one = _medians(engine, asked), _medians(engine, replace(asked, depth=1))
                    level = (whole["draft"] - one["draft"]) / (drafting.depth - 1)
                    parts = whole["draft"], level, whole["verify"], whole["commit"]
                    steps.append(StepCost(batch, count, replayed, plain, *parts, floor))
                    progress()
    drafter = innermost(engine.drafter)
    assert isinstance(drafter, MoADrafter)
    return ShapeCosts(shape, _parameters(engine.target), _parameters(drafter.network.moa), read, tuple(steps))


def _parameters(module: torch.nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _read_bytes(target: Llama) -> int:
    """Of the weights that a pass reads: all but the embeddings of tokens that are not in it."""
    layers = sum(each.nbytes for each in (*target.layers.parameters(), *target.norm.parameters()))
    return layers + target.lm_head.weight.nbytes


class _texts:
    """So many texts that run in an engine, until the block ends."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine, self._count = engine, count

    def __enter__(self) -> None:
        engine, generator = self._engine, torch.Generator().manual_seed(1)
        for number in range(self._count):
            length = min(PROMPT_TOKENS, engine.info.max_model_len // 2)
            prompt = torch.randint(engine.info.vocab_size, (length,), generator=generator).tolist()
            engine.add(Request(f"gpu-{number}", tuple(prompt), SamplingParams(temperature=0.0, ignore_eos=True)))
        while len(engine.scheduler.running) < self._count:
            engine.step()

    def __exit__(self, *_: object) -> None:
        for number in range(self._count):
            self._engine.abort(f"gpu-{number}")


def _medians(engine: Engine, drafting: DraftShape | None) -> dict[str, float]:
    """Seconds of each phase in steps that draft so, or not at all."""
    engine.policy = _Asked(drafting)
    engine.clock = StepClock(settling(engine.target.device))
    taken = [dict(times) for times in _steps(engine, _PREPARED + _TIMED)][_PREPARED:]
    return {phase: statistics.median(times[phase] for times in taken) for phase in taken[0]}


def _steps(engine: Engine, count: int) -> Iterator[dict[str, float]]:
    for _ in range(count):
        engine.step()
        yield engine.clock.of_step


class _Asked(FixedPolicy):
    """The shape that is asked for; None: no drafts."""

    def __init__(self, shape: DraftShape | None) -> None:
        self._asked = shape
        super().__init__(shape or DraftShape(1, 1, 1))

    def shape(self, batch: Sequence[Any], *, reading: bool = False) -> DraftShape | None:
        """As in SpeculationPolicy."""
        return self._asked
