"""CUDA graphs: what a GPU computes for inputs of the same shapes is recorded once and then replayed as one launch.

A launch takes Python and PyTorch some microseconds, a step of a large model has hundreds, and a small drafter's kernels are all
shorter than that. What is recorded reads and writes the same memory whenever it is replayed: its inputs are copied to where they
stood then, its outputs are overwritten by the next replay, and whatever else it touches (weights, caches) must stay where it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[[list[Tensor]], list[Tensor]]
"""Of tensors, on one device: it asks for none of their values, and what it writes to is the same however often it runs."""

Recorder = Callable[[Callable[[], list[Tensor]]], tuple[Callable[[], None], list[Tensor]]]
"""From what is to be recorded to what replays it, and the outputs that a replay writes."""

_WARM_UPS = 2
"""Runs before one is recorded: kernels are chosen, and what is made once and kept is made outside of the recording."""


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory.

    What one of them has put out lies where another may compute: it holds until the next of the same recorder runs. Whoever needs
    the outputs of two at a time takes two recorders.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """As in Recorder."""
        usual = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: theirs are no part of this, and nothing of ours forbids them anything.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run()
        return graph.replay, outputs


def rerun(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """Stands in for a recorder where there is no GPU: runs all again, into the same outputs."""
    outputs = [output.clone() for output in run()]

    def replay() -> None:
        for output, new in zip(outputs, run(), strict=True):
            output.copy_(new)

    return replay, outputs


@dataclass(frozen=True, slots=True)
class _Recording:
    inputs: list[Tensor]
    replay: Callable[[], None]
    outputs: list[Tensor]


class Replayed:
    """A function that is recorded for each kind of inputs, the ``most`` lately used of which are kept."""

    def __init__(self, record: Recorder, most: int = 256) -> None:
        self._record, self._most = record, most
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()

    def __len__(self) -> int:
        """Recordings that there are."""
        return len(self._recordings)

    def __call__(self, kind: Hashable, function: Function, inputs: list[Tensor], device: torch.device) -> list[Tensor]:
        """``function`` of ``inputs``, which may be on the CPU; outputs hold until the next call.

        Inputs of a ``kind`` have the same shapes, and the function does the same with them.
        """
        recording = self._recordings.get(kind)
        if recording is None:
            kept = [tensor.to(device, copy=True) for tensor in inputs]
            replay, outputs = self._record(lambda: function(kept))
            recording = self._recordings[kind] = _Recording(kept, replay, outputs)
            if len(self._recordings) > self._most:
                self._recordings.popitem(last=False)
        else:
            self._recordings.move_to_end(kind)
            for there, given in zip(recording.inputs, inputs, strict=True):
                there.copy_(given, non_blocking=True)
        recording.replay()
        return recording.outputs


def rounded(count: int, most: int) -> int:
    """The next of 1, 2, 4, 8, … texts, at most ``most``: so few sizes are recorded."""
    return min(1 << (count - 1).bit_length(), most)


def padded(tensor: Tensor, count: int) -> Tensor:
    """With its last row repeated until there are ``count``."""
    return tensor if len(tensor) == count else torch.cat((tensor, tensor[-1:].expand(count - len(tensor), *tensor.shape[1:])))
