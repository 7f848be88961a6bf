"""Edge and server without a network between them: the same tokens as without drafts, in as few passes as beside the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
from models.edge_bundle import EdgeBundle, read_bundle
from speculative.config import EngineConfig, MemoryFormat
from speculative.detokenizer import Detokenizer
from speculative.drafters.moa import MoADrafter
from speculative.drafters.moa_edge import EdgeDrafter, ReceivedMemory
from speculative.drafters.wrapper import innermost
from speculative.edge_export import export_edge
from speculative.engine import Engine
from speculative.loading import load_engine
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import OfferedTree, Request, RequestOutput, SamplingParams
from speculative.sampler import Sampler
from speculative.sequence import Sequence

pytestmark = pytest.mark.integration


class Edge:
    """Drafts one text at a time from what an engine's outputs tell."""

    def __init__(self, bundle: EdgeBundle, engine: Engine) -> None:
        self.shape = engine.largest_shape
        self.length, self.window = engine.info.max_model_len, innermost(engine.drafter).window  # type: ignore[union-attr]
        self.drafter = EdgeDrafter(bundle.drafter, bundle.target, 1, self.length, self.shape, self.window)
        self.drafter.pack()

    def begin(self, request: Request) -> None:
        sampler = Sampler(request.params, request.params.seed or 0, request.prompt_token_ids, ())
        tokens = list(request.prompt_token_ids)
        self.sequence = Sequence(request, sampler, self.length, Detokenizer(None), tokens, slot=0)

    def take(self, output: RequestOutput, codec: MemoryCodec) -> None:
        """Take note of what was said and of the memory that came with it."""
        sequence, memory = self.sequence, output.memory
        sequence.tokens += output.new_token_ids
        assert memory is not None
        rows = codec.rows.decode(memory.rows)
        end = memory.first + len(rows)
        sequence.num_computed = end
        newest = codec.newest.decode(memory.newest) if codec.newest is not None else None
        slots, positions = torch.zeros(len(rows), dtype=torch.long), torch.arange(memory.first, end)
        token_ids = torch.tensor(sequence.tokens[memory.first : end])
        self.drafter.extend(ReceivedMemory(slots, positions, token_ids, rows, slots[:1], newest))

    def draft(self) -> OfferedTree:
        # The engine knows this request as a remote one; here is where it is drafted for.
        drafted_here = replace(self.sequence, request=replace(self.sequence.request, remote=False))
        tree = self.drafter.propose([drafted_here], self.shape, None)
        size = tree.sizes[0]
        return OfferedTree(len(self.sequence.tokens), tuple(tree.tokens[0, :size].tolist()), tuple(tree.parents[0, :size].tolist()))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(
        EngineConfig(
            dtype="float32",
            compile="off",
            num_threads=1,
            max_num_seqs=4,
            draft_policy="fixed",
            draft_lookup=0,
            prefix_cache_tokens=0,
        )
    )


@pytest.fixture(scope="module")
def edge(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Edge:
    folder = tmp_path_factory.mktemp("bundle") / "edge"
    export_edge("bundled", "bundled", folder, dtype="float32")
    return Edge(read_bundle(folder, dtype=torch.float32), engine)


def requests(engine: Engine) -> Iterator[Request]:
    assert engine.tokenizer is not None
    for number, prompt in enumerate(load_prompts(BUNDLED_PROMPTS, engine.tokenizer, count=8, max_tokens=400, seed=0)):
        params = SamplingParams(max_tokens=64, temperature=number % 2 * 0.7, seed=number, ignore_eos=True)
        yield Request(str(number), tuple(prompt.token_ids), params)


def decoded(engine: Engine, request: Request) -> tuple[list[int], RequestOutput]:
    engine.add(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return [token for output in outputs for token in output.new_token_ids], outputs[-1]


@dataclass(frozen=True)
class Here:
    """What the engine alone writes without drafts, and in how many passes of the target it does so with its own."""

    request: Request
    tokens: list[int]
    passes: int


@pytest.fixture(scope="module")
def here(engine: Engine) -> list[Here]:
    answers = []
    for request in requests(engine):
        plain = replace(request, request_id=f"plain {request.request_id}", params=replace(request.params, speculative=False))
        tokens, _ = decoded(engine, plain)
        _, last = decoded(engine, replace(request, request_id=f"here {request.request_id}"))
        answers.append(Here(request, tokens, last.stats.num_target_calls))
    return answers


@pytest.mark.parametrize("memory", ["bfloat16", "int8", "int4"])
def test_drafting_elsewhere_gives_the_same_tokens_in_as_few_passes(
    engine: Engine, edge: Edge, here: list[Here], memory: MemoryFormat
) -> None:
    moa = innermost(engine.drafter)
    assert isinstance(moa, MoADrafter)
    codec = MemoryCodec.of(moa.config, memory)
    elsewhere = 0
    for answer in here:
        request = answer.request
        remote = replace(request, request_id=f"remote {memory} {request.request_id}", remote=True, memory=memory)
        engine.add(remote)
        edge.begin(remote)
        said: list[int] = []
        while engine.has_work:
            for output in engine.step():
                said += output.new_token_ids
                if output.finish_reason is not None:
                    elsewhere += output.stats.num_target_calls
                    continue
                edge.take(output, codec)
                if output.new_token_ids:
                    engine.offer(remote.request_id, edge.draft())
        assert said == answer.tokens
    assert elsewhere <= 1.05 * sum(answer.passes for answer in here)
