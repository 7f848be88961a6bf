"""Assistant turns written anew, against the target's own argmax one token at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from models.llama import Llama
from models.loader import load_target
from models.replay import rerun
from training.corpus import Corpus, store, stored
from training.errors import ConfigError, DataError
from training.regenerate import Writing, regenerate, regenerated

FIXTURE = Path(__file__).parents[1] / "fixtures" / "llama-n0"


@pytest.fixture(scope="module")
def target() -> Llama:
    return load_target(FIXTURE / "target", dtype=torch.float32)[0]


def corpus_of(*conversations: list[tuple[bool, list[int]]]) -> Corpus:
    """Conversations of (written by the assistant, token ids) parts."""
    tokens = [token for parts in conversations for _, ids in parts for token in ids]
    response = [mine for parts in conversations for mine, ids in parts for _ in ids]
    lengths = [sum(len(ids) for _, ids in parts) for parts in conversations]
    return Corpus(np.array(tokens, np.int32), np.array(response), np.cumsum([0, *lengths], dtype=np.int64), key="test")


CORPUS = corpus_of(
    [(False, [5, 6, 7, 8]), (True, [1, 2]), (False, [9, 10]), (True, [3])],
    [(False, [11, 12]), (True, [4, 4, 4])],
    [(False, [20, 21, 22]), (True, [1]), (False, [23]), (True, [1]), (False, [24, 25]), (True, [1])],
)


def greedy_turn(target: Llama, tokens: list[int], ends: frozenset[int], most: int) -> list[int]:
    """What the target says after ``tokens``, the slow way."""
    turn: list[int] = []
    while len(turn) < most and not (turn and turn[-1] in ends):
        hidden = target.encode(torch.tensor([tokens + turn])).hidden
        turn.append(int(target.logits(hidden[0, -1:]).argmax()))
    return turn


def expected(target: Llama, ends: frozenset[int], max_turn: int) -> set[tuple[int, ...]]:
    """CORPUS as the target would have it."""
    rows = set()
    for index in range(len(CORPUS)):
        tokens, response = CORPUS.row(index, 100)
        new: list[int] = []
        for position, (token, mine) in enumerate(zip(tokens.tolist(), response.tolist(), strict=True)):
            if not mine:
                new.append(token)
            elif not response[position - 1]:
                new += greedy_turn(target, new, ends, max_turn)
                if new[-1] not in ends:
                    break
        rows.add(tuple(new))
    return rows


@pytest.mark.parametrize(("in_step", "recorded"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_turns_are_what_the_target_says_to_what_went_before(
    target: Llama, slots: int, in_step: bool, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recorded:
        monkeypatch.setattr("training.regenerate._recorder", lambda device: rerun)
    # A token that the target likes to say ends its turns, so that several turns of a conversation are written.
    likely = greedy_turn(target, [20, 21, 22], frozenset(), 6)
    ends = frozenset({likely[3]})
    writing = Writing(ends, 64, max_turn=8, slots=slots, in_step=in_step)
    rows = regenerate(CORPUS, [0, 1, 2], target, writing, progress=False)
    assert {tuple(tokens.tolist()) for tokens, _ in rows} == expected(target, ends, 8)
    assert any(int((np.diff(response.astype(int)) == 1).sum()) > 1 for _, response in rows)


def test_the_mask_marks_what_the_target_wrote(target: Llama) -> None:
    rows = regenerate(CORPUS, [1], target, Writing(frozenset(), 64, max_turn=5), progress=False)
    ((tokens, response),) = rows
    assert tokens[:2].tolist() == [11, 12]
    assert response.tolist() == [False] * 2 + [True] * 5


def test_nothing_grows_beyond_the_longest_length(target: Llama) -> None:
    rows = regenerate(CORPUS, [0, 1, 2], target, Writing(frozenset(), 6, max_turn=50), progress=False)
    assert sorted(len(tokens) for tokens, _ in rows) == [6, 6, 6]


def test_sampled_turns_repeat_with_the_seed(target: Llama) -> None:
    def written(seed: int) -> list[list[int]]:
        writing = Writing(frozenset(), 64, temperature=1.0, max_turn=12, seed=seed)
        return [tokens.tolist() for tokens, _ in regenerate(CORPUS, [0, 1, 2], target, writing, progress=False)]

    assert written(1) == written(1) != written(2)


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-40, 5e-324])
def test_the_lowest_temperatures_are_greedy(target: Llama, temperature: float) -> None:
    def written(temperature: float) -> list[list[int]]:
        writing = Writing(frozenset(), 64, temperature=temperature, max_turn=6)
        return [tokens.tolist() for tokens, _ in regenerate(CORPUS, [0, 1, 2], target, writing, progress=False)]

    assert written(temperature) == written(0.0)


def test_conversations_of_which_none_can_be_written_are_counted(
    target: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regenerated(CORPUS, 3, target, Writing(frozenset(), 4, max_turn=3), tmp_path, Accelerator(cpu=True))
    told = "--regenerate: 1 of 3 conversations have no answer that begins within --max-length 4 and are left out"
    assert told in capsys.readouterr().err


def test_damaged_answers_are_written_again(target: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> Corpus:
        return regenerated(CORPUS, 2, target, Writing(frozenset(), 64, max_turn=4), tmp_path, Accelerator(cpu=True))

    first = make()
    wanted = first.tokens.tolist()
    (tmp_path / first.key / "tokens.npy").write_bytes(b"")
    assert make().tokens.tolist() == wanted
    assert f"{first.key} is damaged" in capsys.readouterr().err


def test_a_regenerated_corpus_is_kept_for_the_same_target_and_settings(
    target: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(writing: Writing) -> Corpus:
        return regenerated(CORPUS, 2, target, writing, tmp_path, Accelerator(cpu=True))

    first = make(Writing(frozenset(), 64, max_turn=4))
    assert len(first) == 2
    with monkeypatch.context() as patch:
        patch.setattr("training.regenerate.regenerate", lambda *_, **__: pytest.fail("written again"))
        again = make(Writing(frozenset(), 64, max_turn=4))
    assert again.key == first.key
    assert again.tokens.tolist() == first.tokens.tolist()
    assert make(Writing(frozenset(), 64, max_turn=5)).key != first.key


def test_where_nothing_can_be_written_it_says_why(target: Llama, tmp_path: Path) -> None:
    for _ in range(2):  # also where that is kept from before
        with pytest.raises(DataError, match="of 3 conversations none has an answer that begins within --max-length 2"):
            regenerated(CORPUS, 3, target, Writing(frozenset(), 2), tmp_path, Accelerator(cpu=True))


@pytest.mark.parametrize("indices", [[], [2]])
def test_one_processes_share_may_be_empty(target: Llama, tmp_path: Path, indices: list[int]) -> None:
    store(regenerate(CORPUS, indices, target, Writing(frozenset(), 3), progress=False), tmp_path / "share")
    share = stored(tmp_path / "share")
    assert len(share) == 0 and share.tokens.dtype == np.int32 and share.response.dtype == np.bool_


class CutOff(Exception):
    pass


class OneOfTwo:
    """Stands for the first of two processes, that is cut off while it waits for the other."""

    num_processes, process_index, is_main_process = 2, 0, True

    def wait_for_everyone(self) -> None:
        raise CutOff


def of_two(target: Llama, cache: Path) -> Corpus:
    one: Any = OneOfTwo()
    return regenerated(CORPUS, 3, target, Writing(frozenset(), 64, max_turn=4), cache, one)


def test_another_number_of_processes_takes_no_share_for_the_whole(
    target: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.regenerate.gather_object", lambda told: told)
    with pytest.raises(CutOff):
        of_two(target, tmp_path)
    (share,) = tmp_path.iterdir()
    assert share.name.endswith("-0-of-2")
    alone = regenerated(CORPUS, 3, target, Writing(frozenset(), 64, max_turn=4), tmp_path, Accelerator(cpu=True))
    assert len(alone) == 3
    assert [path.name for path in tmp_path.iterdir()] == [alone.key], "what was cut off is gone"


def test_machines_without_a_common_cache_are_told_before_anything_is_written(
    target: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other's folder is seen there alone.
    monkeypatch.setattr(
        "training.regenerate.gather_object", lambda told: [*told, "elsewhere"] if isinstance(told[0], str) else told
    )
    monkeypatch.setattr("training.regenerate.regenerate", lambda *_, **__: pytest.fail("written"))
    with pytest.raises(
        ConfigError, match=r"--cache, and .* is not the same folder for all of them: name one that the machines share"
    ):
        of_two(target, tmp_path)
    assert list(tmp_path.iterdir()) == []
