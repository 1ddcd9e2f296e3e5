"""How the traces of this folder were recorded, on a CUDA GPU with PyTorch and transformers: python record.py FOLDER

Events keep only what `kernelcast diagnose` reads, so that a trace stays small; times count from the first event.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

DEVICE = "cuda"
KEPT_KINDS = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "user_annotation")
KEPT_ARGS = (
    "External id", "correlation", "Input Dims", "Input type", "Input Strides", "Concrete Inputs", "grid", "block",
    "registers per thread", "shared memory", "stream", "device", "bytes",
)  # fmt: skip
HEAD = ("schemaVersion", "deviceProperties", "cuda_runtime_version", "cuda_driver_version", "record_shapes")
LLAMA_8B = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def record(step: Callable[[], Any], path: Path) -> None:
    """One step after warming up, to a compressed Chrome trace."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda found: found.export_chrome_trace(str(raw)),
            record_shapes=True,
        ) as running:
            for _ in range(2):
                step()
                torch.cuda.synchronize()
                running.step()
        content = json.loads(raw.read_text(errors="replace"))
    text = json.dumps(trimmed(content), separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def trimmed(content: dict[str, Any]) -> dict[str, Any]:
    spans = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    launched = {event["args"].get("correlation") for event in spans if event.get("cat") in on_gpu}
    first = min(float(event["ts"]) for event in spans if event.get("cat") in KEPT_KINDS)
    kept = []
    for event in spans:
        args = event.get("args", {})
        launch = event.get("cat") in ("cuda_runtime", "cuda_driver") and args.get("correlation") in launched
        if event.get("cat") not in KEPT_KINDS and not launch:
            continue
        names = ("External id", "correlation") if launch else KEPT_ARGS
        kept.append({
            **{name: event[name] for name in ("ph", "cat", "name", "pid", "tid")},
            "ts": round(float(event["ts"]) - first, 3), "dur": round(float(event.get("dur", 0.0)), 3),
            "args": {name: value for name, value in args.items() if name in names},
        })  # fmt: skip
    return {
        **{name: content[name] for name in HEAD if name in content},
        "torch": torch.__version__,
        "traceEvents": kept,
    }


def record_model(folder: Path) -> None:
    """Four layers of Llama-3.1-8B with random weights: a prefill of 2,048 tokens, a decode step of 8 x 1,024."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=4, **LLAMA_8B)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.to(DEVICE, torch.bfloat16).eval()
    prompt = torch.randint(0, config.vocab_size, (1, 2048), device=DEVICE)
    context = torch.randint(0, config.vocab_size, (8, 1023), device=DEVICE)
    token = torch.randint(0, config.vocab_size, (8, 1), device=DEVICE)
    with torch.inference_mode():
        cache = model(context, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def prefill() -> None:
        model(prompt, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decode() -> None:
        model(token, past_key_values=cache, use_cache=True)
        cache.crop(1023)

    record(prefill, folder / "llama_8b_4_layers_prefill.json.gz")
    record(decode, folder / "llama_8b_4_layers_decode.json.gz")


def product(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """([batch,] m, n, k): A [m, k] and B as a Linear's weight lies, [n, k] transposed."""
    *batch, m, n, k = sizes
    a = torch.randn(*batch, m, k, device=DEVICE, dtype=dtype)
    return a, torch.randn(*batch, n, k, device=DEVICE, dtype=dtype).transpose(-1, -2)


def record_faults(folder: Path) -> None:
    """Each fault within an annotation of its name. cuBLAS evades a wave and a tile: it takes other tiles there."""
    torch.backends.cuda.matmul.allow_tf32 = False
    wide = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    products = {
        "aligned": product(4096, 4096, 4096),
        "unaligned_k": product(4096, 4096, 4095),
        "unaligned_n": (wide, torch.randn(4096, 4095, device=DEVICE, dtype=torch.bfloat16)),
        "one_wave": product(1536, 2816, 8192),
        "wave_plus_tile_a": product(896, 4864, 8192),
        "wave_plus_tile_b": product(2432, 1792, 8192),
        "wave_plus_tile_c": product(17024, 256, 8192),
        "wave_plus_tile_d": product(8456, 256, 8192),
        "split_k": product(128, 128, 65536),
        "fp32_gemm": product(4096, 4096, 4096, dtype=torch.float32),
    }
    more = {
        "bmm_one_wave": product(132, 128, 256, 4096),
        "bmm_wave_plus_tile": product(133, 128, 256, 4096),
        "no_split_k": product(2, 128, 128, 32768),
    }
    query = torch.randn(1, 32, 2048, 128, device=DEVICE)
    tiny = torch.randn(4096, device=DEVICE, dtype=torch.bfloat16)
    big = torch.randn(1 << 28, device=DEVICE, dtype=torch.bfloat16)
    few = torch.randn(8, 1 << 20, device=DEVICE, dtype=torch.bfloat16)

    @torch.inference_mode()
    def faults() -> None:
        for name, (a, b) in products.items():
            with record_function(f"fault.{name}"):
                torch.mm(a, b)
        with record_function("fault.fp32_attention"):
            torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        with record_function("fault.at_peak"):
            torch.mul(big, 2.0)
        with record_function("fault.tiny"):
            x = tiny
            for _ in range(200):
                x = x + 1.0

    @torch.inference_mode()
    def others() -> None:
        for name, (a, b) in more.items():
            with record_function(f"fault.{name}"):
                torch.bmm(a, b)
        with record_function("fault.few_ctas"):
            torch.softmax(few, -1)

    record(faults, folder / "planted_faults.json.gz")
    record(others, folder / "planted_faults_more.json.gz")


def record_waves(folder: Path) -> None:
    """As many products as the H200 has SMs, and one more, which no choice of tile evades: in fp32, and in bf16 with one
    operand for all of them, which keeps both away from memory's limit."""
    torch.backends.cuda.matmul.allow_tf32 = False
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    products = {f"fp32_{count}": product(count, 128, 128, 4096, dtype=torch.float32) for count in (sms, sms + 1)}
    for count in (sms, sms + 1):
        a, b = product(count, 256, 128, 8192)
        products[f"shared_{count}"] = (a[:1].expand(count, -1, -1), b)

    @torch.inference_mode()
    def waves() -> None:
        for name, (a, b) in products.items():
            with record_function(f"fault.{name}"):
                torch.bmm(a, b)

    record(waves, folder / "planted_waves.json.gz")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    record_faults(target)
    record_waves(target)
    record_model(target)
