"""A target's checkpoint -> one GGUF file, as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from models.architectures import ARCHITECTURES
from models.config import DecoderConfig
from models.durable import workshop_beside
from models.errors import CheckpointError
from models.gguf_tokenizer import GGUFVocabulary, read_vocabulary
from models.loader import eos_token_ids, load_tokenizer, read_tensors, resolve_target, target_config
from models.rope import RopeConfig, frequencies

if TYPE_CHECKING:
    from gguf import GGUFWriter

DType = Literal["bfloat16", "float16", "float32"]

LLAMA = "llama"
GGUF_ARCHITECTURES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's name for each family."""


@dataclass(frozen=True, slots=True)
class ExportedGGUF:
    """What was written."""

    name: str
    architecture: str
    pre_tokenizer: str
    num_tensors: int
    size: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor by its two names, without ``.weight``; ``heads``: whose rows llama.cpp wants in another order (0: none)."""

    theirs: str
    ours: str
    shape: tuple[int, ...]
    kind: str = "weight"
    heads: int = 0


def export_gguf(model: str, out: Path, *, dtype: DType = "bfloat16", force: bool = False) -> ExportedGGUF:
    """Write weights, sizes, tokenizer and chat template of ``model`` ("bundled", a folder or a hub id) to the file ``out``.

    Matrices are stored as ``dtype``, vectors as float32. ``force`` replaces a file that is there. Raises CheckpointError with what
    llama.cpp cannot compute or split as we do, and ModuleNotFoundError without the package gguf; nothing is left behind then.
    """
    if out.is_dir():
        raise CheckpointError(f"--out {out} is a folder: name a file")
    if out.exists() and not force:
        raise CheckpointError(f"--out {out} is there already: --force replaces it")
    folder = resolve_target(model)
    config = target_config(folder)
    config.check_window()
    architecture = _architecture(config)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer, without which llama.cpp reads no model")
    vocabulary = read_vocabulary(tokenizer, config.vocab_size, eos_token_ids(folder, tokenizer))
    tensors = dict(_tensors(read_tensors(folder), config, architecture))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with workshop_beside(out) as place:
            made = place / "made.gguf"
            _write(made, architecture, folder.name, config, vocabulary, tensors, dtype)
            made.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot write --out {out}: {error}") from error
    return ExportedGGUF(folder.name, architecture, vocabulary.pre_tokenizer, len(tensors), out.stat().st_size)


def _architecture(config: DecoderConfig) -> str:
    """llama.cpp's name; raises CheckpointError for parts that its implementation has not."""
    name = GGUF_ARCHITECTURES[ARCHITECTURES[config.architecture]]
    missing = {
        "a bias of attention's output": name != LLAMA and config.output_bias,
        "a bias of queries, keys and values": name == "qwen3" and config.attention_bias,
        "rope type 'yarn'": config.rope.kind == "yarn",
        "rope type 'llama3'": name != LLAMA and config.rope.kind == "llama3",
        "heads that are not as wide together as the model": name == "qwen2"
        and config.head_dim * config.num_heads != config.hidden_size,
    }
    if what := [part for part, there in missing.items() if there]:
        raise CheckpointError(f"llama.cpp's {name} has not what this {config.architecture} has: {', '.join(what)}")
    return name


def _tensors(theirs: Mapping[str, Tensor], config: DecoderConfig, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a GGUF file, by name; raises CheckpointError for those that are not there or of another shape."""
    for wanted in _wanted(config, architecture):
        name = f"{wanted.theirs}.{wanted.kind}"
        if name not in theirs:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        tensor = theirs[name]
        if tuple(tensor.shape) != wanted.shape:
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, the config asks for {wanted.shape}")
        yield f"{wanted.ours}.{wanted.kind}", _interleaved(tensor, wanted.heads) if wanted.heads else tensor
    if config.rope.kind == "llama3":
        yield "rope_freqs.weight", llama3_divisors(config.rope, config.head_dim)


def _wanted(config: DecoderConfig, architecture: str) -> Iterator[_Wanted]:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    yield _Wanted("model.embed_tokens", "token_embd", (config.vocab_size, hidden))
    yield _Wanted("model.norm", "output_norm", (hidden,))
    if not config.tie_word_embeddings:
        yield _Wanted("lm_head", "output", (config.vocab_size, hidden))
    for index in range(config.num_layers):
        layer, block = f"model.layers.{index}", f"blk.{index}"
        yield _Wanted(f"{layer}.input_layernorm", f"{block}.attn_norm", (hidden,))
        yield _Wanted(f"{layer}.post_attention_layernorm", f"{block}.ffn_norm", (hidden,))
        products = (
            ("self_attn.q_proj", "attn_q", queries, hidden, config.attention_bias, config.num_heads),
            ("self_attn.k_proj", "attn_k", keys, hidden, config.attention_bias, config.num_kv_heads),
            ("self_attn.v_proj", "attn_v", keys, hidden, config.attention_bias, 0),
            ("self_attn.o_proj", "attn_output", hidden, queries, config.output_bias, 0),
            ("mlp.gate_proj", "ffn_gate", inner, hidden, config.mlp_bias, 0),
            ("mlp.up_proj", "ffn_up", inner, hidden, config.mlp_bias, 0),
            ("mlp.down_proj", "ffn_down", hidden, inner, config.mlp_bias, 0),
        )
        for theirs, ours, rows, columns, bias, heads in products:
            turned = heads if architecture == LLAMA else 0
            yield _Wanted(f"{layer}.{theirs}", f"{block}.{ours}", (rows, columns), heads=turned)
            if bias:
                yield _Wanted(f"{layer}.{theirs}", f"{block}.{ours}", (rows,), "bias", turned)
        if config.qk_norm:
            yield _Wanted(f"{layer}.self_attn.q_norm", f"{block}.attn_q_norm", (head,))
            yield _Wanted(f"{layer}.self_attn.k_norm", f"{block}.attn_k_norm", (head,))


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads·d, …] with the halves of each head interleaved: llama.cpp's llama turns neighbours, not halves, together."""
    turned: Tensor = rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return turned


def llama3_divisors(rope: RopeConfig, head_dim: int) -> Tensor:
    """What llama3 scaling divides each of the ``head_dim`` / 2 frequencies by, float32; see ``RopeConfig``."""
    return (frequencies(head_dim, RopeConfig(rope.theta)) / frequencies(head_dim, rope)).float()


def _write(
    path: Path,
    architecture: str,
    name: str,
    config: DecoderConfig,
    vocabulary: GGUFVocabulary,
    tensors: Mapping[str, Tensor],
    dtype: DType,
) -> None:
    from gguf import GGUFWriter, LlamaFileType

    writer = GGUFWriter(path, architecture)
    kinds = {"float32": LlamaFileType.ALL_F32, "float16": LlamaFileType.MOSTLY_F16, "bfloat16": LlamaFileType.MOSTLY_BF16}
    writer.add_name(name)
    writer.add_file_type(kinds[dtype])
    _add_sizes(writer, config)
    _add_vocabulary(writer, vocabulary)
    for tensor_name, tensor in tensors.items():
        _add_tensor(writer, tensor_name, tensor, dtype)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_sizes(writer: GGUFWriter, config: DecoderConfig) -> None:
    from gguf import RopeScalingType

    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    if config.rope.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.factor)


def _add_vocabulary(writer: GGUFWriter, vocabulary: GGUFVocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, end in zip(ends, vocabulary.ends, strict=False):
        add(end)
    # llama.cpp takes token 11 for the first one where a file names none; nobody puts it before a text.
    bos = vocabulary.bos if vocabulary.bos is not None else next(iter(vocabulary.ends), None)
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, dtype: DType) -> None:
    from gguf import GGMLQuantizationType

    if tensor.dim() == 1 or dtype == "float32":
        writer.add_tensor(name, tensor.float().contiguous().numpy())
        return
    stored = tensor.to(getattr(torch, dtype)).contiguous()
    if not stored.isfinite().all():
        raise CheckpointError(f"{name} has numbers that {dtype} cannot hold: use --dtype bfloat16 or float32")
    if dtype == "float16":
        writer.add_tensor(name, stored.numpy())
    else:  # numpy has no bfloat16: as bytes
        writer.add_tensor(name, stored.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
