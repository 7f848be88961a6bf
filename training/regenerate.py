"""Conversations with the assistant's turns written anew by the target.

A drafter is asked to continue what the target writes, which is not what the corpus says: a weak target errs in its own ways. Turns
are written one after another, each after the target's own earlier ones and the corpus's words of all other roles.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm

from models import tiled_decoder, tiles
from models.digest import digest_weights
from models.durable import workshop
from models.kv_cache import KVCache
from models.llama import Llama
from models.plans import decode_plan_within, prefill_plan, recorded_span, span_of
from models.replay import CudaRecorder, Recorder, Replayed, rounded
from training.corpus import PREFIX, Corpus, Row, kept, store, stored
from training.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Writing:
    """How the target writes: ``temperature`` below GREEDY is greedy; a turn ends at an end token or after ``max_turn`` tokens.

    A turn cut off ends its conversation, and so does reaching ``max_length``. ``slots`` conversations are written side by side.
    What others say is read in passes of its own, or where it goes ``in_step``, a token with every one that the rest write: that
    takes more steps and fewer launches, which is what costs on a GPU.
    """

    end_tokens: frozenset[int]
    max_length: int
    temperature: float = 0.0
    max_turn: int = 256
    slots: int = 64
    in_step: bool = False
    seed: int = 0

    @classmethod
    def on(cls, target: Llama, end_tokens: frozenset[int], max_length: int, *, temperature: float, seed: int) -> Writing:
        """What suits the device that ``target`` is on."""
        if target.device.type == "cpu":
            return cls(end_tokens, max_length, temperature, seed=seed)
        config = target.config
        conversation = max_length * config.kv_size * config.num_layers * target.dtype.itemsize
        free, _ = torch.cuda.mem_get_info(target.device)
        slots = max(1, min(_GPU_SLOTS, free // 2 // conversation))
        return cls(end_tokens, max_length, temperature, slots=slots, in_step=True, seed=seed)


GREEDY = 1e-5
"""Temperatures below it are greedy, as in serving: logits divided by them are beyond float32."""

_GPU_SLOTS = 1024
"""Conversations side by side on a GPU, where there is room: a step of a small target takes hardly longer than with a few."""


class _Conversation:
    """One conversation while it is written: ``tokens`` so far, of which the cache holds the first ``computed``."""

    def __init__(self, tokens: npt.NDArray[np.int32], response: npt.NDArray[np.bool_]) -> None:
        edges = np.flatnonzero(np.diff(response.astype(np.int8), prepend=0) == 1)
        ends = np.flatnonzero(np.diff(response.astype(np.int8), append=0) == -1) + 1
        starts = np.concatenate(([0], ends[:-1]))
        self.given = [tokens[start:edge].tolist() for start, edge in zip(starts, edges, strict=True)]
        self.tokens: list[int] = []
        self.response: list[bool] = []
        self.computed = 0
        self.turn_length = 0
        self.next_part()

    def next_part(self) -> None:
        """Take what others say before the next turn."""
        part = self.given.pop(0)
        self.tokens += part
        self.response += [False] * len(part)
        self.turn_length = 0

    @property
    def reading(self) -> bool:
        """Whether tokens are left that the cache lacks, so that what the target would say now is not asked for."""
        return self.computed < len(self.tokens)

    def write(self, token: int, writing: Writing) -> bool:
        """Take one token of the target; False when the conversation is over."""
        self.tokens.append(token)
        self.response.append(True)
        self.turn_length += 1
        if token in writing.end_tokens:
            if not self.given or len(self.tokens) + len(self.given[0]) >= writing.max_length:
                return False
            self.next_part()
            return True
        return self.turn_length < writing.max_turn and len(self.tokens) < writing.max_length

    def row(self) -> Row:
        """What has been written."""
        return np.array(self.tokens, dtype=np.int32), np.array(self.response, dtype=np.bool_)


def regenerated(corpus: Corpus, count: int, target: Llama, writing: Writing, cache: Path, accelerator: Accelerator) -> Corpus:
    """``count`` conversations drawn from a corpus and written anew, each process a share of them; kept in ``cache``.

    Raises ConfigError where processes do not share ``cache``, in which they find one another's shares, DataError where none can be
    written.
    """
    if accelerator.num_processes > 1:
        _check_shared(cache)
    # How many are written side by side is a matter of room: texts are as good either way.
    digest = hashlib.sha256(f"{corpus.key} {count} {replace(writing, slots=1)}".encode())
    digest_weights(target, digest)
    folder = cache / digest.hexdigest()[:24]
    drawn = np.random.default_rng(writing.seed).permutation(len(corpus))[:count]
    rank, world = accelerator.process_index, accelerator.num_processes
    # Another number of processes shares the work otherwise: what such a run left is no part of this one's.
    parts = [folder.with_name(f"{folder.name}-{each}-of-{world}") for each in range(world)]
    tell = accelerator.is_main_process
    if kept(folder, tell=tell) is None and kept(parts[rank]) is None:
        share = [int(index) for index in drawn[rank::world]]
        store(regenerate(corpus, share, target, writing, progress=tell), parts[rank])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and kept(folder) is None:
        written = [stored(part) for part in parts]
        store([part.row(index, 1 << 62) for part in written for index in range(len(part))], folder)
        for part in cache.glob(f"{folder.name}-*"):
            shutil.rmtree(part, ignore_errors=True)  # another run may do the same
    accelerator.wait_for_everyone()
    whole = stored(folder)
    if not len(whole):
        raise DataError(
            f"--regenerate: of {len(drawn)} conversations none has an answer that begins within --max-length {writing.max_length}"
        )
    if tell and len(whole) < len(drawn):
        print(
            f"--regenerate: {len(drawn) - len(whole)} of {len(drawn)} conversations have no answer that begins within --max-length "
            f"{writing.max_length} and are left out",
            file=sys.stderr,
        )
    return whole


def _check_shared(cache: Path) -> None:
    """Raise ConfigError in all processes, before anything is written, where one does not see another's files in ``cache``."""
    cache.mkdir(parents=True, exist_ok=True)
    with workshop(cache, PREFIX) as own:
        names = gather_object([own.name])
        # That all have looked is known once all have told: nobody's folder goes before.
        apart = any(gather_object([not all((cache / name).exists() for name in names)]))
    if apart:
        raise ConfigError(
            f"--regenerate: processes find one another's answers in --cache, and {cache} is not the same folder for all of them: "
            "name one that the machines share"
        )


@torch.inference_mode()
def regenerate(corpus: Corpus, indices: Sequence[int], target: Llama, writing: Writing, *, progress: bool) -> list[Row]:
    """The conversations with these indices, their assistant turns written by ``target``, in the order in which they end."""
    with _compiled(target):
        return _regenerate(corpus, indices, target, writing, progress=progress)


@contextmanager
def _compiled(target: Llama) -> Iterator[None]:
    """Let our operator, where it is at hand, stand in for the target's layers: it writes some three times as fast."""
    earlier = target.compiled
    if earlier is None and target.device.type == "cpu" and tiles.loaded() and tiled_decoder.suits(target):
        target.compiled = tiled_decoder.tiled_decoder(target)
    try:
        yield
    finally:
        target.compiled = earlier


def _regenerate(corpus: Corpus, indices: Sequence[int], target: Llama, writing: Writing, *, progress: bool) -> list[Row]:
    if not len(indices):
        return []
    if writing.in_step:
        # Attention reads as far as the longest text goes; and the last to end should be short.
        lengths = corpus.lengths(writing.max_length)
        indices = sorted(indices, key=lambda index: -int(lengths[index]))
    cache = target.new_cache(min(writing.slots, len(indices)), 0, writing.max_length)
    step = _Step(target, cache)
    generator = torch.Generator(device=target.device).manual_seed(writing.seed)
    rows: list[Row] = []
    with tqdm(total=len(indices), desc="regenerate", unit=" conversations", disable=not progress, smoothing=0) as bar:
        waiting = _writable(corpus, indices, writing.max_length)
        slots = list(islice(waiting, cache.num_slots))
        while slots:
            if not writing.in_step:
                for slot, conversation in enumerate(slots):
                    _prefill(target, cache, slot, conversation)
            following: list[_Conversation] = []
            for slot, (conversation, token) in enumerate(zip(slots, _decode(step, slots, writing, generator), strict=True)):
                if conversation.reading or conversation.write(token, writing):
                    kept: _Conversation | None = conversation
                else:
                    rows.append(conversation.row())
                    bar.update()
                    kept = next(waiting, None)
                if kept is not None:
                    if kept is conversation and slot != len(following):
                        cache.move_slot(slot, len(following), kept.computed)
                    following.append(kept)
            slots = following
    return rows


def _writable(corpus: Corpus, indices: Sequence[int], max_length: int) -> Iterator[_Conversation]:
    """Conversations whose first turn begins within ``max_length``."""
    for index in indices:
        tokens, response = corpus.row(index, 1 << 62)
        if 0 < int(response.argmax()) < max_length:
            yield _Conversation(tokens, response)


def _prefill(target: Llama, cache: KVCache, slot: int, conversation: _Conversation) -> None:
    """Run all but the newest token."""
    start, end = conversation.computed, len(conversation.tokens) - 1
    if start >= end:
        return
    plan = prefill_plan(cache, target.config.groups, slot, start, end)
    target(torch.tensor(conversation.tokens[start:end], device=target.device), plan, cache, wanted=end - start)
    conversation.computed = end


class _Step:
    """One token more of every slot's text; on a GPU as a recorded graph, as launching its parts would take most of the time."""

    def __init__(self, target: Llama, cache: KVCache) -> None:
        self._target, self._cache, self.device = target, cache, target.device
        record = _recorder(self.device)
        self._replayed = None if record is None else Replayed(record)

    def __call__(self, newest: list[int], lengths: list[int]) -> Tensor:
        """The newest tokens of texts whose other tokens, ``lengths``, the cache has -> logits [B, V]."""
        count, longest = len(newest), max(lengths) + 1
        if self._replayed is None:
            return self._run(torch.tensor(newest), torch.tensor(lengths), span_of(self._cache, longest))
        span, filled = recorded_span(self._cache, longest), rounded(count, self._cache.num_slots)
        # What stands in slots without a text is nobody's.
        inputs = [torch.tensor(each + [0] * (filled - count)) for each in (newest, lengths)]
        (logits,) = self._replayed((filled, span), lambda inputs: [self._run(inputs[0], inputs[1], span)], inputs, self.device)
        return logits[:count]

    def _run(self, newest: Tensor, lengths: Tensor, span: int) -> Tensor:
        plan = decode_plan_within(self._cache, self._target.config.groups, lengths, span)
        return self._target.logits(self._target(newest, plan, self._cache))


def _recorder(device: torch.device) -> Recorder | None:
    return CudaRecorder(device) if device.type == "cuda" else None


def _decode(step: _Step, slots: list[_Conversation], writing: Writing, generator: torch.Generator) -> list[int]:
    """Run one more token of every conversation, and return what the target says after it."""
    computed = [conversation.computed for conversation in slots]
    newest = [conversation.tokens[length] for conversation, length in zip(slots, computed, strict=True)]
    logits = step(newest, computed)
    for conversation in slots:
        conversation.computed += 1
    if writing.temperature < GREEDY:
        greedy: list[int] = logits.argmax(-1).tolist()
        return greedy
    probabilities = torch.softmax(logits.float() / writing.temperature, dim=-1)
    drawn: list[int] = torch.multinomial(probabilities, 1, generator=generator).squeeze(1).tolist()
    return drawn
