from dataclasses import replace

import pytest
import torch

from models.config import DecoderConfig, MoAConfig, RopeConfig
from models.moa import MoA
from training.errors import ConfigError
from training.narrowing import narrowed

TARGET = DecoderConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope=RopeConfig(),
)


@pytest.fixture
def moa() -> MoA:
    torch.manual_seed(0)
    return MoA(MoAConfig.from_target(TARGET, sa_intermediate_size=12, ca_intermediate_size=10))


def test_without_smaller_sizes_nothing_changes(moa: MoA) -> None:
    assert narrowed(moa, {}) is moa
    assert narrowed(moa, {"sa_intermediate_size": 12, "sa_num_kv_heads": moa.config.sa_num_kv_heads}) is moa


@torch.no_grad()
def test_dead_units_go_first_and_nothing_else_changes(moa: MoA) -> None:
    mlp = moa.sa.mlp
    dead = [1, 4, 7]
    mlp.down.weight[:, dead] = 0
    smaller = narrowed(moa, {"sa_intermediate_size": 9})
    assert smaller.config == replace(moa.config, sa_intermediate_size=9)
    x = torch.randn(5, 16)
    torch.testing.assert_close(smaller.sa.mlp(x), mlp(x))
    for name, tensor in smaller.state_dict().items():
        if not name.startswith("sa.mlp."):
            assert torch.equal(tensor, moa.state_dict()[name]), name


def test_what_cannot_be_cut_is_refused(moa: MoA) -> None:
    with pytest.raises(ConfigError, match="sa_intermediate_size = 12, which cannot become 13"):
        narrowed(moa, {"sa_intermediate_size": 13})
    with pytest.raises(ConfigError, match="only MLPs can change"):
        narrowed(moa, {"sa_num_kv_heads": moa.config.sa_num_kv_heads * 2})
