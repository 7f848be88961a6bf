"""What can go wrong in training through no fault of the program."""


class TrainingError(Exception):
    """Root of this package's errors; its message is meant for the user."""


class DataError(TrainingError):
    """A corpus is missing, malformed or holds nothing to learn from."""


class ConfigError(TrainingError):
    """Settings contradict one another or the checkpoint to resume from."""


class TrainingInterrupted(TrainingError):
    """A signal stopped the run after its state was saved."""
