"""Files of engine steps, written by hand: as the forecast takes them, or a known part longer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelcast.app.questions.replay import ReplayQuestion, engine_service
from kernelcast.serving.service import Service
from kernelcast.serving.step_replay import StepComparison, StepForecasts
from kernelcast.serving.step_table import FILE_TYPE, StepTable, read_steps
from kernelcast.serving.step_times import StepTimeTables, step_time_tables

ENGINE: dict[str, Any] = {
    "kind": FILE_TYPE, "gpu": "h200_sxm", "model": "llama-3.1-8b", "engine_args": "", "engine": "vllm",
    "release": "0.22.1", "quantization": None, "dtype": "torch.bfloat16", "kv_cache_dtype": "auto", "tp": 1,
    "max_num_seqs": 256, "max_num_batched_tokens": 8192, "async_scheduling": True, "max_model_len": 16384,
    "block_size": 16, "kv_blocks": 50_000, "gpu_memory_utilization": 0.92,
    "cudagraph_mode": "CUDAGraphMode.FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)],
    "memory_bytes": {"weights": 16_060_000_000, "activation": 2_500_000_000, "context": 600_000_000},
}  # fmt: skip
KERNELS = {
    "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNN": [12, 3000.0], "cudaGraphLaunch": [3, 60.0],
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90>": [6, 600.0], "triton_poi_fused_mul_silu_1": [6, 90.0],
}  # fmt: skip


def step(kind: str, decodes: int, context: int, tokens: int = 0, prompts: int = 0, **more: Any) -> dict[str, Any]:
    sizes = {"decodes": decodes, "context": context, "prompt_tokens": tokens, "prompts": prompts, "past": 0}
    times = {"repeats": 9, "step_us": 1000.0, "spread": 0.01, "host_us": 500.0, "gpu_us": None}
    return {"kind": kind, **sizes, **times, **more}


STEPS = [
    *(step("decode", n, context) for context in (1024, 6000) for n in (1, 8, 64)), step("decode", 256, 1100),
    *(step(kind, n, 1050, tokens, 1) for n in (1, 64) for tokens in (128, 1024, 4096) for kind in ("mixed", "mixed")),
    step("alone", 0, 0, 512, 1), step("alone", 0, 0, 2048, 4), step("alone", 0, 0, 7900, 1),
]  # fmt: skip
PROFILED = {"decodes": 64, "context": 1050, "prompt_tokens": 512, "prompts": 1, "past": 0, "kind": "kernels",
            "repeats": 3, "kernels": KERNELS}  # fmt: skip


def written(path: Path, steps: Iterable[Mapping[str, Any]] = STEPS, **engine: Any) -> Path:
    lines = [{**ENGINE, **engine}, *steps, PROFILED]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def forecast(path: Path, tables: StepTimeTables | None = None, **given: Any) -> tuple[Service, StepForecasts]:
    table = read_steps(path)
    question = ReplayQuestion(bench=path, **given)
    service, _ = engine_service(table, question, None, set(given))
    return service, StepForecasts(service.pool, table, tables or step_time_tables())


def as_forecast(
    path: Path, longer: Callable[[StepComparison], float], tables: StepTimeTables, *,
    stack: Mapping[str, Any] | None = None, host: float = 1.0, records: Sequence[dict[str, Any]] = STEPS, **engine: Any
) -> StepTable:  # fmt: skip
    """A file whose steps take ``longer`` of their forecast by an engine with some other overheads."""
    _, forecasts = forecast(written(path, records, **engine), tables)
    other = replace(forecasts.stack.with_host(host), **(stack or {}))
    steps = []
    for each, record in zip(forecasts.compared(other, host), records, strict=True):
        step_s = longer(each)
        steps.append({**record, "step_us": step_s * 1e6, "host_us": each.host_s * 1e6})
    written(path, steps, **engine)
    return read_steps(path)
