"""Bundles for an edge: what is in them, and that they draft as the whole drafter does."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from websockets.asyncio.server import ServerConnection, serve

from models.config import DecoderConfig
from models.edge_bundle import EdgeBundle, read_bundle
from models.edge_saving import write_bundle
from models.errors import CheckpointError
from models.int8 import Int8Linear, quantize
from models.loader import load_drafter, load_target
from models.moa import tokens_before
from models.saving import save_drafter, save_target
from speculative.config import EngineConfig
from speculative.detokenizer import Detokenizer
from speculative.drafters.moa_edge import EdgeDrafter, ReceivedMemory
from speculative.edge.config import EdgeConfig
from speculative.edge.engine import EdgeEngine
from speculative.edge.opening import Server as Address
from speculative.edge.text import EdgeText
from speculative.edge_export import export_edge
from speculative.errors import (
    EngineError,
    EngineLoadError,
    EngineNotReadyError,
    EngineStepError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from speculative.loading import load_engine
from speculative.policy import DraftShape, FixedPolicy
from speculative.remote import frames as f
from speculative.remote.memory_codec import MemoryCodec
from speculative.remote.packing import pack_tokens
from speculative.request import Request, SamplingParams
from speculative.sampler import Sampler
from speculative.sequence import Sequence
from tests.speculative.conftest import MOA_KINDS, N0, N1, MakeEngine, random_moa, request, run
from tests.speculative.edge import Beside, put_beside
from tests.speculative.edge_client.test_connection import hear, tell
from training.forward import DraftForward
from training.masks import cross_attention_mask, self_attention_mask

KINDS = ("moa", *MOA_KINDS)
Play = Callable[[ServerConnection, f.Welcome], Awaitable[None]]
PROMPTS = [[5, 9, 23, 41, 7, 9, 23], [11] * 30, [3, 77, 150], [60, 61, 62, 63, 64], list(range(20, 45)), [8, 8]]


@pytest.fixture(scope="module")
def drafters(drafter_folders: dict[str, Path]) -> dict[str, Path]:
    """Those that can be exported, by kind."""
    return drafter_folders | {"moa": N0 / "drafter"}


@pytest.fixture
def export(drafters: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Exports a drafter of a kind with N0's target; gives the folder."""

    def export(kind: str = "moa", **options: Any) -> Path:
        out = tmp_path / "edge"
        export_edge(str(N0 / "target"), str(drafters[kind]), out, **{"dtype": "float32", **options})
        return out

    return export


def beside(make_engine: MakeEngine, drafters: dict[str, Path], kind: str, bundle: EdgeBundle, **settings: Any) -> Beside:
    """An engine that has decoded six prompts with both drafters."""
    engine = make_engine(drafter=str(drafters[kind]), prefix_cache_tokens=0, prefill_chunk=7, **settings)
    both = put_beside(engine, bundle)
    sampling: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_k": 9, "seed": 1},
    ]
    run(engine, [request(str(i), prompt, max_tokens=7 + 2 * i, **sampling[i % 3]) for i, prompt in enumerate(PROMPTS)])
    return both


@pytest.mark.parametrize(("slots", "window"), [(1, 5), (4, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_edge_proposes_what_the_whole_drafter_does(
    make_engine: MakeEngine, drafters: dict[str, Path], export: Callable[..., Path], kind: str, slots: int, window: int
) -> None:
    bundle = read_bundle(export(kind), dtype=torch.float32)
    beside(make_engine, drafters, kind, bundle, max_num_seqs=slots, draft_window=window).assert_same_trees()


def test_tied_embeddings_are_stored_and_held_once(make_engine: MakeEngine, drafters: dict[str, Path], tmp_path: Path) -> None:
    target = load_target(N0 / "target", dtype=torch.float32)[0]
    target.config = replace(target.config, tie_word_embeddings=True)
    target.tie_embeddings()
    save_target(target, tmp_path / "target", N0 / "target", dtype=torch.float32)
    for quantization in (None, "int8"):
        out = tmp_path / f"edge-{quantization}"
        export_edge(str(tmp_path / "target"), str(drafters["block"]), out, dtype="float32", quantization=quantization)  # type: ignore[arg-type]
        assert not any("lm_head" in name for name in load_file(out / "model.safetensors"))
        bundle = read_bundle(out, dtype=torch.float32)
        assert bundle.target.lm_head is bundle.target.embedding
    tied = read_bundle(tmp_path / "edge-None", dtype=torch.float32)
    engine = load_engine(
        EngineConfig(
            str(tmp_path / "target"), str(drafters["block"]), "float32", "cpu", max_model_len=64, prefix_cache_tokens=0,
            draft_lookup=0, draft_policy="fixed", draft_min_reach=0.0, compile="off",
        )
    )  # fmt: skip
    both = put_beside(engine, tied)
    run(engine, [request(str(i), prompt, max_tokens=20, temperature=0.0) for i, prompt in enumerate(PROMPTS[:3])])
    both.assert_same_trees()


def test_whoever_may_read_the_settings_may_read_the_weights(export: Callable[..., Path], tmp_path: Path) -> None:
    bundle, saved = export(), tmp_path / "drafter"
    save_drafter(random_moa(), saved)
    for folder in (bundle, saved):
        modes = {file.stat().st_mode for file in folder.iterdir() if file.suffix in (".json", ".safetensors")}
        assert len(modes) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_holds_what_drafts_and_nothing_else(export: Callable[..., Path], drafters: dict[str, Path], kind: str) -> None:
    out = export(kind, dtype="bfloat16")
    stored = load_file(out / "model.safetensors")
    target, moa = load_target(N0 / "target", dtype=torch.float32)[0], None
    moa = load_drafter(drafters[kind], target.config, dtype=torch.float32)
    parts = {name.split(".")[1] for name in stored}
    assert parts <= {"embedding", "lm_head", "sa", "ca", "entry", "output_norm", "block", "draft_vocabulary"}
    assert {name for name in stored if name.startswith("drafter.entry.")} <= {
        "drafter.entry.from_token.weight",
        "drafter.entry.from_previous.weight",
        "drafter.entry.token_norm.weight",
    }
    assert stored["drafter.ca.qkv.weight"].shape == (moa.ca.q_size, target.config.hidden_size)
    extras = [module for module in (moa.sa, moa.ca, moa.block, moa.output_norm) if module is not None]
    if moa.entry is not None:
        read = (moa.entry.token_norm, moa.entry.from_token, moa.entry.from_previous)
        extras += [module for module in read if module is not None]
    count = sum(parameter.numel() for module in extras for parameter in module.parameters())
    count -= moa.ca.kv_size * target.config.hidden_size
    count += 2 * target.embedding.weight.numel()
    vocabulary = 0 if moa.draft_vocabulary is None else 4 * len(moa.draft_vocabulary)
    assert sum(tensor.nbytes for tensor in stored.values()) == 2 * count + vocabulary
    assert {file.name for file in out.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_bundle_says_of_which_pair_it_is(make_engine: MakeEngine, export: Callable[..., Path]) -> None:
    bundle = read_bundle(export(dtype="float16", quantization="int8"), dtype=torch.float32)
    served = [
        load_engine(EngineConfig(str(N0 / "target"), str(N0 / "drafter"), dtype, "cpu", compile="off", max_model_len=64)).info  # type: ignore[arg-type]
        for dtype in ("float32", "bfloat16")
    ]
    assert [info.pair for info in served] == [bundle.config.fingerprint] * 2
    assert served[0].fingerprint != served[1].fingerprint
    assert make_engine(N1, "moa").info.pair != bundle.config.fingerprint
    assert make_engine(N0, "block").info.pair != bundle.config.fingerprint
    assert (bundle.config.name, bundle.config.max_model_len) == ("target", 512)
    assert bundle.config.eos_token_ids == [2] and bundle.generation["eos_token_id"] == 2


@pytest.mark.parametrize("features", [64, 20])
def test_int8_products_are_near_those_of_the_weights(features: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(30, features), torch.randn(2, 3, features)
    weight[7] = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        linear, given = Int8Linear(features, 30, bias=True, dtype=dtype), x.to(dtype)
        linear.weight, linear.scales = quantize(weight)
        assert linear.bias is not None
        torch.nn.init.ones_(linear.bias)
        rows = linear.rows(torch.arange(30))
        assert rows.dtype == linear.dtype == dtype
        torch.testing.assert_close(rows.float(), weight, atol=0.02, rtol=0.01)
        out = linear(given)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), x @ weight.T + 1, atol=0.25, rtol=0.05)
        torch.testing.assert_close(linear.part(given, slice(4, 9)), out[..., 4:9])
        some = torch.tensor([9, 2, 2])
        torch.testing.assert_close(linear.select(some)(given) + 1, out[..., some])


@pytest.mark.parametrize("kind", ["vocabulary", "paired block and vocabulary"])
def test_int8_bundles_are_half_as_large_and_close(
    make_engine: MakeEngine, drafters: dict[str, Path], export: Callable[..., Path], kind: str
) -> None:
    sizes = []
    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8", "force": True}):
        stored = load_file(export(kind, **options) / "model.safetensors")
        sizes.append(sum(tensor.nbytes for tensor in stored.values()))
    assert 0.5 < sizes[1] / sizes[0] < 0.56
    bundle = read_bundle(export(kind, quantization="int8", force=True), dtype=torch.float32)
    whole = read_bundle(export(kind, force=True), dtype=torch.float32)
    assert bundle.drafter.sa.qkv.weight.dtype == bundle.target.embedding.weight.dtype == torch.int8
    assert bundle.drafter.sa.input_norm.weight.dtype == torch.float32
    assert sum(held(each) for each in (bundle.target, bundle.drafter)) < 0.3 * sum(
        held(each) for each in (whole.target, whole.drafter)
    )
    engine = make_engine(drafter=str(drafters[kind]), prefix_cache_tokens=0)
    both = put_beside(engine, bundle)
    logits: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for index, drafter in enumerate((both.whole, both.edge)):
        drafter.network.head.register_forward_hook(lambda _, __, out, index=index: logits[index].append(out))
    # Greedy, a level at a time: both are asked about the same roots.
    engine.policy = FixedPolicy(DraftShape(1, 1, 1))
    run(engine, [request(str(i), prompt, max_tokens=40, temperature=0.0) for i, prompt in enumerate(PROMPTS)])
    # Of each step as many as the text that has most rare tokens, −inf for those of others.
    pairs = list(zip(logits[0], logits[1], strict=True))
    assert all(torch.equal(first.isfinite(), second.isfinite()) for first, second in pairs)
    first, second = (torch.cat([each[each.isfinite()] for each in logits[index]]) for index in (0, 1))
    assert (first - second).norm() < 0.05 * first.norm()
    assert torch.cat([(first.argmax(-1) == second.argmax(-1)).flatten() for first, second in pairs]).float().mean() > 0.85


def held(network: torch.nn.Module) -> int:
    """Bytes of a network in memory."""
    return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))


def test_an_entry_wants_the_newest_memory(export: Callable[..., Path]) -> None:
    bundle = read_bundle(export("entry"), dtype=torch.float32)
    drafter = EdgeDrafter(bundle.drafter, bundle.target, 1, 16, DraftShape(2, 2, 3))
    numbers = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="newest memory"):
        drafter.extend(ReceivedMemory(numbers, numbers, numbers, torch.zeros(1, 64)))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["moa", "entry", "entry and block", "vocabulary", "paired", "ablation"])
@pytest.mark.parametrize(("known", "beyond"), [(9, 0), (9, 1), (4, 20), (0, 7)])
def test_beyond_its_memory_an_edge_drafts_as_trained(
    drafters: dict[str, Path], export: Callable[..., Path], kind: str, known: int, beyond: int
) -> None:
    """Memory of ``known`` tokens, and ``beyond`` tokens more: the training forward's row there, and in slot 0 of two."""
    bundle = read_bundle(export(kind), dtype=torch.float32)
    target = load_target(N0 / "target", dtype=torch.float32)[0]
    moa = load_drafter(drafters[kind], target.config, dtype=torch.float32)
    text = torch.randint(3, 150, (1, known + beyond + 1), generator=torch.Generator().manual_seed(known + beyond))
    truth = target.encode(text)
    boundaries = torch.arange(text.shape[1]).unsqueeze(0) < known
    staircase = torch.zeros(1, dtype=torch.bool)
    cross = cross_attention_mask(boundaries)
    if not moa.config.attends_to_all_memory:
        cross = cross & (torch.arange(text.shape[1]) == known - 1)
    block, moa.block = moa.block, None  # of a block only the root is asked for, which is what SA and CA give
    masks, wanted = (self_attention_mask(boundaries, staircase), cross), torch.arange(text.shape[1]).unsqueeze(0) == known + beyond
    feature = DraftForward(moa)(target, text, truth, *masks, boundaries, wanted).feature[0]
    moa.block = block

    edge = EdgeDrafter(bundle.drafter, bundle.target, 2, 64, DraftShape(4, 2, 6))
    tokens = text[0].tolist()
    sequence = Sequence(
        request("a", tokens, temperature=0.0), Sampler(SamplingParams(), 0, tokens, ()), 64, Detokenizer(None), tokens, slot=0
    )
    sequence.num_computed = known + beyond
    if known:
        positions, slots = torch.arange(known), torch.zeros(known, dtype=torch.long)
        memory = moa.memory(truth.kv[0, :known], truth.hidden[0, :known])
        if moa.config.paired:
            beginning = text[:, :known]
            memory = moa.with_own(memory, target.embed(beginning[0]), target.embed(tokens_before(beginning)[0]))
            memory = moa.with_following(memory, target.embed(text[0, 1 : known + 1]))
        moa.rotary.reserve(64, memory)
        crossing = moa.cross_keys_values(memory, moa.rotary(positions))
        edge.extend(ReceivedMemory(slots, positions, text[0, :known], crossing, slots[:1], memory[-1:]))
    edge.foresee(0, known, tokens[known:-1])
    logits = edge.logits(sequence)
    if known:  # a text without any memory was never trained on
        expected = target.logits(feature.unsqueeze(0))[0]
        drafted = torch.arange(len(expected))
        if moa.draft_vocabulary is not None:
            drafted = torch.cat((moa.draft_vocabulary, text[0])).unique()
        torch.testing.assert_close(logits[drafted], expected[drafted], atol=1e-4, rtol=1e-4)
        assert int(logits.isfinite().sum()) == len(drafted)
    first = edge.propose([sequence], DraftShape(1, 1, 1), None)
    assert first.tokens.tolist() == [[int(logits.argmax())]]
    edge.forget(sequence)
    assert edge.memory_ends([60]) == [60]


def test_what_was_foreseen_is_drafted_from_like_the_rest_once_its_memory_comes(
    make_engine: MakeEngine, drafters: dict[str, Path], export: Callable[..., Path]
) -> None:
    bundle = read_bundle(export("entry and block"), dtype=torch.float32)
    both = beside(make_engine, drafters, "entry and block", bundle, max_num_seqs=1, draft_window=0)
    extend = both.edge.extend
    chance = torch.Generator().manual_seed(0)

    def late(memory: ReceivedMemory) -> None:
        both.edge.foresee(0, int(memory.positions[0]), torch.randint(3, 150, (9,), generator=chance).tolist())
        both.edge.foresee(0, int(memory.positions[0]), memory.token_ids.tolist())
        extend(memory)

    both.edge.extend = late  # type: ignore[method-assign]
    engine = make_engine(drafter=str(drafters["entry and block"]), prefix_cache_tokens=0, max_num_seqs=1, draft_window=0)
    engine.drafter, both.trees = both, []
    run(engine, [request("a", PROMPTS[0], max_tokens=30, temperature=0.0)])
    both.assert_same_trees()


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps({name: value for name, value in {**json.loads(path.read_text()), **changes}.items() if value != "gone"})
    )


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    edit(folder, files={})


def flip(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-50] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        edit(folder, files={})

    return damage


def foreign(source: Path) -> Callable[[Path], None]:
    def replace_all(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(source, folder)

    return replace_all


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "no folder"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json, so it is no bundle: moaserve export-edge"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (foreign(N0 / "target"), r"is no bundle \(LlamaForCausalLM\): moaserve export-edge"),
        (lambda folder: edit(folder, format_version=2), "format 2, and this moaserve reads 1"),
        (lambda folder: edit(folder, fingerprint="gone"), "is damaged .*fingerprint"),
        (lambda folder: edit(folder, quantization="int3"), "is damaged .*quantization"),
        (lambda folder: edit(folder, target={"architectures": ["LlamaForCausalLM"]}), "has no .num_attention_heads."),
        (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors: copy the whole bundle again"),
        (flip, "model.safetensors is not what was exported"),
        (lambda folder: edit(folder, files={"../secret": "blake2b:0"}), "lacks ../secret"),
        (truncate, "model.safetensors is damaged"),
        (lambda folder: edit(folder, quantization="int8"), "lacks weights for .*scales"),
        (lambda folder: edit(folder, draft_vocabulary_size=7), "says 7 draft tokens, and the weights have 50"),
        (change_tensors(lambda tensors: tensors.pop("drafter.ca.qkv.weight")), "lacks weights for drafter.ca.qkv.weight"),
        (change_tensors(lambda tensors: tensors.update(lsa=torch.ones(2))), "has weights for lsa"),
        (change_tensors(lambda tensors: tensors["drafter.draft_vocabulary"].add_(150)), "no token of the 160"),
        (
            change_tensors(lambda tensors: tensors.update({"target.lm_head.weight": torch.ones(160, 32)})),
            r"target.lm_head.weight has shape \(160, 32\), the config asks for \(160, 64\)",
        ),
        (
            change_tensors(lambda tensors: tensors.update({"target.lm_head.weight": torch.ones(160, 64).to(torch.int8)})),
            "target.lm_head.weight holds torch.int8",
        ),
    ],
)  # fmt: skip
def test_what_is_no_whole_bundle_is_refused(export: Callable[..., Path], damage: Callable[[Path], Any], message: str) -> None:
    out = export("vocabulary")
    damage(out)
    with pytest.raises(CheckpointError, match=message):
        read_bundle(out, dtype=torch.float32)


def test_a_drafter_that_runs_through_borrowed_layers_stays_with_its_target(export: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError, match=r"the target's last 1 layers .*stay on the server; only .*N = 0"):
        export_edge(str(N1 / "target"), str(N1 / "drafter"), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    out = export()
    edit(out, drafter={**json.loads((out / "config.json").read_text())["drafter"], "target_layer_inference": 1})
    with pytest.raises(CheckpointError, match="only drafters with N = 0"):
        read_bundle(out, dtype=torch.float32)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "tie_word_embeddings": True},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_theta": 5e5,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ],
)
def test_sizes_of_targets_are_written_as_they_are_read(config: dict[str, Any]) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    read = DecoderConfig.from_hf({**sizes, "num_key_value_heads": 2, **config})
    assert DecoderConfig.from_hf(json.loads(json.dumps(read.to_hf()))) == read


def test_large_weights_are_cut_into_shards(drafters: dict[str, Path], tmp_path: Path) -> None:
    target = load_target(N0 / "target", dtype=torch.float32)[0]
    moa = load_drafter(drafters["moa"], target.config, dtype=torch.float32)
    for max_shard in ("60KB", "1MB"):
        write_bundle(
            tmp_path / "edge", target, moa, N0 / "target", name="n0", fingerprint="", eos_token_ids=frozenset(), dtype="float32",
            max_shard=max_shard,
        )  # fmt: skip
        shards = list((tmp_path / "edge").glob("*.safetensors"))
        assert (len(shards) > 3) == (max_shard == "60KB") and all(shard.stat().st_size < 70_000 for shard in shards[:-1])
        assert torch.equal(read_bundle(tmp_path / "edge", dtype=torch.float32).target.embedding.weight, target.embedding.weight)
    assert {file.name for file in (tmp_path / "edge").iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "diary.txt").touch()
    with pytest.raises(CheckpointError, match="something else than a bundle"):
        write_bundle(
            tmp_path / "other", target, moa, N0 / "target", name="n0", fingerprint="", eos_token_ids=frozenset()
        )  # fmt: skip
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["diary.txt"]


def test_int8_weights_may_stand_anywhere_in_memory() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(33, 96), torch.randn(5, 96).bfloat16()
    linear = Int8Linear(96, 33, dtype=torch.bfloat16)
    linear.weight, linear.scales = quantize(weight)
    expected = linear(x)
    linear.weight = torch.cat((torch.zeros(1, dtype=torch.int8), linear.weight.flatten()))[1:].view(33, 96)
    elsewhere = torch.cat((torch.zeros(1, dtype=torch.bfloat16), x.flatten()))[1:].view(5, 96)
    assert torch.equal(linear(elsewhere), expected)


async def test_garbage_is_not_looked_for_in_what_an_edge_has_loaded(export: Callable[..., Path]) -> None:
    engine = EdgeEngine(EdgeConfig(Address("ws://127.0.0.1:9"), export(), offline="keep", compile="off", num_threads=1))
    gc.unfreeze()
    await engine.start()
    await engine.wait_ready()
    assert gc.get_freeze_count() > 0
    await engine.stop()


@asynccontextmanager
async def edge_of(bundle: Path, play: Play, **settings: Any) -> AsyncIterator[EdgeEngine]:
    """An edge whose server is played, for each connection anew, by who is told what the greeting is to be."""
    read = read_bundle(bundle, dtype=torch.float32)
    codec = MemoryCodec.of(read.drafter.config, "int8")
    model = f.Model("m", read.config.max_model_len, 160, b"", codec.bytes_per_token, codec.newest_bytes)
    welcome = f.Welcome(1, "int8", f.ServerLimits(2**20, 16, 64, 2, 4, 60.0), model)

    async def run(socket: ServerConnection) -> None:
        assert isinstance(await hear(socket), f.Hello)
        await play(socket, welcome)

    async with serve(run, "127.0.0.1", 0, compression=None, close_timeout=0.1) as server:
        address = Address(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        engine = EdgeEngine(EdgeConfig(address, bundle, compile="off", num_threads=1, **settings))
        await engine.start()
        try:
            await engine.wait_ready()
            yield engine
        finally:
            await engine.stop()


STARTING = f.Error("not_ready", "the model is loading", retryable=True)
ASKED = request("a", [5, 6, 7], max_tokens=1, seed=1, prompt_logprobs=0)


async def test_log_probabilities_that_come_in_parts_are_told_at_once(export: Callable[..., Path]) -> None:
    async def play(socket: ServerConnection, welcome: f.Welcome) -> None:
        await tell(socket, welcome)
        assert isinstance(await hear(socket), f.Open)
        parts = [f.Result(0, 0, 3, b"", prompt_logprobs=(f.Logprob(token, -1.0),)) for token in (6, 7)]
        last = f.Result(0, 0, 3, pack_tokens([8]), text_delta="x", finish_reason="length")
        await tell(socket, f.Opened(0, b"token", 3, 0, 1), *parts, last)
        await socket.wait_closed()

    async with edge_of(export(), play) as engine:
        (output,) = [output async for output in engine.generate(ASKED)]
        assert [each.token_id for each in output.prompt_logprobs or ()] == [6, 7]


async def test_an_edge_whose_server_has_another_pair_by_now_says_so(export: Callable[..., Path]) -> None:
    connections = 0

    async def play(socket: ServerConnection, welcome: f.Welcome) -> None:
        nonlocal connections
        connections += 1
        if connections > 1:
            return await tell(socket, f.Error("wrong_model", "export the bundle anew"))
        await tell(socket, welcome)
        assert isinstance(await hear(socket), f.Open)
        await tell(socket, f.Error("wrong_model", "another pair by now", session=0))
        await socket.wait_closed()

    async with edge_of(export(), play) as engine:
        with pytest.raises(ServerUnreachableError, match="another pair by now"):
            await anext(engine.generate(ASKED))
        while connections < 2 or engine._loaded().link.problem is None or not engine._loaded().link.problem.permanent:
            await asyncio.sleep(0.01)
        with pytest.raises(ServerUnreachableError, match="export the bundle anew"):
            engine.validate(ASKED)
        edge = engine.status().edge
        assert edge is not None and edge.refuses, "whatever becomes of other texts"


async def test_an_edge_that_answers_nothing_alone_waits_for_a_server_that_starts(
    export: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    greetings = iter([STARTING, STARTING])

    async def play(socket: ServerConnection, welcome: f.Welcome) -> None:
        await tell(socket, next(greetings, welcome))
        await socket.wait_closed()

    with caplog.at_level("INFO", "moaserve.edge"):
        async with edge_of(export(), play, offline="stop") as engine:
            assert engine.ready and next(greetings, None) is None
    assert ["waiting for it" in line for line in caplog.messages].count(True) == 1


@pytest.mark.parametrize(("offline", "refuses"), [("stop", True), ("keep", False)])
async def test_a_server_that_is_away_is_no_use_where_nothing_is_written_alone(
    export: Callable[..., Path], offline: str, refuses: bool
) -> None:
    leaving, connections = asyncio.Event(), 0

    async def play(socket: ServerConnection, welcome: f.Welcome) -> None:
        nonlocal connections
        connections += 1
        if connections > 1:
            return await tell(socket, STARTING)
        await tell(socket, welcome)
        await leaving.wait()

    async with edge_of(export(), play, offline=offline, reconnect_timeout=0.0) as engine:
        edge = engine.status().edge
        assert edge is not None and edge.server_up and not edge.refuses
        leaving.set()
        while connections < 2:
            await asyncio.sleep(0.01)
        edge = engine.status().edge
        assert edge is not None and not edge.server_up and edge.refuses is refuses
        assert engine.ready, "the bundle is there"


@pytest.mark.parametrize(("code", "raised"), [("limit_exceeded", ServerTimeoutError), ("invalid_field", EngineStepError)])
async def test_a_text_that_its_server_ends_says_why(
    export: Callable[..., Path], caplog: pytest.LogCaptureFixture, code: str, raised: type[EngineError]
) -> None:
    async def play(socket: ServerConnection, welcome: f.Welcome) -> None:
        await tell(socket, welcome)
        assert isinstance(await hear(socket), f.Open)
        await tell(socket, f.Opened(0, b"token", 3, 0, 1), f.Error(code, "longer than 20 seconds", session=0))
        await socket.wait_closed()

    async with edge_of(export(), play) as engine:
        with pytest.raises(raised, match="longer than 20 seconds"):
            await anext(engine.generate(ASKED))
    assert ("longer than 20 seconds" in caplog.text) is (raised is EngineStepError), "callers are not told of errors inside"


async def test_nothing_is_written_alone_where_nothing_is_wanted(export: Callable[..., Path]) -> None:
    engine = EdgeEngine(EdgeConfig(Address("ws://127.0.0.1:9"), export(), reconnect_timeout=0, compile="off", num_threads=1))
    await engine.start()
    await engine.wait_ready()
    (output,) = [output async for output in engine.generate(request("a", [5, 6, 7], max_tokens=0))]
    assert (output.new_token_ids, output.text_delta, output.finish_reason) == ((), "", "length")
    await engine.stop()


async def test_a_text_that_outlasts_a_drain_is_told_so(export: Callable[..., Path]) -> None:
    asked = asyncio.Event()

    async def play(socket: ServerConnection, welcome: f.Welcome) -> None:
        await tell(socket, welcome)
        assert isinstance(await hear(socket), f.Open)
        asked.set()
        await socket.wait_closed()

    async with edge_of(export(), play) as engine:
        writing = asyncio.create_task(anext(engine.generate(ASKED)))  # type: ignore[arg-type]
        await asked.wait()
        assert not await engine.drain(0)
        with pytest.raises(EngineNotReadyError, match="shutting down"):
            await writing


async def test_a_drafter_that_is_got_ready_for_who_has_left_is_given_back(export: Callable[..., Path]) -> None:
    engine = EdgeEngine(EdgeConfig(Address("ws://127.0.0.1:9"), export(), offline="keep", compile="off", num_threads=1))
    await engine.start()
    await engine.wait_ready()
    model, begins, may_go_on = engine._loaded().model, threading.Event(), threading.Event()
    begin = model.begin

    def slow(asked: Request, length: int) -> EdgeText:
        begins.set()
        may_go_on.wait()
        return begin(asked, length)

    model.begin = slow  # type: ignore[method-assign]
    for _ in range(3):
        begins.clear()
        may_go_on.clear()
        waiting = asyncio.create_task(anext(engine.generate(ASKED)))  # type: ignore[arg-type]
        await asyncio.to_thread(begins.wait)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while engine._tasks:
            await asyncio.sleep(0)
        may_go_on.set()
        await engine._worker.compute(lambda: None)  # what is behind it there has been done
        assert not model._drafters.of and len(model._free) == 1
    await engine.stop()
