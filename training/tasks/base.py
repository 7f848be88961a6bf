"""What the training loop asks of whatever is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.batches import Batch, Collated, Conversations
from training.losses import Loss
from training.progress import Meter


class Task(Protocol):
    """A network, its text and its loss.

    ``module`` is the network's training forward, which `accelerate` wraps; ``depths`` is how many draft depths agreement is counted
    for; ``key`` names the text, tokenizer included.
    """

    module: nn.Module
    source: Conversations
    valid: Collated
    depths: int
    key: str

    @property
    def network(self) -> nn.Module:
        """What holds the weights."""

    def loss(
        self, module: nn.Module, batch: Batch, generator: torch.Generator, progress: float, *, agreement: bool
    ) -> tuple[Loss, Tensor]:
        """Loss of a batch by the wrapped ``module``, and the draft depth of each row that counts [R].

        All chance is drawn from ``generator``; ``progress`` is the share of the run that is done, 1 in a validation.
        """

    def figures(self, meter: Meter) -> dict[str, Any]:
        """What is logged of many batches."""

    def describe(self, figures: dict[str, Any]) -> str:
        """A validation's figures in a line."""

    def save(self, folder: Path) -> None:
        """Write the network as it is to be used."""
