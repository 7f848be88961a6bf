"""What a run reports, counted by hand."""

import json
from pathlib import Path

import pytest
import torch

from training.losses import Loss, Mean
from training.progress import Meter, cut_log, unbroken

DEPTHS = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1])
CORRECT = torch.tensor([1, 1, 0, 1, 0, 1, 1, 0, 1]).bool()


def loss(**means: float) -> Loss:
    return Loss(torch.tensor(0.0), {name: Mean(torch.tensor(9 * mean), 9) for name, mean in means.items()}, CORRECT)


def test_a_chain_is_broken_from_its_first_mistake_to_the_next_boundary():
    assert unbroken(CORRECT, DEPTHS).long().tolist() == [1, 1, 1, 1, 1, 0, 0, 1, 0]


def test_accuracy_and_acceptance_length_by_depth():
    meter = Meter(8)
    meter.add(loss(loss=1.0, kl=2.0), DEPTHS)
    assert meter.accuracy == [round(2 / 3, 5), round(2 / 3, 5), 0.5, 1.0]
    # Depth 0 holds in 2 of 3 chains, depth 1 in 1 of the 2 left, depth 2 in 0 of the 1 left.
    assert meter.acceptance_length == round(1 + 2 / 3 + 2 / 3 * 1 / 2, 4)


def test_losses_are_means_over_rows():
    meter = Meter(8)
    meter.add(loss(loss=1.0, kl=2.0), DEPTHS)
    meter.add(Loss(torch.tensor(0.0), {"loss": Mean(torch.tensor(12.0), 3)}, None), torch.zeros(3, dtype=torch.long))
    assert meter.losses() == {"loss": round((9 * 1.0 + 3 * 4.0) / 12, 5), "kl": 2.0}


def test_an_empty_meter_says_so_without_dividing_by_nothing():
    meter = Meter(8)
    assert (meter.losses(), meter.acceptance_length, meter.accuracy) == ({}, 1.0, [])


@pytest.mark.parametrize("measures_again", [False, True])
def test_a_log_keeps_what_a_checkpoint_has_seen(tmp_path: Path, measures_again: bool):
    log = tmp_path / "log.jsonl"
    lines = [{"kind": kind, "step": step} for kind, step in (("train", 1), ("train", 2), ("valid", 2), ("train", 3), ("valid", 3))]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr')
    cut_log(log, 2, measures_again=measures_again)
    assert [json.loads(line) for line in log.read_text().splitlines()] == (lines[:2] if measures_again else lines[:3])
    assert list(tmp_path.iterdir()) == [log]
    cut_log(tmp_path / "none.jsonl", 2, measures_again=measures_again)
    assert list(tmp_path.iterdir()) == [log]
