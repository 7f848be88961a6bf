from dataclasses import replace

import pytest
import torch

from models.config import MoAConfig
from models.moa import MoA
from training.errors import ConfigError
from training.resizing import resized

from .tiny import TARGET


@pytest.fixture
def moa() -> MoA:
    torch.manual_seed(0)
    return MoA(MoAConfig.from_target(TARGET, sa_intermediate_size=12, ca_intermediate_size=10))


def test_without_other_sizes_nothing_changes(moa: MoA) -> None:
    assert resized(moa, {}) is moa
    assert resized(moa, {"sa_intermediate_size": 12, "sa_num_kv_heads": moa.config.sa_num_kv_heads}) is moa


@torch.no_grad()
def test_dead_units_go_first_and_nothing_else_changes(moa: MoA) -> None:
    mlp = moa.sa.mlp
    dead = [1, 4, 7]
    mlp.down.weight[:, dead] = 0
    smaller = resized(moa, {"sa_intermediate_size": 9})
    assert smaller.config == replace(moa.config, sa_intermediate_size=9)
    x = torch.randn(5, 16)
    torch.testing.assert_close(smaller.sa.mlp(x), mlp(x))
    for name, tensor in smaller.state_dict().items():
        if not name.startswith("sa.mlp."):
            assert torch.equal(tensor, moa.state_dict()[name]), name


@torch.no_grad()
def test_a_block_is_added_to_what_was_trained(moa: MoA) -> None:
    larger = resized(moa, {"draft_block_size": 5, "draft_block_intermediate_size": 7, "sa_intermediate_size": 9})
    assert larger.block is not None
    assert (larger.block.stand_ins.shape, larger.block.down.weight.shape) == ((4, 16), (16, 7))
    assert torch.equal(larger.ca.mlp.down.weight, moa.ca.mlp.down.weight)
    features, states = torch.randn(3, 16), torch.randn(3, 16)
    assert torch.equal(larger.block.step(states, larger.block.of_tokens(states), features), features), (
        "at first the head adds nothing"
    )
    with pytest.raises(ConfigError, match="draft_block_size = 5, which cannot become 6"):
        resized(larger, {"draft_block_size": 6})


@torch.no_grad()
def test_new_units_add_nothing_until_they_are_trained(moa: MoA) -> None:
    moa = resized(moa, {"draft_block_size": 5, "draft_block_intermediate_size": 7})
    assert moa.block is not None
    torch.nn.init.normal_(moa.block.down.weight)
    larger = resized(moa, {"ca_intermediate_size": 14, "draft_block_intermediate_size": 12})
    assert larger.block is not None and larger.block.from_token.weight.shape == (24, 16)
    x, states = torch.randn(3, 16), torch.randn(3, 16)
    torch.testing.assert_close(larger.ca.mlp(x), moa.ca.mlp(x))
    steps = [block.step(states, block.of_tokens(x) + block.of_positions(x), x) for block in (larger.block, moa.block)]
    torch.testing.assert_close(*steps)
    assert torch.equal(larger.block.stand_ins, moa.block.stand_ins)
    assert larger.block.from_state.weight[7:12].abs().min() > 0, "new units can learn"


def test_what_cannot_be_changed_is_refused(moa: MoA) -> None:
    with pytest.raises(ConfigError, match="only the widths of MLPs can change"):
        resized(moa, {"sa_num_kv_heads": moa.config.sa_num_kv_heads * 2})


@torch.no_grad()
def test_a_block_is_added_to_a_paired_drafter() -> None:
    torch.manual_seed(0)
    moa = MoA(MoAConfig.from_target(TARGET, has_entry=True, paired=True))
    assert moa.output_norm is not None
    larger = resized(moa, {"draft_block_size": 5})
    assert larger.block is not None and larger.block.copying is not None and larger.output_norm is None
    before = moa.state_dict()
    kept = {name for name, tensor in larger.state_dict().items() if name in before and torch.equal(tensor, before[name])}
    assert kept == before.keys() - {"output_norm.weight"}
