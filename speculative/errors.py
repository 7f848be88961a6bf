"""The engine's exceptions.

EngineError
├── InvalidRequestError        the caller's fault: a parameter out of range
│   └── ContextLengthError     prompt (and max_tokens) do not fit the model's context
├── EngineLoadError            the model or drafter cannot be loaded
├── InvalidBlockError          a block of key-value cache is not one that this engine could have written
├── InvalidMemoryError         bytes are no drafter memory of the agreed format
├── ProtocolError              what a peer of the client-server protocol sent cannot be used
├── EngineNotReadyError        the model is still loading, or the engine is draining
│   ├── ServerUnreachableError an edge's server cannot be reached, or does not take this edge
│   └── EngineLostError        a process that holds a part of the model has ended, or does not answer
├── ServerTimeoutError         an edge's server spends no more time on a text
├── ReplicaLostError           a replica has died, or stops: another can go on
└── EngineStepError            a step failed; the requests in it ended with "error"
"""

from __future__ import annotations

from typing import Final

SHUTTING_DOWN: Final = "The server is shutting down."
"""What an EngineNotReadyError says of a server that takes no more requests, or does not go on with one."""


class EngineError(Exception):
    """Root of everything the engine raises on purpose."""


class InvalidRequestError(EngineError):
    """A parameter is out of range; ``param`` names it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and ``max_tokens`` together, exceed the context."""


class EngineLoadError(EngineError):
    """The model or drafter cannot be loaded; the message says what to do."""


class InvalidBlockError(EngineError):
    """A block of key-value cache is not one that this engine could have written."""


class InvalidMemoryError(EngineError, ValueError):
    """Bytes are no drafter memory of the agreed format, or numbers cannot be written in it."""


class ProtocolError(EngineError, ValueError):
    """What a peer sent cannot be used: ``code`` says how to a machine, the message names frame and field.

    ``session`` is the one that the frame speaks of, where that much could be read and the fault is this session's alone; else the
    connection is not worth keeping. ``step`` is that of the tree, where it is the tree alone that cannot be used. What the peer
    sent is quoted in part only, however long it is.
    """

    LONGEST = 500

    def __init__(self, code: str, message: str, *, session: int | None = None, step: int | None = None) -> None:
        super().__init__(message if len(message) <= self.LONGEST else message[: self.LONGEST - 1] + "…")
        self.code, self.session, self.step = code, session, step


class EngineNotReadyError(EngineError):
    """The model is still loading, or the engine is draining."""


class ServerUnreachableError(EngineNotReadyError):
    """An edge's server cannot be reached, or does not take this edge.

    ``permanent`` where trying again will not help; ``starting`` where it is there and says that it takes edges later.
    """

    def __init__(self, message: str, *, permanent: bool = False, starting: bool = False) -> None:
        super().__init__(message)
        self.permanent, self.starting = permanent, starting


class ServerTimeoutError(EngineError):
    """An edge's server has ended a text that took longer than its ``--request-timeout``; the message is the server's."""


class EngineLostError(EngineNotReadyError):
    """A process that holds a part of the model has ended, or does not answer: nothing can be computed any more."""


class ReplicaLostError(EngineError):
    """A replica has died, is out of reach, or takes no requests; ``replica`` names it, "" where nobody knows which."""

    def __init__(self, message: str, replica: str = "") -> None:
        super().__init__(message)
        self.replica = replica


class EngineStepError(EngineError):
    """A step failed inside the engine."""
