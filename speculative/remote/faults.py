"""What goes wrong at a server, as an edge is told it."""

from __future__ import annotations

import logging
from typing import Final

from speculative.errors import (
    ContextLengthError,
    EngineLoadError,
    EngineNotReadyError,
    EngineStepError,
    InvalidRequestError,
    ProtocolError,
)
from speculative.remote.frames import Error, ErrorCode

logger = logging.getLogger("moaserve.remote")

RETRYABLE: Final[frozenset[str]] = frozenset({"overloaded", "not_ready", "engine_failed"})

_CODES: Final[tuple[tuple[type[Exception], ErrorCode], ...]] = (
    (ContextLengthError, "context_length"),
    (InvalidRequestError, "invalid_parameter"),
    (EngineNotReadyError, "not_ready"),
    (EngineLoadError, "not_ready"),
    (EngineStepError, "engine_failed"),
)


def to_protocol_error(error: Exception) -> ProtocolError:
    """What an edge is told about ``error``; what it must not know is logged instead."""
    if isinstance(error, ProtocolError):
        return error
    for kind, code in _CODES:
        if isinstance(error, kind):
            return ProtocolError(code, str(error) or "not now: try again later")
    logger.error("unexpected error", exc_info=error)
    return ProtocolError("engine_failed", "the server had an error while working on this text: open it anew")


def error_frame(error: ProtocolError, session: int | None, step: int | None = None) -> Error:
    """The frame that tells of ``error``."""
    return Error(error.code, str(error), error.code in RETRYABLE, session, step)
