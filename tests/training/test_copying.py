from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.config import COPYING_THETA, MoAConfig
from models.llama import Llama
from models.moa import MoA
from models.rope import RopeConfig
from training.copying import begin_with_copying
from training.forward import DraftForward
from training.masks import cross_attention_mask, self_attention_mask
from training.resizing import resized

from . import tiny

TARGET = replace(tiny.TARGET, vocab_size=256, hidden_size=192, head_dim=48)


def fresh(**sizes: int) -> MoA:
    return MoA(MoAConfig.from_target(TARGET, has_entry=True, **sizes))


@torch.no_grad()
def rank_of_what_followed(moa: MoA, target: Llama, texts: Tensor, at: Tensor, *, depth: int) -> float:
    """Mean rank, over texts [B, S] whose last tokens stood ``at`` [B] before, of what followed there; nothing else says so.

    The last token is the root of a draft, or was drafted at ``depth``.
    """
    boundaries = torch.ones_like(texts, dtype=torch.bool)
    boundaries[:, -1 - depth :] = False
    masks = self_attention_mask(boundaries, torch.zeros(len(texts), dtype=torch.bool)), cross_attention_mask(boundaries)
    out = DraftForward(moa)(target, texts, target.encode(texts), *masks, boundaries, ~boundaries)
    logits = out.feature.view(len(texts), 1 + depth, -1)[:, -1] @ target.lm_head.weight.T
    followed = texts.gather(1, at.unsqueeze(1) + 1)
    return float((logits > logits.gather(1, followed)).sum(dim=1).float().mean())


@pytest.fixture
def texts() -> tuple[Tensor, Tensor]:
    """Random texts of 10 tokens, all different but for the last two, and where the second of those stood before."""
    torch.manual_seed(0)
    texts = torch.stack([torch.randperm(256)[:10] for _ in range(200)])
    at = torch.randint(1, 7, (200,))
    texts[:, -2:] = texts.gather(1, torch.stack((at - 1, at), dim=1))
    return texts, at


def talking_target() -> Llama:
    """One that says its tokens' embeddings."""
    target = Llama(TARGET).requires_grad_(False)
    torch.nn.init.normal_(target.lm_head.weight)
    target.embedding.weight.copy_(target.lm_head.weight)
    return target


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("block", [0, 4], ids=["level by level", "block"])
def test_an_untrained_drafter_says_what_followed_the_last_tokens_before(
    texts: tuple[Tensor, Tensor], block: int, depth: int
) -> None:
    target = talking_target()
    moa = fresh(paired=True, draft_block_size=block)
    by_chance = rank_of_what_followed(moa, target, *texts, depth=depth)
    begin_with_copying(moa)
    assert rank_of_what_followed(moa, target, *texts, depth=depth) < 0.75 * by_chance


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_block_that_is_added_copies_as_the_drafter_does(texts: tuple[Tensor, Tensor], depth: int) -> None:
    target, moa = talking_target(), fresh(paired=True)
    begin_with_copying(moa)
    by_itself = rank_of_what_followed(moa, target, *texts, depth=depth)
    assert rank_of_what_followed(resized(moa, {"draft_block_size": 4}), target, *texts, depth=depth) < 0.8 * by_itself


@pytest.mark.parametrize("sizes", [{}, {"paired": True, "attends_to_all_memory": False}], ids=["no pairs", "newest memory alone"])
def test_a_drafter_that_cannot_copy_stays_as_it_is(sizes: dict[str, int]) -> None:
    moa = fresh(**sizes)
    before = {name: weight.clone() for name, weight in moa.state_dict().items()}
    begin_with_copying(moa)
    assert all(torch.equal(before[name], weight) for name, weight in moa.state_dict().items())


def test_new_paired_drafters_turn_slowly_and_say_so() -> None:
    config = MoAConfig.from_target(TARGET, has_entry=True, paired=True)
    assert config.rope == RopeConfig(theta=COPYING_THETA)
    assert MoAConfig.from_hf(config.to_hf(), TARGET) == config
    assert MoAConfig.from_target(TARGET).rope == TARGET.rope, "the paper's has its target's"
    far = replace(TARGET, rope=RopeConfig(theta=5e6))
    assert MoAConfig.from_target(far, has_entry=True, paired=True).rope == far.rope
