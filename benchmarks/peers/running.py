"""From what is asked for to ways that stand, and their end."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging

from benchmarks.decoding import load_transformers
from benchmarks.network.processes import Process
from benchmarks.peers import servers
from benchmarks.peers.generating import Generating
from benchmarks.peers.ways import (
    ASSISTED,
    COMPILED,
    LLAMA,
    LLAMA_LOOKUP,
    LOOKUP,
    OURS,
    OURS_PLAIN,
    TRANSFORMERS,
    PeerError,
    Spec,
    Way,
)
from benchmarks.prompts import Prompt
from models.gguf_export import export_gguf
from models.loader import eos_token_ids, resolve_target

BFLOAT16_PRODUCTS = ("avx512_bf16", "amx_bf16")
"""Flags of processors that multiply bfloat16 numbers, as Linux and (in capitals) llama.cpp call them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared on what; ``context`` holds the longest prompt and its answer."""

    ours: servers.Ours
    specs: Sequence[Spec]
    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    concurrency: Sequence[int]
    independent: Path | None

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and answer, to whole 64s."""
        longest = max(len(prompt.token_ids) for prompt in self.prompts) + self.max_tokens
        return -(-longest // 64) * 64

    def has(self, *kinds: str) -> bool:
        """Whether any way is of these kinds."""
        return any(spec.kind in kinds for spec in self.specs)


@dataclass(slots=True)
class Stage:
    """Ways that stand, and what there is to say of them."""

    ways: list[Way] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def default_threads() -> int:
    """PyTorch's choice, which is our server's too."""
    return torch.get_num_threads()


@asynccontextmanager
async def opened(plan: Plan, say: Callable[[str], None]) -> AsyncIterator[Stage]:
    """All ways, started once; raises ProcessError, PeerError or CheckpointError."""
    stage = Stage()
    # It would warn, amid the bar, of sampling settings that nobody uses.
    chatter: Any = logging
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=httpx.Timeout(servers.SILENCE_S)))

        async def start(name: str, command: Sequence[str], ready: Any) -> Process:
            say(f"starting {name} ...")
            process = await servers.start(command, ready, plan.ours.threads)
            stack.push_async_callback(process.stop)
            return process

        ours = await start("our server", plan.ours.command(), servers.OUR_READY)
        dtype, drafter = servers.what_is_served(ours)
        folder = resolve_target(plan.ours.model)
        torch.set_num_threads(plan.ours.threads)
        model = load_transformers(plan.ours.model, dtype, "cpu") if plan.has(TRANSFORMERS, COMPILED, LOOKUP, ASSISTED) else None
        assistant = _load_assistant(plan.independent, dtype) if plan.has(ASSISTED) else None
        gguf = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moaserve-peers-")), "target.gguf")
        if plan.has(LLAMA, LLAMA_LOOKUP):
            export_gguf(plan.ours.model, gguf, dtype="float32" if dtype == "float32" else "bfloat16")
        for spec in plan.specs:
            if spec.kind in (OURS, OURS_PLAIN):
                stage.ways.append(servers.our_way(spec, ours, client, plan.max_tokens))
            elif spec.kind in (LLAMA, LLAMA_LOOKUP):
                command = servers.llama_command(gguf, spec, context=plan.context, threads=plan.ours.threads)
                process = await start(spec.name, command, servers.UVICORN)
                text = partial(servers.llama_text, plan.tokenizer)
                await servers.check_tokens(client, process.url, plan.prompts, text)
                stage.ways.append(servers.llama_way(spec, process, client, plan.tokenizer, plan.max_tokens))
            else:
                stage.ways.append(
                    Generating(
                        spec,
                        model,
                        plan.tokenizer,
                        ends=eos_token_ids(folder),
                        max_tokens=plan.max_tokens,
                        context=plan.context,
                        assistant=assistant,
                    )
                )
        stage.settings = _settings(plan, dtype, drafter, model)
        stage.notes = _notes(plan, stage.settings)
        yield stage


def _load_assistant(folder: Path | None, dtype: str) -> Any:
    assert folder is not None
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise PeerError(f"--independent {folder}: transformers cannot load it: {error}") from error
    return loaded.eval()


def _settings(plan: Plan, dtype: str, drafter: str, model: Any) -> dict[str, Any]:
    peers = {"transformers": version("transformers")}
    if model is not None:
        peers["transformers_attention"] = str(model.config._attn_implementation)
    if plan.has(LLAMA, LLAMA_LOOKUP):
        peers |= {"llama_cpp_python": version("llama-cpp-python"), "llama_cpp_built_with": _llama_system_info()}
    return {
        "model": plan.ours.model,
        "drafter": drafter,
        "dtype": dtype,
        "compile": plan.ours.compile,
        "threads": plan.ours.threads,
        "num_prompts": len(plan.prompts),
        "max_tokens": plan.max_tokens,
        "concurrency": list(plan.concurrency),
        "peers": peers,
    }


def _notes(plan: Plan, settings: dict[str, Any]) -> list[str]:
    notes = []
    if max(plan.concurrency) > 1:
        if plan.has(LOOKUP, ASSISTED):
            notes.append("transformers drafts for one sequence at a time: its ways with drafts are asked one prompt at once only.")
        if plan.has(LLAMA, LLAMA_LOOKUP):
            notes.append("llama-cpp-python's server answers one request after the other, however many there are.")
        notes += [
            f"{left} prompts did not fill a group of {each}." for each in plan.concurrency if (left := len(plan.prompts) % each)
        ]
    built = settings["peers"].get("llama_cpp_built_with", "")
    missing = [flag for flag in _processor_flags() if built and f"{flag.upper()} = 1" not in built]
    if missing:
        notes.append(f"llama.cpp was built without {', '.join(missing)}, which this processor has: build it here, from source.")
    return notes


def _processor_flags() -> list[str]:
    try:
        words = Path("/proc/cpuinfo").read_text("utf-8").split()
    except OSError:
        return []
    return [flag for flag in BFLOAT16_PRODUCTS if flag in words]


def _llama_system_info() -> str:
    return _said([sys.executable, "-c", "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"])


def _said(command: Sequence[str]) -> str:
    """What a program says in a process of its own."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return " ".join((done.stdout or done.stderr).split())
