"""The engine: schedule, draft, verify, commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from models.kv_cache import KVCache
from models.llama import CompiledGraph, Llama
from models.plans import prefill_plan
from speculative.acceptance import accept_paths, path_logprobs
from speculative.batch import TreePass, token_ids_of, verify_plan
from speculative.config import EngineStatus, ModelInfo, RemoteInfo
from speculative.costs import StepTimes
from speculative.drafters.base import Drafter
from speculative.errors import InvalidRequestError
from speculative.logprobs import text_logprobs
from speculative.policy import DraftShape, SpeculationPolicy
from speculative.prefixes import Prefixes
from speculative.ranks import Ranks
from speculative.remote.memory import MemoryReader
from speculative.request import Grammar, OfferedTree, Request, RequestOutput, TokenLogprob
from speculative.sampling import argmax
from speculative.scheduler import PrefillChunk, Scheduler
from speculative.sequence import Sequence
from speculative.telling import Telling
from speculative.texts import Texts
from speculative.timing import StepClock
from speculative.tree import DraftTree
from speculative.validation import check_runnable, check_tree
from speculative.verification import Acceptance


class Engine:
    """Decodes many requests together, each with drafts from one drafter. Not thread-safe: one thread owns it.

    ``before_pass`` is called whenever the target is about to run, which takes the interpreter from nobody, or the drafter on what
    it has missed. ``compiled`` holds graphs that stand in for parts of a step, by name: see ``compiling``; ``tree_pass`` does all
    of the target's work on trees: see there and ``replaying``. ``ranks`` are the processes that share the target with this one, if
    there are any.
    """

    def __init__(
        self,
        target: Llama,
        tokenizer: PreTrainedTokenizerBase | None,
        make_drafter: Callable[[int, int], Drafter] | None,
        policy: SpeculationPolicy,
        largest_shape: DraftShape,
        info: ModelInfo,
        *,
        max_num_seqs: int,
        prefill_chunk: int,
        prefix_cache_tokens: int = 0,
        remote_tree_nodes: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.target, self.tokenizer, self.policy, self.info = target, tokenizer, policy, info
        self._device = target.device  # a module looks for its own anew each time
        self.largest_shape = largest_shape
        self.compiled: dict[str, CompiledGraph] = {}
        self.tree_pass: TreePass | None = None
        self.ranks: Ranks | None = None
        self.eos_token_ids = eos_token_ids
        self._texts = Texts(tokenizer, info.vocab_size, eos_token_ids)
        self.clock = StepClock()
        self._shape: DraftShape | None = None
        self._told = 0.0
        self._has_prefilled = False
        self._unsettled: Sequence | None = None
        self.before_pass: Callable[[], None] = lambda: None
        drafter = make_drafter(max_num_seqs, info.max_model_len) if make_drafter is not None else None
        self.memory = MemoryReader.of(drafter)
        self.taps = drafter.taps if drafter is not None else ()
        drafting = drafter.target_scratch_rows(largest_shape) if drafter is not None else 0
        scratch = max(1 + largest_shape.nodes, 1 + remote_tree_nodes, drafting)
        self.cache = target.new_cache(max_num_seqs, scratch, info.max_model_len)
        self.telling = Telling(drafter, self.cache)
        self._make_room(prefix_cache_tokens, prefill_chunk)

    @property
    def drafter(self) -> Drafter | None:
        """Who drafts, and is told of what was verified."""
        return self.telling.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self.telling.drafter = drafter

    def resize(self, max_num_seqs: int, prefix_cache_tokens: int) -> None:
        """Take other numbers of slots and of tokens kept, before the first request."""
        for cache in (self.cache, *self._drafter_caches):
            cache.resize(max_num_seqs)
        self._make_room(prefix_cache_tokens, self.scheduler.budget.most)

    def _make_room(self, prefix_cache_tokens: int, prefill_chunk: int) -> None:
        window = self.drafter.window if self.drafter is not None else None
        self.prefixes = Prefixes((self.cache, *self._drafter_caches), prefix_cache_tokens, window)
        self.scheduler = Scheduler(self.cache.num_slots, prefill_chunk, self.prefixes.reuse)

    @property
    def remote(self) -> RemoteInfo:
        """What those who draft elsewhere are told."""
        sizes = self.memory.bytes_by_format if self.memory is not None else {}
        return RemoteInfo(tuple(sorted(self.eos_token_ids)), self.cache.scratch - 1, sizes)

    @property
    def lost(self) -> str | None:
        """Why nothing can be computed any more; None while all is well."""
        return None if self.ranks is None else self.ranks.lost

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, from any thread, once ``lost`` says something."""
        if self.ranks is not None:
            self.ranks.when_lost = call
        if self.lost is not None:
            call()

    def close(self) -> None:
        """End what an engine has of other processes; it cannot be used afterwards."""
        if self.ranks is not None:
            self.ranks.close()

    def validate(self, request: Request) -> None:
        """Raise InvalidRequestError (ContextLengthError) for a request that cannot run."""
        check_runnable(request, self.info, self._texts, sends_memory=self.memory is not None)

    def check_grammar(self, grammar: Grammar) -> None:
        """As `Texts.check_grammar`."""
        self._texts.check_grammar(grammar)

    def add(self, request: Request) -> None:
        """Queue a request; raises InvalidRequestError."""
        self.validate(request)
        self.scheduler.add(self._texts.resume(request, self.info.max_model_len))

    def offer(self, request_id: str, tree: OfferedTree) -> None:
        """Let a remote request go on with a tree, from the next step on; raises InvalidRequestError.

        What has been offered for the same length before is replaced.
        """
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            raise InvalidRequestError(f"no request {request_id!r} is running: it has ended, or there was none", param="request_id")
        check_tree(tree, sequence, self.info.vocab_size, self.cache.scratch - 1)
        sequence.offered = tree

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once and free its slot; None when it is not running."""
        sequence = self.scheduler.find(request_id)
        return None if sequence is None else self._finish(sequence, sequence.finish("abort"))

    def fail_active(self) -> list[RequestOutput]:
        """End all requests that hold a slot with "error", after a step that raised."""
        return [self._finish(sequence, sequence.finish("error")) for sequence in self.scheduler.holding]

    @property
    def has_work(self) -> bool:
        """True while any request can go on; remote ones wait for their trees."""
        return self.scheduler.has_work

    def status(self) -> EngineStatus:
        """Requests running and waiting, the share of cached tokens in use, and how the steps went."""
        sequences = self.scheduler.holding
        used = sum(sequence.num_computed for sequence in sequences)
        shape = self._shape
        return EngineStatus(
            len(sequences),
            len(self.scheduler.waiting),
            used / (self.cache.num_slots * self.cache.length),
            draft_depth=shape.depth if shape else 0,
            draft_nodes=shape.nodes if shape else 0,
            num_steps=self.clock.steps,
            phase_seconds=self.clock.seconds(),
        )

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Read prompts, then advance the running requests by one verification; the outputs of what was gained.

        The first tokens of prompts that have been read come at once: the verification is then the next step.
        """
        self.clock.begin()
        if self._unsettled is not None:
            self._settle()
            self._end_prefill()
        verification_due = self._has_prefilled and bool(self.scheduler.batch())
        outputs = [] if verification_due else self._prefill()
        self._has_prefilled = bool(outputs)
        batch, num_running = self.scheduler.batch(have_waited=verification_due), len(self.scheduler.running)
        if outputs or not batch:
            return outputs
        # Texts wait for the whole of a prompt's last stretch and this step, too.
        reading = self.scheduler.prefilling is not None or (verification_due and len(batch) > 1)
        tree = self._draft(batch, reading=reading)
        self.clock.end("draft")
        batch, tree, logits, best, tapped = self._verify(batch, tree)
        accepted = accept_paths(batch, tree, logits, best)
        self.clock.end("verify")
        logprobs = path_logprobs(batch, accepted, logits)
        outputs = self._commit(batch, tree, accepted, logprobs, tapped)
        self.clock.end("commit")
        self._learn(batch, tree, accepted, num_running)
        return outputs

    def _prefill(self) -> list[RequestOutput]:
        """Read a chunk of the prompts; the first tokens of those that end in it."""
        outputs, before = [], self.clock.of_step["prefill"]
        for chunk in self.scheduler.schedule():
            hidden = self._read(chunk)
            self.prefixes.keep_portion(chunk.sequence, chunk.start)
            if chunk.last:
                self._unsettled = chunk.sequence
                if self.scheduler.waiting:  # who comes next may begin alike
                    self._settle()
                outputs += self._with_memory([chunk.sequence], [self._first_token(chunk.sequence, hidden[-1:])])
            elif self.memory is not None and (memory := self.memory.read([chunk.sequence])[0]):
                outputs.append(chunk.sequence.reading(memory))
        self._release_ended()
        self._end_prefill()
        self.scheduler.budget.observe_reading(self.clock.of_step["prefill"] - before)
        return outputs

    def _settle(self) -> None:
        """Do what a prompt's first token has not waited for: tell the drafter of the prompt's end, keep its keys and values."""
        if (sequence := self._unsettled) is not None:
            self._unsettled = None
            self.clock.end("prefill")
            told = self.telling.settle()
            seconds = self.clock.end("prefill")
            if told:
                self.policy.observe_prompt(seconds)
            self.prefixes.keep(sequence)

    def _end_prefill(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what is still queued would be taken for the running texts' work
        self.clock.end("prefill")

    def _read(self, chunk: PrefillChunk) -> Tensor:
        """Run a stretch of a prompt through target and drafter; the target's hidden states of the last rows [n, D]."""
        sequence = chunk.sequence
        token_ids = self._tensor(sequence.tokens[chunk.start : chunk.end])
        layout = self.compiled.get("root_layout")
        plan = prefill_plan(self.cache, self.target.config.groups, sequence.slot, chunk.start, chunk.end, layout)
        count = sequence.request.params.prompt_logprobs
        wanted = 0 if count is not None else len(token_ids) - chunk.last
        told = min(self.telling.first_told(sequence, chunk.start), wanted)
        self.before_pass()
        hidden, tapped = self.target.read(token_ids, plan, self.cache, self.taps, wanted, told)
        sequence.num_target_calls += 1
        sequence.num_computed = chunk.end
        if count is not None:
            following = sequence.tokens[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt_tokens)]
            sequence.prompt_logprobs += text_logprobs(self.target, hidden, following, count)
        self.telling.of_prompt(sequence, token_ids, plan.positions, tapped)
        return hidden

    def _first_token(self, sequence: Sequence, hidden: Tensor) -> RequestOutput:
        """What the target says to a prompt, from its last hidden state [1, D]; nothing where only reading was asked for."""
        if len(sequence.tokens) >= sequence.max_length:
            return sequence.finish("length")
        batch, tree = [sequence], DraftTree.empty(1)
        logits, best = (each.unsqueeze(0) for each in self._choices(hidden))
        accepted = accept_paths(batch, tree, logits, best)
        (logprobs,) = path_logprobs(batch, accepted, logits)
        return sequence.append(accepted[0].tokens, 0, logprobs, self.eos_token_ids)

    def _draft(self, batch: list[Sequence], *, reading: bool) -> DraftTree:
        shape = self.policy.shape(batch, reading=reading) if self.drafter is not None else None
        if shape is not None and self.telling.catch_up(self.before_pass):
            self._told += self.clock.end("commit", usual=False)
            # What is left is told before the next steps: all at once, it would hold every text up.
            shape = shape if self.telling.drafting else None
        elif shape is None:
            self.telling.drafting = self.drafter is None or not any(sequence.drafts_here for sequence in batch)
        self._shape = shape
        if shape is None or self.drafter is None:
            tree = DraftTree.empty(len(batch))
        else:
            tree = self.policy.cut(self.drafter.propose(batch, shape, self.cache), batch)
        offered = [sequence.offered for sequence in batch]
        return tree.with_offered(offered, self.cache.scratch - 1) if any(offered) else tree

    def _verify(
        self, batch: list[Sequence], tree: DraftTree
    ) -> tuple[list[Sequence], DraftTree, Tensor, Tensor | list[list[int]], Tensor | None]:
        """One target pass over all roots and nodes.

        The sequences that did not have to wait and their trees; logits [B, N+1, V] and each row's best token [B, N+1] of these, and
        what the drafter tapped [B·(N+1), …].
        """
        roots, lengths = [sequence.tokens[-1] for sequence in batch], [sequence.num_computed for sequence in batch]
        if self.tree_pass is not None and self.tree_pass.suits(batch, tree):
            self.before_pass()
            return batch, tree, *self.tree_pass(roots, tree, lengths, batch[0].slot)
        token_ids = token_ids_of(roots, tree, self._device)
        plan = verify_plan(self.cache, self.target.config.groups, lengths, tree, self.compiled, batch[0].slot)
        self.before_pass()
        hidden, tapped = self.target.forward_tapped(token_ids.flatten(), plan, self.cache, self.taps)
        ready = [index for index, sequence in enumerate(batch) if not sequence.waits]
        if len(ready) < len(batch):
            rows = torch.arange(len(token_ids.flatten()), device=token_ids.device).view(token_ids.shape)[ready].flatten()
            hidden, tapped = hidden[rows], None if tapped is None else tapped[rows]
            batch, tree = [batch[index] for index in ready], tree.only(ready)
        logits, best = self._choices(hidden)
        shape = (len(batch), tree.num_rows)
        return batch, tree, logits.view(*shape, -1), best.view(shape), tapped

    def _choices(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [n, D] -> logits [n, V] and each row's best token [n]."""
        if head := self.compiled.get("head"):
            logits, best = head([hidden])
            return logits, best
        logits = self.target.logits(hidden)
        return logits, argmax(logits)

    def _commit(
        self,
        batch: list[Sequence],
        tree: DraftTree,
        accepted: list[Acceptance],
        logprobs: list[list[TokenLogprob] | None],
        tapped: Tensor | None,
    ) -> list[RequestOutput]:
        """Keep the accepted paths' keys and values, tell the drafter, publish the text, free what has ended."""
        self.telling.of_step(batch, tree, accepted, tapped)
        outputs = []
        for sequence, acceptance, drafted, told in zip(batch, accepted, tree.sizes, logprobs, strict=True):
            sequence.num_target_calls += 1
            sequence.offered = None
            sequence.num_computed += len(acceptance.tokens)
            outputs.append(sequence.append(acceptance.tokens, drafted, told, self.eos_token_ids))
        self.telling.after_step()
        outputs = self._with_memory(batch, outputs)
        self._release_ended()
        return outputs

    def _learn(self, batch: list[Sequence], tree: DraftTree, accepted: list[Acceptance], num_running: int) -> None:
        """Let the policy know what a step took and gained; one with trees from elsewhere says little of others."""
        seconds = self.clock.of_step
        rest = seconds["verify"] + seconds["commit"]
        self.scheduler.budget.observe_step(num_running, seconds["draft"] + rest)
        if any(sequence.request.remote for sequence in batch):
            return
        tokens = sum(sequence.num_computed for sequence in batch)
        times = StepTimes(len(batch), tokens, tree.num_rows - 1, self._shape is not None, seconds["draft"], rest, self._told)
        self._told = 0.0 if times.drafted else self._told
        self.policy.observe(times, tree, batch, [len(acceptance.rows) for acceptance in accepted])

    def _with_memory(self, batch: list[Sequence], outputs: list[RequestOutput]) -> list[RequestOutput]:
        """With what whoever drafts for a text elsewhere needs to go on."""
        if not any(sequence.request.remote for sequence in batch):
            return outputs
        memories = [None] * len(batch) if self.memory is None else self.memory.read(batch)
        return [
            replace(output, memory=memory, batch_size=len(batch)) if sequence.request.remote else output
            for sequence, output, memory in zip(batch, outputs, memories, strict=True)
        ]

    def _finish(self, sequence: Sequence, output: RequestOutput) -> RequestOutput:
        self._release(sequence)
        return output

    def _release_ended(self) -> None:
        for sequence in [each for each in self.scheduler.running if each.finish_reason is not None]:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence is self._unsettled:
            self._unsettled = None
            if sequence.finish_reason in ("stop", "length"):  # its prompt may have been sent to be kept
                self.telling.settle()
        if sequence.finish_reason != "error":
            self.prefixes.keep(sequence)
        self.telling.forget(sequence)
        if self.drafter is not None:
            self.drafter.forget(sequence)
        self.policy.forget(sequence)
        for move in self.scheduler.remove(sequence):
            for cache in (self.cache, *self._drafter_caches):
                cache.move_slot(move.source, move.destination, move.length)

    @property
    def _drafter_caches(self) -> tuple[KVCache, ...]:
        return () if self.drafter is None else tuple(self.drafter.caches)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)
