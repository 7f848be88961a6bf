"""What can go wrong in training through no fault of the program."""

import signal


class TrainingError(Exception):
    """Root of this package's errors; its message is meant for the user."""


class DataError(TrainingError):
    """A corpus is missing, malformed or holds nothing to learn from."""


class ConfigError(TrainingError):
    """Settings contradict one another or the checkpoint to resume from."""


class TrainingInterrupted(TrainingError):
    """A signal stopped the run after its state was saved."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


def first_line(error: Exception) -> str:
    """What another library says first, without the traces and the advice that may follow."""
    return str(error).partition("\n")[0]
