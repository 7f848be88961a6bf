"""What a drafter learns from besides the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from models.config import DecoderConfig
from models.eagle import EagleConfig
from models.llama import TargetActivations
from training.choices import Method
from training.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Needs:
    """Besides the target's final hidden state: keys and values of all layers, the input of a layer, outputs of layers ``taps``.

    Layers are numbered as in ``Llama.encode``.
    """

    keys_values: bool
    layer_input: int | None = None
    taps: tuple[int, ...] = ()

    def widths(self, target: DecoderConfig) -> dict[str, int]:
        """Numbers a token, by the names of TargetActivations."""
        widths = {"hidden": target.hidden_size}
        if self.keys_values:
            widths["kv"] = target.num_layers * target.kv_size
        if self.layer_input is not None:
            widths["layer_input"] = target.hidden_size
        if self.taps:
            widths["tapped"] = len(self.taps) * target.hidden_size
        return widths

    def lacking(self, kept: Needs) -> list[str]:
        """What of this there is not in ``kept``, in words."""
        missing = ["keys and values"] if self.keys_values and not kept.keys_values else []
        if self.layer_input not in (None, kept.layer_input):
            missing.append(f"the input of layer {self.layer_input}")
        if self.taps and self.taps != kept.taps:
            missing.append(f"the outputs of layers {', '.join(map(str, self.taps))}")
        return missing


class Activations(Protocol):
    """What a target makes of a corpus, kept on disk (``training.activations``)."""

    @property
    def batches(self) -> Sequence[npt.NDArray[np.int64]]:
        """The conversations that there are, in the batches in which the target ran them."""

    def read(self, conversations: npt.NDArray[np.int64], lengths: Sequence[int], length: int) -> TargetActivations:
        """Of the first ``lengths`` tokens of each conversation [B], zeros behind them up to ``length``."""

    def check(self, needs: Needs) -> None:
        """Raise ConfigError unless they hold what a drafter learns from."""


def needs_of(method: Method, layers_inferred: int, target: DecoderConfig) -> Needs:
    """What drafters of a method learn from, ``layers_inferred`` being the number of borrowed layers of a MoA drafter.

    Raises ConfigError unless the target has more layers than that.
    """
    if not 0 <= layers_inferred < target.num_layers:
        raise ConfigError(
            f"--layers-inferred {layers_inferred}: of this target's {target.num_layers} layers at most "
            f"{target.num_layers - 1} can be borrowed"
        )
    if method == "moa":
        return Needs(keys_values=True, layer_input=target.num_layers - layers_inferred if layers_inferred else None)
    if method == "independent":
        return Needs(keys_values=False)
    return Needs(keys_values=False, taps=EagleConfig(target, int(method[-1]), target.num_kv_heads, 1).taps)
