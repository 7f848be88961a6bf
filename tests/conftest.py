"""What every test shares: order, and quiet libraries."""

import os

import pytest

# No test may reach a model hub: what is missing locally fails at once instead of after a network time-out.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Where processes share the tests out, threads of one would wait for those of another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests first: they fail in seconds. The sort is stable, so files keep their order."""
    items.sort(key=lambda item: item.get_closest_marker("integration") is not None)
