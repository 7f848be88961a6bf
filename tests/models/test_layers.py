"""Layers, where they do something else while training."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from models.layers import RMSNorm


def test_a_norm_that_is_trained_is_validated_with_the_weights_of_now() -> None:
    norm, x = RMSNorm(8, 1e-6), torch.randn(3, 8)
    with torch.no_grad():
        norm(x)
    norm(x).square().sum().backward()
    torch.optim.SGD(norm.parameters(), lr=0.1).step()
    with torch.no_grad():
        torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), norm.weight, 1e-6))
