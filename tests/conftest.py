"""All tests: one thread a worker of pytest-xdist, the slow ones first; the command line, run in this process."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path

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
    import kernelcast.tracing  # noqa: F401
# A busy machine is slow, not wrong; and what a commit is judged by is the same every time it is run
settings.register_profile("any machine", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file is on one worker, for its tests share what takes long to make, unless it says ``xdist_group`` itself. The
    longest first, so that workers end together."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


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
