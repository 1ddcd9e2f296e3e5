"""All tests: one thread a worker of pytest-xdist, the slow ones first; the command line, run in this process."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background so that they ignore Ctrl-C, and programs that tests start would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has a core. Small networks on two threads of two workers wait for one another: a fit of 5 s takes 50.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
if importlib.util.find_spec("torch"):
    # a torchvision for GPUs does not import beside a PyTorch without them, nor does what imports it, unless this has
    import kernelcast.tracing.hub  # noqa: F401
# A busy machine is slow, not wrong; and what a commit is judged by is the same every time it is run
settings.register_profile("any machine", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in turn: with the longest first they end together."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is on one worker, for its tests share what takes long to make; pages of the docs are on any."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return nodeid if path == "tests/docs/test_doc_examples.py" else path

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command: exit code, standard output, standard error."""
    from kernelcast.app.cli.app import main  # late, so that the number of threads is set before NumPy is loaded

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call
