"""What drafters write alone: answers that their target begins and, at a cut, leaves to them, beside what it would have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from app.tools.formats import tool_format
from app.tools.parsing import ToolParser
from benchmarks.decoding import decode
from benchmarks.machine import provenance
from benchmarks.prompts import Prompt
from models.edge_bundle import read_bundle
from speculative.common_prefix import common_prefix
from speculative.config import BUNDLED, EngineConfig, MemoryFormat
from speculative.drafters.moa import MoADrafter
from speculative.drafters.moa_edge import EdgeDrafter, ReceivedMemory
from speculative.drafters.wrapper import innermost
from speculative.edge_export import export_edge
from speculative.engine import Engine
from speculative.policy import DraftShape
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import Memory, Request, SamplingParams
from speculative.sequence import Sequence as RunningSequence

SHORTEST = 8
"""Tokens of an answer from which one is cut."""

MEMORY: MemoryFormat = "int8"
"""The format in which a MoA drafter's memory comes here, as it does to an edge unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a drafter wrote from a cut on, beside the target's own rest; ``call`` tells of an answer with a tool call.

    ``common`` leading tokens are the same; ``similarity`` is twice the tokens of matching stretches over the tokens of both
    (difflib's ratio). ``call``: whether the whole answer has the target's calls, exactly; None where the target calls nothing, or
    has done so before the cut.
    """

    source: str
    cut: float
    rest: int
    common: int
    similarity: float
    call: bool | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over answers: share of the rest that is the same up to the first difference, similarity, whole rests, calls."""

    answers: int
    agreement: float
    similarity: float
    exact: float
    calls: int
    calls_exact: float


def measure(
    load: Callable[[EngineConfig], Engine],
    configs: dict[str, EngineConfig],
    prompts: Sequence[Prompt],
    *,
    cuts: Sequence[float],
    max_tokens: int,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, list[Continuation]]]:
    """Each drafter of ``configs`` as it is done: its continuations of the target's greedy answers, at each of ``cuts`` (shares).

    Answers of fewer than 8 tokens are left out. Drafters write greedily until an end token, or half as much again as the target.
    """
    for name, config in configs.items():
        engine = load(replace(config, draft_depth=1, draft_breadth=1, draft_nodes=1))
        write: Callable[[RunningSequence, list[Memory], int], list[int]]
        if isinstance(moa := innermost(engine.drafter), MoADrafter):
            write = _FromMemory(config, moa)
        else:
            longest = _allowed(max_tokens)
            engine = load(replace(config, draft_depth=longest, draft_breadth=1, draft_nodes=longest, draft_min_reach=0.0))
            write = _AsOneDraft(engine)
        yield name, list(_continuations(engine, write, prompts, cuts, max_tokens, progress))


def _allowed(rest: int) -> int:
    return rest + rest // 2 + 4


def _continuations(
    engine: Engine,
    write: Callable[[RunningSequence, list[Memory], int], list[int]],
    prompts: Sequence[Prompt],
    cuts: Sequence[float],
    max_tokens: int,
    progress: Callable[[], None],
) -> Iterator[Continuation]:
    for number, prompt in enumerate(prompts):
        answer = decode(engine, prompt, SamplingParams(max_tokens, temperature=0.0, speculative=False)).token_ids
        for cut in cuts if len(answer) >= SHORTEST else ():
            given = answer[: round(cut * len(answer))]
            request = Request(
                f"alone {number} {cut}",
                prompt.token_ids,
                SamplingParams(max_tokens, temperature=0.0),
                remote=True,
                memory=None if engine.memory is None else MEMORY,
                output_token_ids=given,
            )
            engine.add(request)
            memory: list[Memory] = []
            while engine.has_work:  # until its first token: then it waits for a tree
                memory += [output.memory for output in engine.step() if output.memory is not None]
            sequence = engine.scheduler.find(request.request_id)
            if sequence is None:  # that was the answer's last
                continue
            known = sequence.tokens[len(prompt.token_ids) :]
            rest = list(answer[len(known) :])
            written = _ended(write(sequence, memory, _allowed(len(rest))), engine.eos_token_ids)
            yield _compared(engine, prompt.source, cut, known, rest, written)
            engine.abort(request.request_id)
        progress()


class _FromMemory:
    """As an edge goes on: token by token, from the memory that had come."""

    def __init__(self, config: EngineConfig, beside_target: MoADrafter) -> None:
        with TemporaryDirectory() as folder:
            drafter = BUNDLED if config.drafter == "auto" else config.drafter
            export_edge(config.model, drafter, Path(folder) / "edge", dtype="float32")
            bundle = read_bundle(Path(folder) / "edge", dtype=torch.float32)
        length = beside_target.caches[0].length
        self._edge = EdgeDrafter(bundle.drafter, bundle.target, 1, length, DraftShape(1, 1, 1), beside_target.window)
        self._edge.pack()
        self._codec = MemoryCodec.of(beside_target.config, MEMORY)

    @torch.inference_mode()
    def __call__(self, sequence: RunningSequence, memory: list[Memory], count: int) -> list[int]:
        edge, codec, tokens = self._edge, self._codec, list(sequence.tokens)
        for each in memory:
            rows = codec.rows.decode(each.rows)
            positions = torch.arange(each.first, each.first + len(rows))
            slots = torch.zeros_like(positions)
            newest = None if codec.newest is None else codec.newest.decode(each.newest)
            edge.extend(ReceivedMemory(slots, positions, torch.tensor(tokens)[positions], rows, slots[:1], newest))
        text = replace(sequence, tokens=tokens, slot=0)
        for _ in range(count):
            tokens.append(int(edge.logits(text).argmax()))
            edge.foresee(0, text.num_computed, tokens[-2:-1])
            text.num_computed += 1
        edge.forget(text)
        return tokens[-count:]


class _AsOneDraft:
    """A chain as long as the rest: what drafters with keys and values, or features, of their own go on with."""

    def __init__(self, engine: Engine) -> None:
        assert engine.drafter is not None
        self._drafter, self._cache, self._shape = innermost(engine.drafter), engine.cache, engine.largest_shape

    @torch.inference_mode()
    def __call__(self, sequence: RunningSequence, memory: list[Memory], count: int) -> list[int]:
        assert self._drafter is not None
        drafted_here = replace(sequence, request=replace(sequence.request, remote=False))
        shape = replace(self._shape, depth=count, nodes=count)
        tokens: list[int] = self._drafter.propose([drafted_here], shape, self._cache).tokens[0].tolist()
        return tokens


def _ended(tokens: list[int], ends: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:end]


def _compared(engine: Engine, source: str, cut: float, known: list[int], rest: list[int], written: list[int]) -> Continuation:
    similarity = SequenceMatcher(None, rest, written, autojunk=False).ratio()
    before, wanted, got = (_calls(engine, tokens) for tokens in (known, [*known, *rest], [*known, *written]))
    call = None if before == wanted else wanted == got
    return Continuation(source, cut, len(rest), common_prefix(rest, written), similarity, call)


def _calls(engine: Engine, tokens: list[int]) -> list[tuple[str, str]]:
    """The tool calls of an answer: names, and arguments as they are written."""
    format = tool_format("auto", engine.tokenizer)
    assert engine.tokenizer is not None
    if format is None:
        return []
    parser = ToolParser(format, frozenset())
    calls: dict[int, list[str]] = {}
    for delta in parser.feed(str(engine.tokenizer.decode(tokens, skip_special_tokens=True)), final=True).calls:
        name, arguments = calls.setdefault(delta.index, ["", ""])
        calls[delta.index] = [name + (delta.name or ""), arguments + delta.arguments]
    return [(name, arguments) for name, arguments in calls.values()]


def figures(continuations: Sequence[Continuation]) -> Figures:
    """Pool them; NaN where there are none."""
    calls = [each.call for each in continuations if each.call is not None]
    return Figures(
        answers=len(continuations),
        agreement=_mean(each.common / each.rest for each in continuations),
        similarity=_mean(each.similarity for each in continuations),
        exact=_mean(each.similarity == 1.0 for each in continuations),
        calls=len(calls),
        calls_exact=_mean(calls),
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return fmean(listed) if listed else float("nan")


def to_json(results: dict[str, list[Continuation]], settings: dict[str, Any]) -> str:
    """All figures by drafter and cut, and what they were taken with."""
    rows = [
        {"drafter": name, "cut": cut, **{field: _rounded(value) for field, value in asdict(figures(some)).items()}}
        for name, continuations in results.items()
        for cut in sorted({each.cut for each in continuations})
        for some in [[each for each in continuations if each.cut == cut]]
    ]
    return json.dumps({"provenance": provenance().as_dict(), "settings": settings, "results": rows}, indent=1)


def _rounded(value: float) -> float | None:
    return None if value != value else round(value, 3)
