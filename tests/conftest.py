"""All tests: one thread a worker of pytest-xdist, and the slow ones first."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has a core. Small networks on two threads of two workers wait for one another: a fit of 5 s takes 50.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

settings.register_profile("any machine", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take tests in turn: with the longest first they end together."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
