"""Which ways are run, in what order, and what becomes of one that fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from app.cli import cli
from benchmarks.network.processes import Process
from benchmarks.peers.generating import left_padded, until_end
from benchmarks.peers.measuring import Results, asked, groups, measure
from benchmarks.peers.running import Plan, Stage
from benchmarks.peers.servers import Ours, llama_command, llama_text
from benchmarks.peers.ways import Answered, PeerError, Spec, choose
from benchmarks.prompts import Prompt
from models.loader import BUNDLED, load_tokenizer

FOLDER = Path("here")


def names(asked: Sequence[str] | None = None, **options: Any) -> tuple[list[str], list[str]]:
    given = {"lookups": [2, 10], "independent": FOLDER, "installed": lambda module: True}
    specs, notes = choose(asked, **(given | options))
    return [spec.name for spec in specs], notes


def test_by_default_all_run_but_what_takes_minutes_to_compile() -> None:
    assert names() == (
        [
            "ours",
            "ours-plain",
            "transformers",
            "transformers-lookup (2)",
            "transformers-lookup (10)",
            "transformers-assisted",
            "llama.cpp",
            "llama.cpp-lookup (2)",
            "llama.cpp-lookup (10)",
        ],
        [],
    )


def test_ours_is_always_there_and_peers_come_in_one_order() -> None:
    assert names(["llama.cpp", "transformers"]) == (["ours", "transformers", "llama.cpp"], [])
    assert names(["transformers-lookup"], lookups=[3, 3])[0] == ["ours", "transformers-lookup (3)"]
    assert names(["transformers-compiled"])[0] == ["ours", "transformers-compiled"]


def test_what_is_not_there_is_left_out_and_said_so() -> None:
    found, notes = names(independent=None, installed=lambda module: module != "llama_cpp")
    assert not any(name.startswith("llama") or name == "transformers-assisted" for name in found)
    assert notes == [
        "Left out: transformers-assisted (give --independent FOLDER).",
        "Left out: llama.cpp, as llama_cpp is not installed: pip install -c constraints.txt '.[peers]'",
        "Left out: llama.cpp-lookup, as llama_cpp is not installed: pip install -c constraints.txt '.[peers]'",
    ]


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("vllm", "--peer vllm: unknown; use ours-plain, transformers, "),
        ("transformers-assisted", "--peer transformers-assisted needs --independent FOLDER"),
    ],
)
def test_a_peer_asked_for_by_name_must_be_known_and_have_what_it_needs(peer: str, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        names([peer], independent=None)
    result = CliRunner().invoke(cli, ["bench", "peers", "--peer", peer])
    assert result.exit_code == 2 and f"moaserve: error: {message}" in result.stderr


def test_more_at_once_than_there_are_prompts_is_refused() -> None:
    result = CliRunner().invoke(cli, ["bench", "peers", "--num-prompts", "4"])
    assert result.exit_code == 2 and "--concurrency 8: more at once than --num-prompts 4" in result.stderr


class FakeWay:
    """Writes its name, and keeps in ``log`` what it was asked."""

    process: Process | None = None

    def __init__(self, name: str, log: list[tuple[str, list[str]]], *, batches: bool = True, fails_at: str = "") -> None:
        self.name, self.batches, self._log, self._fails_at = name, batches, log, fails_at

    async def answer(self, prompts: Sequence[Prompt]) -> Answered:
        sources = [prompt.source for prompt in prompts]
        self._log.append((self.name, sources))
        if self._fails_at in sources:
            raise PeerError(f"{self.name} broke")
        return Answered((self.name,) * len(prompts), 10, 2.0)


PROMPTS = [Prompt(source, (1,)) for source in "abcde"]


def test_a_group_has_as_many_as_are_asked_at_once() -> None:
    assert [[prompt.source for prompt in group] for group in groups(PROMPTS, 2)] == [["a", "b"], ["c", "d"]]
    assert len(groups(PROMPTS, 1)) == len(groups(PROMPTS * 2, 2)) == 5
    assert groups(PROMPTS, 6) == []


async def test_ways_take_turns_at_going_first_after_a_round_that_nobody_measures() -> None:
    log: list[tuple[str, list[str]]] = []
    ways = [FakeWay("x", log), FakeWay("y", log)]
    results, steps = Results(), []
    await measure(ways, PROMPTS, results, concurrency=[2], rounds=2, progress=lambda: steps.append(1))
    both = [["c", "d"], ["a", "b"], ["c", "d"], ["a", "b"], ["c", "d"]]
    assert log == [(name, group) for order, group in zip(["xy", "xy", "yx", "xy", "yx"], both, strict=True) for name in order]
    assert {key: sorted(runs) for key, runs in results.runs.items()} == {(2, "x"): [0, 1, 2, 3], (2, "y"): [0, 1, 2, 3]}
    assert len(steps) == asked(ways, PROMPTS, [2], 2) == 10
    assert results.busy == 20.0


async def test_a_way_that_cannot_batch_is_asked_one_at_a_time_only() -> None:
    results = Results()
    ways = [FakeWay("ours", []), FakeWay("alone", [], batches=False)]
    await measure(ways, PROMPTS, results, concurrency=[1, 2], rounds=1)
    assert {key: len(runs) for key, runs in results.runs.items()} == {(1, "ours"): 5, (1, "alone"): 5, (2, "ours"): 2}


async def test_a_way_that_fails_is_asked_no_more_and_the_others_go_on() -> None:
    log: list[tuple[str, list[str]]] = []
    results, steps = Results(), []
    ways = [FakeWay("ours", log), FakeWay("weak", log, fails_at="b")]
    await measure(ways, PROMPTS, results, concurrency=[1], rounds=1, progress=lambda: steps.append(1))
    assert results.failures == ["weak broke (1 at once)"]
    assert {name: sorted(runs) for (_, name), runs in results.runs.items()} == {"ours": [0, 1, 2, 3, 4], "weak": [0]}
    assert sum(name == "weak" for name, _ in log) == 3  # the one that is not measured, a and b
    assert len(steps) == asked(ways, PROMPTS, [1], 1)


def test_a_batch_is_padded_on_its_left() -> None:
    token_ids, mask = left_padded([(5, 6, 7), (8,)], 0)
    assert torch.equal(token_ids, torch.tensor([[5, 6, 7], [0, 0, 8]]))
    assert torch.equal(mask, torch.tensor([[1, 1, 1], [0, 0, 1]]))


def test_an_answer_is_what_stands_before_its_end() -> None:
    ends = frozenset([2, 9])
    assert until_end([5, 6, 9, 2, 0, 0], ends) == [5, 6]
    assert until_end([5, 6], ends) == [5, 6]
    assert until_end([2], ends) == []


def test_all_servers_get_the_same_threads() -> None:
    ours = Ours("bundled", "auto", "bfloat16", "off", 3).command()
    assert ours[ours.index("--num-threads") + 1] == "3" and ours[ours.index("--prefix-cache-tokens") + 1] == "0"
    for kind in ("llama.cpp", "llama.cpp-lookup"):
        command = llama_command(Path("t.gguf"), Spec(kind, 4 if "lookup" in kind else None), context=640, threads=3)
        assert [command[command.index(f"--{name}") + 1] for name in ("n_threads", "n_threads_batch", "n_ctx")] == ["3", "3", "640"]
        assert ("--draft_model_num_pred_tokens" in command) == ("lookup" in kind)


def test_llama_cpp_is_told_the_very_text_of_a_prompt() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    text = "<|im_start|>user\n Größe ,  don't <tool_call> \n<|im_end|>\n"
    assert llama_text(tokenizer, Prompt("a", tuple(tokenizer(text)["input_ids"]))) == text


def test_an_interrupt_leaves_figures_of_the_groups_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaving(FakeWay):
        async def answer(self, prompts: Sequence[Prompt]) -> Answered:
            if len(log) == 2 + 2 * 2 + 1:  # of the third group one way is done, after those that warm up
                raise KeyboardInterrupt
            return await super().answer(prompts)

    @asynccontextmanager
    async def opened(plan: Plan, say: object) -> AsyncIterator[Stage]:
        settings = {"model": "m", "dtype": "float32", "threads": 1, "num_prompts": 4}
        yield Stage([Leaving("ours", log), Leaving("ours-plain", log)], settings, ["what there is to say"])

    log: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("benchmarks.peers.running.opened", opened)
    options = ["--peer", "ours-plain", "--concurrency", "1", "--num-prompts", "4", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli, ["bench", "peers", *options])
    assert done.exit_code == 1 and "Failed: it was interrupted" in done.output and "what there is to say" in done.output
    told = json.loads((tmp_path / "results.json").read_text())
    assert {each["way"]: (each["groups"], each["texts"]) for each in told["figures"]} == {"ours": (3, 3), "ours-plain": (2, 2)}
