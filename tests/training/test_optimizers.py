"""Which weights are changed by which optimizer, and by how much."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.config import MoAConfig
from models.llama import Llama
from models.loader import target_config
from models.moa import MoA
from training.choices import Optimizer
from training.config import PretrainConfig
from training.muon import StackedMuon
from training.optimizers import optimizers

SIZES = target_config(Path(__file__).parents[1] / "fixtures" / "llama-n0" / "target")
CPU = torch.device("cpu")
PYTORCHS = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")


def config(optimizer: Optimizer) -> PretrainConfig:
    return PretrainConfig(base="any", data=Path("any"), out=Path("any"), max_steps=1, lr=0.01, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "network", [Llama(SIZES), MoA(MoAConfig.from_target(SIZES, draft_block_size=5, draft_block_intermediate_size=16))]
)
def test_each_weight_is_in_one(optimizer: Optimizer, network: torch.nn.Module):
    made = optimizers(config(optimizer), network, CPU)
    inside = [parameter for each in made for group in each.param_groups for parameter in group["params"]]
    assert sorted(map(id, inside)) == sorted(map(id, network.parameters()))
    assert len(made) == (1 if optimizer == "adamw" else 2)


def test_muon_has_the_layers_matrices_and_no_table_of_tokens():
    target = Llama(SIZES)
    rest, matrices = ({id(x) for x in each.param_groups[0]["params"]} for each in optimizers(config("muon"), target, CPU))
    assert {id(target.embedding.weight), id(target.lm_head.weight), id(target.norm.weight)} <= rest
    inside = {id(x) for x in target.layers.parameters()}
    assert {id(x) for x in target.layers.parameters() if x.dim() == 2} == matrices & inside == matrices


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_its_steps_are_as_large_as_adamws_whatever_the_gradient(scale: float):
    target = Llama(SIZES)
    weight = target.layers[0].mlp.gate_up.weight
    before = weight.detach().clone()
    for parameter in target.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    for each in optimizers(config("muon"), target, CPU):
        each.step()
    step = (weight.detach() - before).square().mean().sqrt() / 0.01
    assert 0.1 < float(step) < 0.3  # AdamW's have a root mean square of about 0.2 in training (arXiv 2502.16982)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_weights_of_one_shape_together_get_the_steps_that_each_gets_alone(precision: torch.dtype):
    def trained(kind: Callable[[list[torch.Tensor], float, float], torch.optim.Muon]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        weights = [torch.randn(shape, generator=generator) for shape in ((48, 16), (16, 48), (48, 16), (32, 32))]
        muon = kind(weights, 0.02, 0.1)
        for step in range(5):
            for number, weight in enumerate(weights):
                unused = step == 1 and number == 2
                weight.grad = None if unused else torch.randn(weight.shape, generator=generator)
            muon.step()
        return weights

    for ours, theirs in zip(trained(partial(StackedMuon, precision=precision)), trained(PYTORCHS), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)  # bfloat16's rounding; the steps themselves are of 0.02


def test_its_state_is_that_of_pytorchs():
    made = []
    for kind in (PYTORCHS, StackedMuon):
        weight = torch.ones(4, 8)
        weight.grad = torch.ones(4, 8)
        muon = kind([weight], 0.02, 0.1)
        muon.step()
        made.append(muon.state_dict())
    torch.testing.assert_close(made[0]["state"], made[1]["state"])
    assert made[0]["param_groups"] == made[1]["param_groups"]


@pytest.mark.parametrize("tiles", [True, False])
def test_a_cpu_that_does_not_multiply_bfloat16_is_spared_it(tiles: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("models.tiles.has_tiles", lambda: tiles)
    products: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "mm" in func.__name__:
                products.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    target = Llama(SIZES)
    for parameter in target.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Watch():
        optimizers(config("muon"), target, CPU)[1].step()
    assert products == {torch.bfloat16 if tiles else torch.float32}
