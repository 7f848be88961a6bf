"""Ways that are servers: ours and llama.cpp's, started once and asked over HTTP."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from benchmarks.network.processes import Process, moaserve
from benchmarks.peers.ways import LLAMA_LOOKUP, OURS, OURS_PLAIN, Answered, PeerError, Spec
from benchmarks.prompts import Prompt

SILENCE_S = 600.0
"""How long an answer may take before it counts as failed."""

UVICORN = re.compile(r"Uvicorn running on (https?://\S+)")
OUR_READY = re.compile(r"ready at (https?://\S+)/v1")
_SERVED = re.compile(r", (\w+) on \S+, drafter (.+), \d+ tokens of context")


@dataclass(frozen=True, slots=True)
class Ours:
    """What our server is started with; ``threads`` of all ways."""

    model: str
    drafter: str
    dtype: str
    compile: str
    threads: int

    def command(self) -> list[str]:
        """Each prompt is read anew, however often it comes."""
        options = {
            "--model": self.model,
            "--drafter": self.drafter,
            "--dtype": self.dtype,
            "--compile": self.compile,
            "--num-threads": str(self.threads),
            "--prefix-cache-tokens": "0",
            "--device": "cpu",
            "--host": "127.0.0.1",
            "--port": "0",
        }
        return moaserve("serve", "--no-playground", *(part for pair in options.items() for part in pair))


def what_is_served(ours: Process) -> tuple[str, str]:
    """Type of the weights and drafter of our server, as it says when it is ready."""
    found = next(found for line in ours.log if (found := _SERVED.search(line)))
    return found[1], found[2]


async def start(command: Sequence[str], ready: re.Pattern[str], threads: int) -> Process:
    """A server that listens where it says; raises ProcessError."""
    # Those that read it from the environment take it from there and no other setting.
    environment = {"OMP_NUM_THREADS": str(threads), "HOST": "127.0.0.1"}
    return await Process.start(command, None, ready=ready, environment=environment)


def llama_command(gguf: Path, spec: Spec, *, context: int, threads: int) -> list[str]:
    """llama-cpp-python's server.

    ``logits_all`` would have a prompt's every token cost an LM head, which only lookup needs; ``interrupt_requests`` would have
    one request end another. Flash attention is faster on CPUs too, and on by default in llama.cpp itself.
    """
    looks_up = spec.kind == LLAMA_LOOKUP
    options = {
        "--model": str(gguf),
        "--n_ctx": str(context),
        "--n_threads": str(threads),
        "--n_threads_batch": str(threads),
        "--logits_all": "true" if looks_up else "false",
        "--interrupt_requests": "false",
        "--flash_attn": "true",
        "--verbose": "false",
        "--host": "127.0.0.1",
        "--port": str(free_port()),
    }
    if looks_up:
        options |= {"--draft_model": "prompt-lookup-decoding", "--draft_model_num_pred_tokens": str(spec.lookup)}
    return [sys.executable, "-m", "llama_cpp.server", *(part for pair in options.items() for part in pair)]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def llama_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """A prompt as text, for a server that takes nothing else and puts what begins texts before it by itself."""
    ids = list(prompt.token_ids)
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if begins and ids[:1] == [tokenizer.bos_token_id]:
        ids = ids[1:]
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


async def check_tokens(client: httpx.AsyncClient, url: str, prompts: Sequence[Prompt], text: Callable[[Prompt], str]) -> None:
    """Raises PeerError where llama.cpp would read other tokens than we do."""
    for number, prompt in enumerate(prompts):
        response = await client.post(f"{url}/extras/tokenize", json={"input": text(prompt)})
        response.raise_for_status()
        if tuple(response.json()["tokens"]) != prompt.token_ids:
            raise PeerError(f"llama.cpp splits prompt {number} into other tokens than the model's own tokenizer")


class Served:
    """A way that is asked for completions over HTTP.

    ``end_counts``: whether its usage counts the token that ended a text. ``prompt``: how it is told a prompt.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        client: httpx.AsyncClient,
        prompt: Callable[[Prompt], str | list[int]],
        body: dict[str, Any],
        *,
        end_counts: bool,
    ) -> None:
        self.name, self.process, self.batches = name, process, True
        self._client, self._prompt, self._body, self._end_counts = client, prompt, body, end_counts

    async def answer(self, prompts: Sequence[Prompt]) -> Answered:
        """All at once, over connections that stand already; raises PeerError."""
        bodies = [self._body | {"prompt": self._prompt(prompt)} for prompt in prompts]
        try:
            await asyncio.gather(*(self._client.get(f"{self.process.url}/v1/models") for _ in prompts))
            began = time.perf_counter()
            responses = await asyncio.gather(
                *(self._client.post(f"{self.process.url}/v1/completions", json=body) for body in bodies)
            )
            seconds = time.perf_counter() - began
        except httpx.HTTPError as error:
            raise PeerError(f"{self.name}: {type(error).__name__} {error}") from error
        texts, tokens = [], 0
        for prompt, response in zip(prompts, responses, strict=True):
            if response.is_error:
                raise PeerError(f"{self.name}: {response.status_code}: {response.text}")
            whole = response.json()
            choice, usage = whole["choices"][0], whole["usage"]
            if usage["prompt_tokens"] != len(prompt.token_ids):
                raise PeerError(f"{self.name} read {usage['prompt_tokens']} tokens of a prompt that has {len(prompt.token_ids)}")
            texts.append(str(choice["text"]))
            tokens += usage["completion_tokens"] - (self._end_counts and choice["finish_reason"] == "stop")
        return Answered(tuple(texts), tokens, seconds)


def our_way(spec: Spec, process: Process, client: httpx.AsyncClient, max_tokens: int) -> Served:
    """Both kinds of ours are one server."""
    assert spec.kind in (OURS, OURS_PLAIN)
    body = {"max_tokens": max_tokens, "temperature": 0, "speculative": spec.kind == OURS}
    return Served(spec.name, process, client, lambda prompt: list(prompt.token_ids), body, end_counts=True)


def llama_way(
    spec: Spec, process: Process, client: httpx.AsyncClient, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> Served:
    """llama-cpp-python's server; what it would do to choose tokens otherwise than greedily is switched off."""
    body = {"max_tokens": max_tokens, "temperature": 0, "repeat_penalty": 1.0}
    return Served(spec.name, process, client, lambda prompt: llama_text(tokenizer, prompt), body, end_counts=False)
