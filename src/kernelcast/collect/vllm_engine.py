"""vLLM's engine core in this process, with dummy weights, for ``engine_steps``.

It is built from the arguments of `vllm serve`, so that its scheduler, memory and graphs are those of a server; only the
HTTP front end is missing. Written for vLLM 0.14 to 0.22 (the V1 engine with asynchronous scheduling).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kernelcast.collect.engine_steps import TimedStep
from kernelcast.errors import KernelcastError
from kernelcast.models.catalogue import config as model_config

_OLDEST = "0.14"
_ROUTERS = (".gate", ".router")  # modules of vLLM's models, before the last part of a weight's name
_ROUTER_SCALE = 1e5  # scores of about 1 of hidden sizes of thousands: norms are within 0.001 too


@contextmanager
def measured_engine(model: str, arguments: str) -> Iterator[tuple[VllmEngine, Mapping[str, Any]]]:
    """The engine that `vllm serve MODEL ARGUMENTS` would start, and its settings."""
    with TemporaryDirectory(prefix="kernelcast-") as folder:
        core = _core(model, arguments, Path(folder))
        if worker := worker_of(core):
            route_by_chance(worker.model_runner.model.state_dict())
        try:
            yield VllmEngine(core), settings_of(core)
        finally:
            core.shutdown()


def installed_release() -> str:
    """The release of the vLLM that is installed; refuses to go without one, or with one that is too old."""
    try:
        release = version("vllm")
    except PackageNotFoundError:
        raise KernelcastError(f"`engine` vllm needs vLLM {_OLDEST} or newer: pip install vllm") from None
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) < tuple(map(int, _OLDEST.split("."))):
        raise KernelcastError(f"`engine` vllm needs vLLM {_OLDEST} or newer, not {release}: pip install -U vllm")
    return release


def _core(model: str, arguments: str, folder: Path) -> Any:
    release = installed_release()
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor
    except ImportError as error:
        raise KernelcastError(f"vLLM {release} has not the parts that steps are timed with: {error}") from None
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    always = ["--model", str(_written(model, folder)), "--load-format", "dummy", "--skip-tokenizer-init"]
    try:
        given = parser.parse_args([*always, *shlex.split(arguments)])
    except (SystemExit, Exception) as error:
        raise KernelcastError(f"`engine_args` {arguments!r}: vLLM does not take them: {error}") from None
    wanted = AsyncEngineArgs.from_cli_args(given).create_engine_config(UsageContext.OPENAI_API_SERVER)
    return EngineCore(wanted, Executor.get_class(wanted), log_stats=False)


def _written(model: str, folder: Path) -> Path:
    """A folder with the model's config.json, and no weights."""
    given = Path(model).expanduser()
    if given.is_dir():
        return given
    _, fields = model_config(model)
    given_fields = {name: value for name, value in fields.items() if not name.startswith("_")}
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "torch_dtype": "bfloat16", **given_fields}))
    return folder


def worker_of(core: Any) -> Any:
    """What runs the model, where it is in this process; else None."""
    return getattr(getattr(core.model_executor, "driver_worker", None), "worker", None)


def route_by_chance(weights: Mapping[str, Any]) -> None:
    """Dummy weights are within 0.001: scores of a router are alike to four digits, so that all tokens have the same
    experts where they are rounded to bf16, or where a bias of 0.001 decides. Larger weights and no bias route as
    random ones of a usual size do. The layer of experts holds its router too, under a second name."""
    done = set()
    for name, values in weights.items():
        module, _, what = name.rpartition(".")
        if what == "e_score_correction_bias":
            values.zero_()
        elif module.endswith(_ROUTERS) and values.data_ptr() not in done:
            done.add(values.data_ptr())
            values.mul_(_ROUTER_SCALE) if what == "weight" else values.zero_()


class VllmEngine:
    """The engine of ``engine_steps.Engine``."""

    def __init__(self, core: Any) -> None:
        import torch

        self.core, self._torch, self._count = core, torch, 0
        config = core.vllm_config
        self.max_num_seqs = config.scheduler_config.max_num_seqs
        self.max_num_batched_tokens = config.scheduler_config.max_num_batched_tokens
        self.max_model_len = config.model_config.max_model_len
        self.vocab = config.model_config.get_vocab_size()
        self.kv_tokens = _kv_tokens(core)
        self.open: dict[int, TimedStep] = {}
        self.done: list[TimedStep] = []
        self._watch()

    def _watch(self) -> None:
        """Time what the loop calls: schedule's result goes to ``execute_model`` and comes back to
        ``update_from_output``."""
        executor, scheduler = self.core.model_executor, self.core.scheduler
        execute, sample, update = executor.execute_model, executor.sample_tokens, scheduler.update_from_output
        worker = worker_of(self.core)
        cuda = self._torch.cuda
        last: list[TimedStep] = []

        def executed(output: Any, *given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            if not output.total_num_scheduled_tokens:
                return execute(output, *given, **named)
            step = composed(output, began)
            self.open[id(output)] = step
            last[:] = [step]
            if worker is not None:
                step.events = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                step.events[0].record()
            result = execute(output, *given, **named)
            step.host_s = time.perf_counter() - began
            return result

        def sampled(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = sample(*given, **named)
            if last:
                if last[0].events:
                    last[0].events[1].record()
                last[0].host_s += time.perf_counter() - began
            return result

        def updated(output: Any, *given: Any, **named: Any) -> Any:
            if step := self.open.pop(id(output), None):
                step.done_s = time.perf_counter()
                self.done.append(step)
            return update(output, *given, **named)

        executor.execute_model, executor.sample_tokens, scheduler.update_from_output = executed, sampled, updated

    def add(self, prompt_tokens: int, output_tokens: int) -> str:
        import numpy as np
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._count += 1
        name = f"kernelcast-{self._count}"
        room = self.max_model_len - prompt_tokens
        tokens = np.random.default_rng(self._count).integers(10, self.vocab - 10, prompt_tokens).tolist()
        parameters = SamplingParams(max_tokens=min(output_tokens, room), ignore_eos=True, temperature=1.0)
        request = EngineCoreRequest(
            request_id=name, prompt_token_ids=tokens, mm_features=None, sampling_params=parameters,
            pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        self.core.add_request(*self.core.preprocess_add_request(request))
        return name

    def abort(self, requests: list[str]) -> None:
        if requests:
            self.core.abort_requests(requests)

    def step(self) -> bool:
        if not self.core.scheduler.has_requests() and not self.core.batch_queue:
            return False
        _, executed = self.core.step_fn()
        self.core.post_step(executed)
        return True

    def take(self) -> list[TimedStep]:
        taken, self.done = self.done, []
        return taken

    def profiled(self, run: Callable[[], None]) -> dict[str, tuple[int, float]]:
        from torch.profiler import ProfilerActivity, profile

        self._torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            run()
            self._torch.cuda.synchronize()
        kernels: dict[str, tuple[int, float]] = {}
        for event in recorded.profiler.kineto_results.events():
            name = event.name()
            count, seconds = kernels.get(name, (0, 0.0))
            kernels[name] = count + 1, seconds + event.duration_ns() / 1e9
        return kernels


def _kv_tokens(core: Any) -> int:
    """Of the KV cache, as the engine logs them; in older releases by its blocks. Groups of layers (whole attention,
    windows, states) take blocks of one pool, each its own for the same tokens."""
    config = core.vllm_config
    try:
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config as requests_of

        return int(requests_of(config, core.scheduler.kv_cache_config) * config.model_config.max_model_len)
    except (ImportError, AttributeError, TypeError):
        groups = getattr(core.scheduler.kv_cache_manager, "num_kv_cache_groups", 1)
        return int(config.cache_config.num_gpu_blocks // groups * config.cache_config.block_size)


def composed(output: Any, began: float) -> TimedStep:
    """What a scheduled step of vLLM computes."""
    cached, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
    decodes, context, prompts, prompt_tokens, past = 0, 0, 0, 0, 0.0
    for name, computed, written in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        if written or tokens[name] == 1:
            decodes, context = decodes + 1, context + computed
        else:
            prompts, prompt_tokens, past = prompts + 1, prompt_tokens + tokens[name], past + computed * tokens[name]
    for new in output.scheduled_new_reqs:
        count = tokens[new.req_id]
        prompts, prompt_tokens, past = prompts + 1, prompt_tokens + count, past + new.num_computed_tokens * count
    return TimedStep(decodes, context / max(decodes, 1), prompts, prompt_tokens, past / max(prompt_tokens, 1), began)


def settings_of(core: Any) -> Mapping[str, Any]:
    """What the engine chose: its release, scheduler, memory and graphs."""
    import vllm

    config = core.vllm_config
    compilation = config.compilation_config
    worker = worker_of(core)
    held = {"weights": getattr(getattr(worker, "model_runner", None), "model_memory_usage", None),
            "activation": getattr(worker, "peak_activation_memory", None),
            "context": getattr(worker, "non_torch_memory", None),
            "graphs": getattr(worker, "cudagraph_memory_estimate", None),
            "used_share": getattr(worker, "requested_memory", None)}  # fmt: skip
    return {
        "memory_bytes": {name: int(size) for name, size in held.items() if size is not None},
        "engine": "vllm", "release": vllm.__version__, "architecture": config.model_config.architectures,
        "quantization": config.model_config.quantization, "dtype": str(config.model_config.dtype),
        "kv_cache_dtype": config.cache_config.cache_dtype, "tp": config.parallel_config.tensor_parallel_size,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "max_model_len": config.model_config.max_model_len,
        "block_size": config.cache_config.block_size, "kv_blocks": config.cache_config.num_gpu_blocks,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "cudagraph_capture_sizes": list(compilation.cudagraph_capture_sizes or ()),
    }  # fmt: skip
