"""Imports that 0.2 documented work for one more release, with a warning."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

DOCUMENTED = {  # in README and docs of 0.2
    "kernelcast.kernels.base": ("Calls", "Kernel", "size"),
    "kernelcast.kernels.work": ("Work", "Works", "ceil_div"),
    "kernelcast.networks": ("model",),
    "kernelcast.networks.deployment": ("Deployment",),
    "kernelcast.parallel": ("Layout",),
    "kernelcast.parallel.training": ("TrainingLayout",),
    "kernelcast.serving.engine.fleet": ("Pool", "Service"),
    "kernelcast.serving.engine.settings": ("settings_of",),
    "kernelcast.serving.engine.simulate": ("tables_for",),
    "kernelcast.serving.infer": ("infer", "infer_columns"),
    "kernelcast.serving.load": ("read_bench", "read_trace"),
    "kernelcast.serving.replay": ("calibrate", "part_of"),
    "kernelcast.serving.workload": ("Workload",),
}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_a_documented_import_of_the_release_before_warns_and_works(module: str) -> None:
    for name in DOCUMENTED[module]:
        with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now kernelcast"):
            assert getattr(import_module(module), name) is not None


def test_it_is_found_before_anything_else_was_imported() -> None:
    code = "from kernelcast.serving.engine.fleet import Pool; from kernelcast.networks.deployment import Deployment"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(ImportError):
        from kernelcast.parallel import nothing  # type: ignore[import-not-found]  # noqa: F401
