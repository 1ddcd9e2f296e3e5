"""Files that commands of the pages read and that no block of the page makes: small, invented, one function each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from doc_blocks import run_kernelcast


def my_gpu(path: Path) -> None:
    """A GPU of one's own, as ``collect --specs`` would write one."""
    path.write_text(
        'base = "h200_sxm"\nname = "An H200 with faster memory"\n'
        'dram_bytes_per_s = [6.0e12, "assumed"]\n\n[sources]\nassumed = "assumed"\n'
    )


def odd_gpu(path: Path) -> None:
    """A GPU file that contradicts itself: twice the FLOPs that its SMs can do."""
    path.write_text(
        'base = "h100_sxm"\nname = "An odd one"\n[published_flops_per_s]\nbf16 = [2e15, "assumed"]\n'
        '[sources]\nassumed = "assumed"\n'
    )


def calls(path: Path) -> None:
    path.write_text("op,m,n,k,dtype\ngemm,4096,4096,4096,bf16\ngemm,512,4096,4096,bf16\n")


def measured(path: Path) -> None:
    """Forty times of products, as the example of ``kernelcast calibrate --help`` invents them."""
    rows = [f"gemm,{64 * i},4096,4096,bf16,{9 + 2.6 * i:g}" for i in range(1, 41)]
    path.write_text("\n".join(["op,m,n,k,dtype,latency_us", *rows]) + "\n")


def requests(path: Path) -> None:
    """Forty requests, two a second."""
    rows = [f"{i / 2},{512 + 64 * (i % 7)},{64 + 16 * (i % 3)}" for i in range(40)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]) + "\n")


def batch(path: Path) -> None:
    """Eight requests that start together."""
    path.write_text("input_tokens,output_tokens\n" + "".join(f"{512 + 256 * i},128\n" for i in range(8)))


def mooncake(path: Path) -> None:
    """Conversations whose prompts share blocks of 512 tokens."""
    rows = [
        {
            "timestamp": 250 * i,
            "input_length": 1100 + 100 * (i % 3),
            "output_length": 64,
            "hash_ids": [i % 4, 10 + i, 50 + i],
        }
        for i in range(40)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def bench(path: Path) -> None:
    """What ``vllm bench serve --save-detailed`` would write of a server that takes a tenth longer than its forecast."""
    rows = path.with_suffix(".jsonl")
    code, printed = run_kernelcast(
        ["simulate", "llama-3.1-8b", "--gpu", "h100_sxm", "--max-num-seqs", "256", "--request-rate", "8",
         "--num-prompts", "60", "--input-len", "1024", "--output-len", "64", "--no-intervals",
         "--requests-out", str(rows)]
    )  # fmt: skip
    assert code == 0, printed
    served = [json.loads(line) for line in rows.read_text().splitlines()]
    rows.unlink()
    found = {
        "backend": "vllm", "model_id": "meta-llama/Llama-3.1-8B-Instruct", "request_rate": 8.0,
        "completed": len(served), "request_throughput": 8.0,
        "input_lens": [row["input_tokens"] for row in served], "output_lens": [row["output_tokens"] for row in served],
        "start_times": [row["arrival_s"] for row in served], "errors": [""] * len(served),
        "ttfts": [1.1 * (row["first_token_s"] - row["arrival_s"]) for row in served],
        "itls": [
            [1.1 * (row["last_token_s"] - row["first_token_s"]) / gaps] * gaps
            for row in served
            for gaps in [row["output_tokens"] - 1]
        ],
    }  # fmt: skip
    path.write_text(json.dumps(found))


def llama_config(path: Path) -> None:
    """A small Llama as its config.json on Hugging Face."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096,
        "hidden_act": "silu", "max_position_embeddings": 4096,
    }  # fmt: skip
    path.write_text(json.dumps(config))


def whisper_config(path: Path) -> None:
    config = {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 128,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "vocab_size": 1000, "num_mel_bins": 80,
        "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
        "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    path.write_text(json.dumps(config))


def host(path: Path) -> None:
    """A host as ``collect --host`` writes one."""
    costs = {
        "step_s": 2e-4, "launch_s": 8e-6, "view_s": 5e-6, "python_s": 1.2e-6, "recorded_s": 2e-5, "backward_s": 4e-6,
        "backward_view_s": 4e-6, "parameter_s": 1.2e-5, "gap_s": 1e-6, "graph_gap_s": 9e-7, "graph_s": 2e-5,
        "faster": 0.2, "slower": 0.3,
    }  # fmt: skip
    lines = [f"{name} = {value}" for name, value in costs.items()]
    path.write_text("\n".join(['name = "my machine"', *lines, "[sources]", 'all = "assumed"']) + "\n")


FILES: dict[str, dict[str, Callable[[Path], None]]] = {
    "README.md": {"my_gpu.toml": my_gpu, "bench.json": bench},
    "docs/calibration.md": {"measured.csv": measured, "calls.csv": calls},
    "docs/howto/engineer.md": {"bench.json": bench},
    "docs/howto/recipes.md": {"bench.json": bench},
    "docs/infer.md": {"requests.csv": batch},
    "docs/load.md": {"vllm-result.json": bench},
    "docs/new-gpu.md": {"odd.toml": odd_gpu},
    "docs/plan.md": {"requests.csv": requests},
    "docs/replay.md": {"bench.json": bench},
    "docs/simulate.md": {"mooncake.jsonl": mooncake},
    "docs/trace.md": {"path/to/config.json": llama_config, "whisper/config.json": whisper_config, "my_host.toml": host},
}


def make_files(page: str, folder: Path) -> None:
    """What the commands of a page read."""
    for name, make in FILES.get(page, {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
