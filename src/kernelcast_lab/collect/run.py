"""Run a case on a CUDA GPU: build its model, time whole steps, profile one. Needs torch and transformers."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from kernelcast._version import __version__
from kernelcast.collect.session import DeviceLostError
from kernelcast.diagnose.chrome_events import Event, load_trace
from kernelcast_lab.collect.cases import MODELS, Case, with_layers
from kernelcast_lab.collect.steps import Step, build, make_step, set_precision
from kernelcast_lab.collect.store import Measured, Record, StepTiming, Timing, error_line
from kernelcast_lab.collect.trace import summarise, with_ops

WARM_UPS = 5
REPEATS = (10, 60)  # at least, at most
TIMED_S = 0.8  # timed steps of a case, where the least number of repeats allows

# With graphs around, CUPTI must not be taken down between profiles (pytorch/torch/profiler/profiler.py says why).
os.environ.setdefault("TEARDOWN_CUPTI", "0")
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")


T = TypeVar("T")


class CudaRunner:
    """Measures cases one after the other, keeping the model as long as the next case has the same."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._built: tuple[str, int, torch.dtype] | None = None
        self._model: Any = None

    def timed(self, case: Case) -> Timing:
        return self._kept(lambda: self._timed(case))

    def profiled(self, case: Case, timing: Timing) -> Measured:
        """A profiler that ran once slows every launch of this process: no case is timed after it."""
        return self._kept(lambda: self._profiled(case, timing))

    def _kept(self, measure: Callable[[], T]) -> T:
        """What ``measure`` finds, or its error; one that lost the device says so."""
        self._clear()
        try:
            return measure()
        except Exception as error:
            try:
                torch.cuda.synchronize()
            except Exception:
                raise DeviceLostError(f"the CUDA context is lost: {error_line(error)}") from error
            raise

    def _clear(self) -> None:
        """Give back what the last case held, also one that failed."""
        if self._model is not None:
            self._model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()

    def _timed(self, case: Case) -> Timing:
        set_precision(case.dtype)
        model = self._model_of(case)
        torch.cuda.reset_peak_memory_stats()
        eager = make_step(model, case, self.device)
        wall, gpu, repeats = time_steps(captured(eager) if case.launch == "graph" else eager, self.device)
        clock, power = _clock_and_power()
        return Timing(
            wall=wall,
            gpu=gpu,
            repeats=repeats,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            peak_memory_bytes=torch.cuda.max_memory_allocated(),
            sm_clock_mhz=clock,
            power_w=power,
        )

    def _profiled(self, case: Case, timing: Timing) -> Measured:
        set_precision(case.dtype)
        eager = make_step(self._model_of(case), case, self.device)
        for _ in range(WARM_UPS):
            eager()
        events = trace_events(captured(eager) if case.launch == "graph" else eager, self.device)
        if case.launch == "graph":
            events = with_ops(events, trace_events(eager, self.device))
        return Measured(**vars(timing), profile=summarise(events))

    def _model_of(self, case: Case) -> Any:
        built = (case.model, case.layers, torch.bfloat16 if case.dtype == "bf16" else torch.float32)
        if built != self._built:
            self._built, self._model = None, None  # before the next is built: both need not fit
            self._clear()
            self._model = build(with_layers(MODELS[case.model], case.layers), case.dtype, self.device)
            self._built = built
        return self._model


def captured(step: Step) -> Step:
    """The step as one replay of a CUDA graph. Warm-ups on a side stream, as capturing needs."""
    side: Any = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()

    def replay() -> object:
        graph.replay()
        return held  # the outputs live as long as the graph, which writes to them

    return replay


def time_steps(step: Step, device: torch.device) -> tuple[StepTiming, StepTiming, int]:
    """Host and device time of whole steps, each with the device idle before it."""
    cuda = device.type == "cuda"
    for _ in range(WARM_UPS):
        step()
    _wait(device)
    walls: list[float] = []
    gpus: list[float] = []
    least, most = REPEATS
    gc.collect()
    gc.disable()  # a collection of the model's many objects takes longer than a step
    while len(walls) < least or (len(walls) < most and sum(walls) < TIMED_S * 1e3):
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        start = time.perf_counter()
        if cuda:
            marks[0].record()
        step()
        if cuda:
            marks[1].record()
        _wait(device)
        walls.append((time.perf_counter() - start) * 1e3)
        gpus.append(marks[0].elapsed_time(marks[1]) if cuda else walls[-1])
    gc.enable()
    wall, gpu = (StepTiming(statistics.median(each_ms), min(each_ms), max(each_ms)) for each_ms in (walls, gpus))
    return wall, gpu, len(walls)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def trace_events(step: Step, device: torch.device) -> list[Event]:
    """Chrome-trace events of one step, with a step before it that takes the profiler's own start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            record_shapes=True,
        ) as profiler:
            for _ in range(2):
                step()
                _wait(device)  # or kernels of the first step would be counted in the second
                profiler.step()
        return load_trace(path)["traceEvents"]


def _clock_and_power() -> tuple[float | None, float | None]:
    """SM clock in MHz and power in W while the device is still warm; None without NVML's bindings."""
    try:
        return float(torch.cuda.clock_rate()), float(torch.cuda.power_draw()) / 1e3
    except Exception:
        return None, None  # both are extras: no module pynvml, or no permission


def device_state() -> Record:
    """What nvidia-smi says now of driver, clocks, power and heat; empty without it."""
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(query.split(","), (part.strip() for part in out.strip().split(",")), strict=False))


def environment() -> Record:
    """The machine and its software, once a run."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "triton": _version("triton"),
        "python": platform.python_version(),
        "kernelcast": __version__,
        "attention": "sdpa",
        "before": device_state(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
