"""A served model under load: requests over time, schedulers, KV cache, engines, and benchmarks of real servers."""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

_MOVED = {  # where names that were documented in 0.x are now, for one more release
    "fleet": {"Pool": "service.EnginePool", "Service": "service.Service"},
    "settings": {"settings_of": "service.engine_settings"},
    "load": {"read_bench": "bench.read_bench", "read_trace": "traces.read_trace"},
    "simulate": {"tables_for": "step_times.step_time_tables"},
    "calibrate": {"part_of": "calibrate.calibration_requests"},
}


def moved(module: str) -> Callable[[str], Any]:
    """``__getattr__`` of a module for names that have moved."""

    def find(name: str) -> Any:
        if name not in _MOVED[module]:
            raise AttributeError(f"module 'kernelcast.serving.{module}' has no attribute {name!r}")
        home, _, now = _MOVED[module][name].partition(".")
        warnings.warn(f"{module}.{name} is now kernelcast.serving.{home}.{now}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(f"kernelcast.serving.{home}"), now)

    return find


for _gone in ("fleet", "settings"):
    _module = ModuleType(f"kernelcast.serving.{_gone}")
    _module.__getattr__ = moved(_gone)  # type: ignore[method-assign]
    sys.modules[_module.__name__] = _module
