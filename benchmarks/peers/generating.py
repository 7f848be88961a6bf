"""transformers' `generate` as a way, with what it has to be fast on a CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedTokenizerBase, StaticCache

from benchmarks.network.processes import Process
from benchmarks.peers.ways import ASSISTED, COMPILED, LOOKUP, TRANSFORMERS, Answered, PeerError, Spec
from benchmarks.prompts import Prompt

GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


class Generating:
    """``generate`` of a model; ``ends`` are the tokens that end a text."""

    process: Process | None = None

    def __init__(
        self,
        spec: Spec,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        ends: frozenset[int],
        max_tokens: int,
        context: int,
        assistant: Any = None,
    ) -> None:
        assert spec.kind in (TRANSFORMERS, COMPILED, LOOKUP, ASSISTED)
        self.name, self._kind, self._model, self._tokenizer, self._ends = spec.name, spec.kind, model, tokenizer, ends
        self._options = {**GREEDY, "max_new_tokens": max_tokens, "eos_token_id": sorted(ends) or None, "pad_token_id": self._pad()}
        if spec.kind == LOOKUP:
            self._options["prompt_lookup_num_tokens"] = spec.lookup
        if spec.kind == ASSISTED:
            self._options["assistant_model"] = assistant
        if spec.kind == COMPILED:
            self._options["compile_config"] = CompileConfig(fullgraph=False, dynamic=False, mode="default")
            self._options["compile_config"]._compile_all_devices = True  # generate compiles for no CPU otherwise
        self._context, self._caches = context, dict[int, Any]()

    @property
    def batches(self) -> bool:
        """Drafts are of one sequence alone in transformers."""
        return self._kind in (TRANSFORMERS, COMPILED)

    def _pad(self) -> int:
        pad = self._tokenizer.pad_token_id
        return int(pad) if isinstance(pad, int) else min(self._ends, default=0)

    async def answer(self, prompts: Sequence[Prompt]) -> Answered:
        """One batch, prompts padded on their left; raises PeerError."""
        token_ids, mask = left_padded([prompt.token_ids for prompt in prompts], self._pad())
        try:
            began = time.perf_counter()
            with torch.inference_mode():
                output = self._model.generate(token_ids, attention_mask=mask, **self._options, **self._cache(len(prompts)))
            seconds = time.perf_counter() - began
        except (RuntimeError, ValueError, TypeError) as error:
            raise PeerError(f"{self.name}: {error}") from error
        rows = [until_end(row, self._ends) for row in output[:, token_ids.shape[1] :].tolist()]
        texts = tuple(str(self._tokenizer.decode(row, skip_special_tokens=True)) for row in rows)
        return Answered(texts, sum(map(len, rows)), seconds)

    def _cache(self, batch: int) -> dict[str, Any]:
        """A compiled forward is of one size of cache, so all prompts share one as long as the longest needs."""
        if self._kind != COMPILED:
            return {}
        if batch not in self._caches:
            self._caches[batch] = StaticCache(config=self._model.config, max_cache_len=self._context)
        self._caches[batch].reset()
        return {"past_key_values": self._caches[batch]}


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [rows, longest], each row at its right end."""
    longest = max(map(len, rows))
    token_ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return token_ids, mask


def until_end(row: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Generated tokens without the one that ends the text, and the padding behind it."""
    return list(row[: next((place for place, token in enumerate(row) if token in ends), len(row))])
