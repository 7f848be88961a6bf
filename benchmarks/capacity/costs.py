"""What a replica, its sessions and HTTP cost, as measured or as computed: the numbers that a plan is worked out from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked


class CostsError(Exception):
    """A file of costs cannot be used; the message says what is wrong with it."""


@checked(frozen=True)
class Step:
    """One step of ``batch`` texts that read nothing: ``seconds`` it takes, and ``tokens`` that each text gains."""

    batch: int
    seconds: float
    tokens: float


@checked(frozen=True)
class EngineCosts:
    """One replica's engine.

    ``steps`` by batch; ``step_context`` more seconds for each token of context in the batch (0: measured at the context that
    texts have). Reading n tokens of a prompt behind p others takes ``read_pass`` + n ``read_token`` + n (p + n / 2) ``read_pair``.
    ``slots`` texts run together, each with room for ``max_model_len`` tokens; ``prefix_tokens`` of ended texts are kept.
    """

    steps: tuple[Step, ...]
    read_pass: float
    read_token: float
    read_pair: float
    slots: int
    max_model_len: int
    prefix_tokens: int
    prefill_chunk: int = 512
    step_context: float = 0.0

    def read(self, tokens: int, behind: int) -> float:
        """Seconds for ``tokens`` of a prompt of which ``behind`` have been read, in passes of at most ``prefill_chunk``."""
        passes = -(-tokens // self.prefill_chunk)
        return passes * self.read_pass + tokens * self.read_token + tokens * (behind + tokens / 2) * self.read_pair


@checked(frozen=True)
class SessionCosts:
    """What is kept of conversations, and what Redis sees of them.

    Bytes of a token: ``kv_bytes`` in a replica's prefix cache, ``stored_bytes`` in Redis' memory, ``written_bytes`` and
    ``fetched_bytes`` on its network. A turn asks Redis ``turn_commands``, ``block_commands`` for each block of its text, and as
    many again for each block written or fetched. That takes ``turn_cpu`` seconds of Redis' processor, and ``write_cpu`` or
    ``fetch_cpu`` more for each token written or fetched. A fetch delays the first token by ``fetch_token`` seconds a token, and
    brings what comes within ``fetch_timeout``.
    """

    kv_bytes: float
    stored_bytes: float
    written_bytes: float
    fetched_bytes: float
    turn_commands: float
    block_commands: float
    turn_cpu: float
    write_cpu: float
    fetch_cpu: float
    fetch_token: float
    fetch_timeout: float = 0.25


@checked(frozen=True)
class HttpCosts:
    """The event loop that streams answers: seconds of a core for a request and for a token, and bytes that go out for a token."""

    request_cpu: float
    token_cpu: float
    token_bytes: float


@checked(frozen=True)
class Costs:
    """Everything that a plan is worked out from; ``model`` names it, ``origin`` says where the numbers come from."""

    model: str
    origin: str
    engine: EngineCosts
    sessions: SessionCosts
    http: HttpCosts


@dataclass(frozen=True, slots=True)
class Workload:
    """What sessions do.

    A session begins with a prompt of ``first_prompt`` tokens; each of its ``turns`` but the first adds ``question`` tokens, and
    gets ``answer`` tokens. Between an answer and the next question lie ``think`` seconds. All are means: lengths and thinking are
    exponential, turns geometric. A share ``affinity`` of follow-ups lands where their prefix is.
    """

    first_prompt: float = 300.0
    question: float = 40.0
    answer: float = 80.0
    turns: float = 8.0
    think: float = 30.0
    affinity: float = 0.95


_FILE = TypeAdapter(Costs)


def read_costs(path: Path) -> Costs:
    """A file that `moaserve bench costs` wrote, or one written by hand; raises CostsError."""
    try:
        return as_costs(json.loads(path.read_text(encoding="utf-8")).get("costs"))
    except (OSError, ValueError, AttributeError) as error:
        raise CostsError(f"{path} cannot be used: {error}") from error


def as_costs(told: object) -> Costs:
    """Check what stands under ``costs`` in such a file; raises ValueError."""
    try:
        costs = _FILE.validate_python(told)
    except ValidationError as error:
        raise ValueError("; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())) from error
    if not costs.engine.steps:
        raise ValueError("engine.steps: at least one step")
    return costs


def costs_dict(costs: Costs) -> dict[str, Any]:
    """For JSON."""
    told: dict[str, Any] = _FILE.dump_python(costs, mode="json")
    return told
