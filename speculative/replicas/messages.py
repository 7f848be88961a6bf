"""What ingress and replicas tell each other: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speculative.config import EngineStatus, ModelInfo, RemoteInfo
from speculative.errors import ContextLengthError, EngineError, EngineNotReadyError, EngineStepError, InvalidRequestError
from speculative.request import RequestOutput

FailureKind = Literal["invalid", "context", "step", "not_ready"]


@dataclass(frozen=True, slots=True)
class Wish:
    """Where a request should go: ``near`` names replicas that know its beginning, the best first; ``avoid`` those it must not
    go to. With ``only`` it is for that replica alone. Replicas refuse what is not for their ``target``, or for their ``pair`` of
    target and drafter ("": any). ``request_id`` is that of the text that they would have until it ends ("": none).
    """

    target: str = ""
    near: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()
    only: str = ""
    pair: str = ""
    request_id: str = ""

    def fits(self, info: ModelInfo) -> bool:
        """Whether an engine with that model can do what is wished."""
        return self.target in ("", info.target) and self.pair in ("", info.pair)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a replica does not go on with a request."""

    kind: FailureKind
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: EngineError) -> Failure:
        """What there is to tell of an error."""
        if isinstance(error, InvalidRequestError):
            return cls("context" if isinstance(error, ContextLengthError) else "invalid", str(error), error.param)
        return cls("not_ready" if isinstance(error, EngineNotReadyError) else "step", str(error))

    @property
    def error(self) -> EngineError:
        """The error, at the other end."""
        if self.kind == "context":
            return ContextLengthError(self.message, param=self.param)
        if self.kind == "invalid":
            return InvalidRequestError(self.message, param=self.param)
        return EngineNotReadyError(self.message) if self.kind == "not_ready" else EngineStepError(self.message)


@dataclass(frozen=True, slots=True)
class Told:
    """An output of a request, none in the first message: it says who has taken it. ``time`` is the replica's monotonic clock's.

    One that ``can_wait`` may be sent a little later, together with others.
    """

    request_id: str
    replica: str
    time: float
    output: RequestOutput | None = None
    failure: Failure | None = None
    can_wait: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nothing more is said of the request."""
        return self.failure is not None or (self.output is not None and self.output.finish_reason is not None)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a replica says of itself; ``model`` is where its target is loaded from, as `EngineConfig` has it. It has ``others``
    requests of others than who asks.
    """

    model: str
    info: ModelInfo
    remote: RemoteInfo
    status: EngineStatus
    ready: bool
    alive: bool
    busy_seconds: float
    pid: int = 0
    others: int = 0
