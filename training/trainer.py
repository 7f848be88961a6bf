"""The training loop, on `accelerate`, resumable to the bit."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from training.batches import Epoch
from training.checkpoints import Position, latest_checkpoint, load_checkpoint, save_checkpoint
from training.errors import ConfigError, TrainingError, TrainingInterrupted, first_line
from training.export import export
from training.limits import reached, shares
from training.optimizers import optimizers
from training.progress import Meter, Reporter, Window, cut_log
from training.run_config import RunConfig
from training.tasks.base import Task


class Trainer:
    """Trains one network; ``run`` goes on from wherever ``position`` is.

    Several processes share the batches of each update, so that a run is the same with any number of them but for the order of sums.
    ``target`` identifies what the network is trained for (``target_digest``), None where it is for nothing else.
    """

    def __init__(self, config: RunConfig, accelerator: Accelerator, task: Task, target: str | None = None) -> None:
        self.config, self.accelerator, self.task, self.target = config, accelerator, task, target
        self.position = Position()
        made = optimizers(config, task.network, accelerator.device)
        self.module, *self.optimizers = accelerator.prepare(task.module, *made)
        self.started = time.monotonic()
        self.stop_signal: int | None = None
        self._plans: dict[int, Epoch] = {}

    def run(self) -> dict[str, Any]:
        """Train until a limit is reached; returns the last validation's figures (empty without a held-out file).

        Raises TrainingInterrupted once the state is saved when SIGINT or SIGTERM arrives, TrainingError where it diverges.
        """
        config, accelerator, position = self.config, self.accelerator, self.position
        config.out.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic() - position.seconds
        log, over = config.out / "log.jsonl", self.progress() >= 1.0
        if accelerator.is_main_process:
            cut_log(log, position.step, measures_again=over)
        reporter = Reporter(log, active=accelerator.is_main_process, done=self.progress())
        if over:
            reporter.say(reached(self.config, position, self._shares(position)))
        saved_at, validated_at, window = position.seconds, -1, self._window()
        figures: dict[str, Any] = {}
        with self._signals():
            try:
                while (done := self.progress()) < 1.0:
                    logging = (position.step + 1) % config.log_every == 0
                    window.last = self._step(done, window.meter, agreement=logging or self._ends_next())
                    window.tokens += window.last.pop("batch_tokens")
                    stop = self._agree()
                    if logging:
                        self._report(reporter, window)
                        window = self._window()
                    if self.task.valid and position.step % config.valid_every == 0:
                        figures, validated_at = self._report_validation(reporter), position.step
                        self._agree()
                        window.start += figures["seconds"]
                    due = config.checkpoint_steps is not None and position.step % config.checkpoint_steps == 0
                    if due or position.seconds - saved_at > 60 * config.checkpoint_minutes or stop:
                        self.save()
                        saved_at = position.seconds
                    if stop:
                        raise TrainingInterrupted(
                            f"stopped by {signal.Signals(stop).name} at step {position.step}; "
                            "the state is saved, go on with --resume",
                            stop,
                        )
                if window.tokens:
                    self._report(reporter, window)
                reporter.complete()
                self.save()
                if self.task.valid and validated_at != position.step:
                    figures = self._report_validation(reporter)
            finally:
                reporter.close()
        return figures

    def _window(self) -> Window:
        return Window(Meter(self.task.depths), self.position.seconds)

    def _report(self, reporter: Reporter, window: Window) -> None:
        """Log what was trained on since the last line; every process must take part."""
        position, speed = self.position, window.speed(self.position.seconds)
        meter = window.meter.gathered(self.accelerator)
        figures = self.task.figures(meter)
        if not meter.asked.any():  # a limit in minutes ends a run at a step of which agreement was not asked
            figures = {name: figure for name, figure in figures.items() if name not in ("accuracy", "acceptance_length")}
        line = {**self._where(), **window.last, "tokens_per_second": round(speed, 1), **figures}
        reporter.write("train", line)
        done = min(max(self.progress(), 1e-9), 1.0)
        reporter.step(done, line, position.seconds / done - position.seconds, speed)

    def _step(self, done: float, meter: Meter, *, agreement: bool) -> dict[str, Any]:
        """One update on ``accumulate`` batches, of which the processes take turns; rows count alike, whoever has them."""
        config, accelerator, position = self.config, self.accelerator, self.position
        self.module.train()
        rate = config.lr * rate_factor(config.schedule, position.step, config.warmup, done)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        rank, world = accelerator.process_index, accelerator.num_processes
        places = self._next_places()
        totals = torch.zeros(2, dtype=torch.float64)
        for part in range(rank, len(places), world):
            epoch, number = places[part]
            batch = self._plan(epoch)[number].to(accelerator.device)
            with accelerator.no_sync(self.module) if part + world < len(places) else nullcontext():
                loss, depths = self.task.loss(self.module, batch, self._generator(part), done, agreement=agreement)
                # A mean of means would be wrong where batches have different numbers of rows: sums now, one division below.
                accelerator.backward(loss.loss * loss.count)
            totals += torch.tensor([loss.count, batch.token_ids.numel()], dtype=torch.float64)
            meter.add(loss, depths)
        if world > 1:
            totals = accelerator.reduce(totals.to(accelerator.device))
        count, tokens = totals.tolist()
        # What stands in the gradients by now is the mean over processes.
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, world / max(count, 1e-9))
        norm = float(accelerator.clip_grad_norm_(self.module.parameters(), config.clip))
        if not math.isfinite(norm):  # in all processes, which have the same gradients
            raise self._diverged(position.step + 1)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        position.step += 1
        position.tokens += int(tokens)
        return {"batch_tokens": int(tokens), "lr": rate, "norm": round(norm, 4)}

    def _diverged(self, step: int) -> TrainingError:
        last = latest_checkpoint(self.config.out / "checkpoints")
        kept = "there is no checkpoint yet" if last is None else f"the last checkpoint is {last}"
        return TrainingError(f"the loss is no longer finite at step {step}: lower --lr; {kept}")

    def _generator(self, part: int) -> torch.Generator:
        """All chance in one of an update's batches, whichever process has it."""
        seeds = np.random.SeedSequence((self.config.seed, self.position.step, part))
        return torch.Generator().manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))

    def _next_places(self) -> list[tuple[int, int]]:
        """Epoch and number of the batches of the next update, the same in all processes."""
        position, places = self.position, list[tuple[int, int]]()
        for _ in range(self.config.accumulate):
            if position.batch >= len(self._plan(position.epoch)):
                position.epoch, position.batch = position.epoch + 1, 0
            places.append((position.epoch, position.batch))
            position.batch += 1
        return places

    def _plan(self, number: int) -> Epoch:
        if number not in self._plans:
            # An update may cross from one epoch to the next.
            earlier = {kept: plan for kept, plan in self._plans.items() if kept == number - 1}
            self._plans = {**earlier, number: self.task.source.epoch(number)}
        return self._plans[number]

    # ---- validation ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """The task's figures on its held-out batches."""
        start = time.monotonic()
        self.module.eval()
        accelerator, task = self.accelerator, self.task
        meter = Meter(task.depths)
        last = len(task.valid) - 1
        for first in range(0, len(task.valid), accelerator.num_processes):
            number = first + accelerator.process_index
            generator = torch.Generator().manual_seed(number)
            # Whoever has none left runs the last one too, uncounted: where the target is sharded, all must run it together.
            batch = task.valid[min(number, last)].to(accelerator.device)
            loss, depths = task.loss(self.module, batch, generator, 1.0, agreement=True)
            if number <= last:
                meter.add(loss, depths)
        return {**task.figures(meter.gathered(accelerator)), "seconds": round(time.monotonic() - start, 2)}

    def _report_validation(self, reporter: Reporter) -> dict[str, Any]:
        figures = self.validate()
        reporter.write("valid", {**self._where(), **figures})
        reporter.say(f"step {self.position.step}: validation {self.task.describe(figures)}")
        return figures

    # ---- how far, and keeping it ---------------------------------------------------------------------------------------------

    def _agree(self) -> int:
        """Bring all processes to the same time and signal (0: none), so that they save and stop at the same step."""
        seconds, stop = time.monotonic() - self.started, self.stop_signal or 0
        if self.accelerator.num_processes > 1:
            both = self.accelerator.gather(torch.tensor([[seconds, stop]], dtype=torch.float64, device=self.accelerator.device))
            seconds, stop = float(both[:, 0].max()), int(both[:, 1].max())
        self.position.seconds = seconds
        return stop

    def progress(self) -> float:
        """Share of the run that is done, by whichever limit is nearest; 1 or more when it is over."""
        return max(self._shares(self.position).values())

    def _shares(self, position: Position) -> dict[str, float]:
        return shares(self.config, position, lambda epoch: len(self._plan(epoch)))

    def _ends_next(self) -> bool:
        """Whether the next update reaches a limit, as far as that is known before it."""
        position = self.position
        ahead = replace(position, step=position.step + 1, batch=position.batch + self.config.accumulate)
        return max(self._shares(ahead).values()) >= 1.0

    def _where(self) -> dict[str, Any]:
        position = self.position
        return {"step": position.step, "epoch": position.epoch, "tokens": position.tokens, "elapsed": round(position.seconds, 1)}

    def save(self) -> None:
        """Write a checkpoint, and the network as it is now."""
        self.accelerator.wait_for_everyone()
        # The newest update may have been the one too many, which no gradient has shown yet.
        if not all(bool(parameter.isfinite().all()) for parameter in self.task.network.parameters()):
            raise self._diverged(self.position.step)
        if not self.accelerator.is_main_process:
            return
        state = {
            "config": self.config.to_json(),
            "corpus": self.task.key,
            "target": self.target,
            "position": asdict(self.position),
            "model": self.task.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        save_checkpoint(self.config.out / "checkpoints", state, self.position.step)
        self.export({})

    def export(self, figures: dict[str, Any]) -> None:
        """The network and the recipe that made it, in the output folder."""
        world = self.accelerator.num_processes
        export(self.task, self.config, {"corpus": self.task.key, "processes": world, **asdict(self.position), **figures})

    def resume(self) -> None:
        """Go back to the newest checkpoint in the output folder."""
        path = latest_checkpoint(self.config.out / "checkpoints")
        if path is None:
            raise ConfigError(f"--resume: no checkpoint in {self.config.out / 'checkpoints'}")
        state = load_checkpoint(path)
        try:
            self.config.check_resumable(state["config"])
            if state["corpus"] != self.task.key:
                raise ConfigError(f"--resume: {self.config.data} or the tokenizer is not what {path} was trained on")
            # Earlier versions did not keep it.
            if self.target is not None and state.get("target") not in (None, self.target):
                raise ConfigError(f"--resume: {path} was trained for another target: give the --target that it began with")
            self.task.network.load_state_dict(state["model"])
            for optimizer, earlier in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(earlier)
            self.position = Position(**state["position"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--resume: {path} is not of a run like this one: {first_line(error)}") from error

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM for the end of the step; a second one takes its ordinary course."""

        def note(number: int, _: FrameType | None) -> None:
            self.stop_signal = number
            for each, handler in earlier.items():
                signal.signal(each, handler)

        try:
            earlier = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: the caller owns the signals
            yield
            return
        try:
            yield
        finally:
            for each, handler in earlier.items():
                signal.signal(each, handler)


def rate_factor(schedule: str, step: int, warmup: int, progress: float) -> float:
    """Learning rate as a share of its peak: a linear warm-up of ``warmup`` steps, then the schedule over the run's progress."""
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    progress = min(max(progress, 0.0), 1.0)
    shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[schedule]
    return warm * shape
