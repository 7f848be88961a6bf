"""Hugging Face checkpoints and published MoA drafters <-> our networks. Safetensors only; no code from a checkpoint is ever run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from models.config import DecoderConfig, MoAConfig
from models.eagle import Eagle, EagleConfig
from models.errors import CheckpointError
from models.hub import download, repository_of
from models.layers import Linear
from models.llama import Llama
from models.moa import MoA
from models.published_layer import check_stored, decoder_states, layer_state, take
from models.reading import json_object

PRETRAINED = Path(__file__).parent / "pretrained"
BUNDLED = {"target": PRETRAINED / "concierge", "drafter": PRETRAINED / "concierge-moa"}
"""Folders of the bundled pair."""

SAMPLED = 64
"""Numbers of each weight that are looked at: where training has diverged none of them is finite."""

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""Files that a tokenizer's tokens are in."""

PICKLED = ("pytorch_model*.bin", "model*.bin", "model*.pt", "*.pth")
"""Files of weights that are never read; what trainers leave behind (training_args.bin, optimizer.pt) is none."""

MOA_EXTRAS = {"block": "draft_block", "entry": "entry", "output_norm": "output_norm"}
MOA_LAYERS = {"lsa": "layer_self_attention", "sa": "self_attention", "ca": "cross_attention"}
"""Our names of a drafter's layers, and the authors'."""

_Network = TypeVar("_Network", bound=nn.Module)


def resolve(path_or_id: str | Path, check: Callable[[dict[str, Any]], object] = lambda raw: None) -> Path:
    """A local folder as it is; anything else is a hub id, whose safetensors, configs and tokenizer are downloaded once.

    It may name a revision: ``owner/name@revision``. ``check`` is shown what a config.json holds before its weights are downloaded,
    and raises what is to be raised.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        if folder.suffix == ".gguf":
            raise CheckpointError(f"{folder} is a GGUF file, which is not read: name the folder of the safetensors it was made of")
        raise CheckpointError(f"{folder} is a file: name the folder of the checkpoint")
    if str(path_or_id).startswith((".", "/", "~")) or repository_of(str(path_or_id)).count("/") != 1:
        raise CheckpointError(f"no folder {str(path_or_id)!r} (a hub id looks like 'owner/name', or 'owner/name@revision')")
    return download(str(path_or_id), check)


def resolve_target(name: str, check: Callable[[dict[str, Any]], object] = DecoderConfig.from_hf) -> Path:
    """As ``resolve``; 'bundled' is the target that comes with the package."""
    return BUNDLED["target"] if name == "bundled" else resolve(name, check)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object in a checkpoint folder; {} when the file is absent."""
    path = folder / name
    return json_object(path) if path.exists() else {}


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json; raises CheckpointError where there is none, saying what the folder holds instead."""
    if raw := read_json(folder, "config.json"):
        return raw
    raise CheckpointError(_other_kind(folder) or f"{folder} has no config.json")


def _other_kind(folder: Path) -> str | None:
    """What a folder is that lacks a checkpoint's files, where that can be told."""
    if (folder / "adapter_config.json").exists():
        return f"{folder} is a LoRA adapter (adapter_config.json): merge it into the model that it was made for, and save that"
    if any(folder.glob("*.gguf")):
        return f"{folder} holds a GGUF file, which is not read: name the folder of the safetensors it was made of"
    return None


def eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """The tokens that end a text: those of generation_config.json or else config.json, and the tokenizer's own.

    Fine-tunes often say theirs in the tokenizer alone, and the base model's in the other files. ``tokenizer`` is the folder's,
    where it has been loaded already. Ids that the model has not are left out: no text could end with them.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        told = read_json(folder, name).get("eos_token_id")
        if told is None:
            continue
        ids = told if isinstance(told, list) else [told]
        if not all(isinstance(each, int) for each in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id must be a token's id or a list of such, it is {told!r}")
        break
    if tokenizer is None:
        tokenizer = load_tokenizer(folder)
    own = None if tokenizer is None else tokenizer.eos_token_id
    # A tokenizer that lacks the token it names gives the unknown one's id.
    if tokenizer is not None and isinstance(own, int) and tokenizer.convert_ids_to_tokens(own) == str(tokenizer.eos_token):
        ids = [*ids, own]
    size = read_json(folder, "config.json").get("vocab_size")
    return frozenset(each for each in ids if each >= 0 and (not isinstance(size, int) or each < size))


def tensor_files(folder: Path) -> list[Path]:
    """The files of a checkpoint folder's tensors, one or sharded; raises CheckpointError where one is missing."""
    index = read_json(folder, "model.safetensors.index.json")
    places = index.get("weight_map") if index else {"all": "model.safetensors"}
    if not isinstance(places, dict) or not all(isinstance(name, str) and Path(name).name == name for name in places.values()):
        raise CheckpointError(f"{folder / 'model.safetensors.index.json'} has no 'weight_map' of tensors to files beside it")
    names = sorted(set(places.values()))
    for name in names:
        if not name.endswith(".safetensors") or not (folder / name).exists():
            if not any(folder.glob("*.safetensors")) and any(any(folder.glob(each)) for each in PICKLED):
                raise CheckpointError(f"{folder} holds pickled weights only; convert them to safetensors, pickles are never loaded")
            raise CheckpointError(_other_kind(folder) or f"{folder} has no {name}: fetch it again")
    return [folder / name for name in names]


def read_tensors(folder: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, or those with a ``wanted`` name, which alone are read."""
    tensors: dict[str, Tensor] = {}
    for path in tensor_files(folder):
        with open_tensors(path) as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys() if wanted is None or wanted(name)})  # noqa: SIM118
    return tensors


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A file of tensors, no mapping: it has keys and cannot be iterated. Raises CheckpointError where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer with its chat template, None where it has none; raises CheckpointError where it cannot be read."""
    if not any((folder / name).exists() for name in VOCABULARIES):
        if (folder / "tokenizer_config.json").exists():
            raise CheckpointError(f"{folder} has a tokenizer_config.json, and no tokenizer.json: fetch it again")
        return None
    # Where a class is declared, all that is left to find out is the model's type. Its own class of configurations would load
    # PyTorch's compiler, which takes seconds.
    declared, config = read_json(folder, "tokenizer_config.json"), None
    if "tokenizer_class" in declared and "auto_map" not in declared:
        raw = read_json(folder, "config.json")
        asked = {name: each for name, each in raw.items() if name in ("model_type", "model_name", "tokenizer_class")}
        config = PreTrainedConfig.from_dict({**asked, "_name_or_path": str(folder)})
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
    except Exception as error:  # whatever its class and the libraries under it raise
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        advice = "" if (folder / "tokenizer.json").exists() else " (save it with a tokenizer.json, which needs no other package)"
        raise CheckpointError(f"the tokenizer in {folder} cannot be read{advice}: {first}") from error
    return tokenizer


def target_config(path_or_id: str | Path) -> DecoderConfig:
    """A target's sizes; raises CheckpointError where there are none or they are not supported."""
    return DecoderConfig.from_hf(read_config(resolve_target(str(path_or_id))))


def load_target(
    path_or_id: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", last_layers: int | None = None
) -> tuple[Llama, PreTrainedTokenizerBase | None]:
    """Load a target and its tokenizer; raises CheckpointError saying what is missing or unsupported.

    ``last_layers`` as in ``load_decoder``.
    """
    folder = resolve_target(str(path_or_id))
    config = target_config(folder)
    config.check_window()
    tokenizer = load_tokenizer(folder)
    return load_decoder(folder, config, dtype=dtype, device=device, last_layers=last_layers), tokenizer


def load_decoder(
    folder: Path,
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    last_layers: int | None = None,
) -> Llama:
    """Load a target's weights, of sizes ``config``; raises CheckpointError where one is missing or does not fit.

    With ``last_layers`` only so many layers are read besides embeddings, final norm and LM head, which is what a drafter borrows;
    those before them have no weights (they are on the meta device).
    """
    first = 0 if last_layers is None else config.num_layers - last_layers
    with torch.device("meta"):
        model = Llama(config)
    for part in (model.embedding, model.norm, model.lm_head, *model.layers[first:]):
        _allocate(part, dtype, device)
    if config.tie_word_embeddings:
        model.tie_embeddings()  # each has memory of its own
    absent = tuple(f"model.layers.{index}." for index in range(first))
    tensors = read_tensors(folder, (lambda name: not name.startswith(absent)) if absent else None)
    fill(model, decoder_states(tensors, config, first, folder), folder)
    return model.eval().requires_grad_(False)


def load_drafter(path_or_id: str | Path, target: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> MoA:
    """Load a MoA drafter in the authors' layout for a target of the given sizes."""
    folder = resolve(path_or_id)
    raw = read_json(folder, "config.json")
    check_made_for(raw, target, folder)
    config = MoAConfig.from_hf(raw, target)
    model = empty(lambda: MoA(config), dtype, device)
    tensors = {_plain_name(name): tensor for name, tensor in read_tensors(folder).items()}
    state: dict[str, Tensor] = {}
    for ours, theirs in MOA_LAYERS.items():
        layer = getattr(model, ours)
        if layer is None:
            continue
        state.update({f"{ours}.{name}": value for name, value in layer_state(tensors, f"{theirs}.", layer).items()})
    for name in ("weight", "bias"):
        state[f"to_memory.{name}"] = take(tensors, f"Ekv2E.{name}")
    for ours, theirs in MOA_EXTRAS.items():
        if (module := getattr(model, ours)) is not None:
            state.update({f"{ours}.{name}": take(tensors, f"{theirs}.{name}") for name, _ in module.named_parameters()})
    fill(model, [state], folder)
    if "draft_vocabulary" in tensors:
        model.draft_vocabulary = tensors["draft_vocabulary"].to(device, torch.long)
    model.eval().requires_grad_(False)
    return model


def load_eagle(folder: Path, target: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Eagle:
    """Load an EAGLE drafter that ``save_eagle`` wrote."""
    raw = read_json(folder, "config.json")
    check_made_for(raw, target, folder)
    config = EagleConfig.from_hf(raw, target)
    model = empty(lambda: Eagle(config), dtype, device)
    tensors = read_tensors(folder)
    fill(model, [tensors], folder)
    if "draft_vocabulary" in tensors:
        model.draft_vocabulary = tensors["draft_vocabulary"].to(device, torch.long)
    return model.eval().requires_grad_(False)


def check_made_for(raw: Mapping[str, Any], target: DecoderConfig, folder: Path) -> None:
    """Raise CheckpointError where a drafter's config.json tells of another target's sizes."""
    for key, expected in (("hidden_size", target.hidden_size), ("num_hidden_layers", target.num_layers)):
        if raw.get(key, expected) != expected:
            raise CheckpointError(f"the drafter in {folder} was made for a target with {key}={raw[key]}, this one has {expected}")


def optimize_for_inference(model: nn.Module) -> None:
    """Pack all linear weights; call it after loading, never before training."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()


def _plain_name(name: str) -> str:
    """Published files may prefix every key with the name of the wrapping model."""
    for theirs in (*MOA_LAYERS.values(), "Ekv2E"):
        if f".{theirs}." in f".{name}" and not name.startswith(theirs):
            # "self_attention" is a suffix of "layer_self_attention": cut at a dot only.
            head, _, tail = name.partition(f".{theirs}.")
            return f"{theirs}.{tail}" if tail else head
    return name


def empty(make: Callable[[], _Network], dtype: torch.dtype, device: torch.device | str) -> _Network:
    """Build a module without spending time on initial values."""
    with torch.device("meta"):
        model = make()
    _allocate(model, dtype, device)
    return model


def _allocate(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give memory to parameters on the meta device; their own ``to_empty`` would load PyTorch's compiler, which takes seconds."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))


def fill(model: nn.Module, states: Iterable[Mapping[str, Tensor]], folder: Path) -> None:
    """Copy what are a complete state together into the module, casting; names a tensor that is missing or of the wrong shape."""
    wanted = {name: each for name, each in model.named_parameters(remove_duplicate=False) if not each.is_meta}
    for state in states:
        for name in sorted(set(state) & set(wanted)):
            _copy(name, state[name], wanted.pop(name), folder)
    if missing := sorted(wanted):
        raise CheckpointError(f"{folder} lacks weights for {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}")


@torch.no_grad()
def _copy(name: str, stored: Tensor, parameter: Tensor, folder: Path) -> None:
    if parameter.shape != stored.shape:
        raise CheckpointError(f"{folder}: {name} has shape {tuple(stored.shape)}, the config asks for {tuple(parameter.shape)}")
    check_stored(name, stored)
    parameter.copy_(stored)
    if not parameter.view(-1)[:SAMPLED].isfinite().all():
        raise CheckpointError(f"{folder}: {name} is not finite: the file is damaged, or its training has diverged")
