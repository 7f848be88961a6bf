"""How far a run is, by each of its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from training.checkpoints import Position
from training.run_config import RunConfig, option_name


def shares(config: RunConfig, position: Position, batches: Callable[[int], int]) -> dict[str, float]:
    """What is done of each limit, by its setting's name, 1 where it is reached; ``batches`` says how many an epoch has."""
    done: dict[str, float] = {}
    if config.max_steps is not None:
        done["max_steps"] = position.step / config.max_steps
    if config.max_minutes is not None:
        done["max_minutes"] = position.seconds / (60 * config.max_minutes)
    if config.epochs is not None:
        done["epochs"] = (position.epoch + position.batch / batches(position.epoch)) / config.epochs
    return done


def reached(config: RunConfig, position: Position, done: Mapping[str, float]) -> str:
    """For people, why a run that is resumed is over: ``done`` as from ``shares``."""
    limits = [f"{option_name(name)} {getattr(config, name)}" for name, share in done.items() if share >= 1]
    return f"nothing is left to train: step {position.step} is at the end of {' and '.join(limits)} already; raise it to train on"
