"""Which whole models are measured, at which points, and in which order.

A model is what its config.json on the Hugging Face hub says, as far as it changes the work: the catalogue of the
product has it, nothing is downloaded. Cases come in two rounds: the first covers every model and mode, so that an
interrupted run still has all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kernelcast.errors import KernelcastError
from kernelcast.models import catalogue
from kernelcast.models.config import parse

Mode = Literal["prefill", "decode", "training"]
Launch = Literal["eager", "graph"]
Config = dict[str, Any]

# Fields of the config that running a model needs and forecasting does not.
# fmt: off
_RUNNING: dict[str, Config] = {
    "llama-3.1-8b": {
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    "qwen2.5-7b": {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
    "qwen3-4b": {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
    "gpt2-xl": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "opt-1.3b": {"dropout": 0.1, "attention_dropout": 0.0, "layerdrop": 0.0},
    "bert-large": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "tie_word_embeddings": True},
    "qwen3-30b-a3b": {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "norm_topk_prob": True},
}
# fmt: on
MODELS: dict[str, Config] = {name: catalogue.config(name)[1] | running for name, running in _RUNNING.items()}

# A dozen of 48 alike layers measure the same kernels in a quarter of the time and memory (30.5e9 -> 8.1e9 weights).
LAYERS = {"qwen3-30b-a3b": 12}

# Model, mode [graph] [dtype], batch x sequence ...; for decode the sequence is the context, new token included.
_FIRST = """
llama-3.1-8b  | prefill       | 1x512 1x2048 8x1024
llama-3.1-8b  | decode graph  | 1x1024 16x1024 64x1024 16x4096
llama-3.1-8b  | decode        | 1x1024
llama-3.1-8b  | training      | 1x512 4x512
qwen3-30b-a3b | prefill       | 1x512 1x2048 8x1024
qwen3-30b-a3b | decode graph  | 1x1024 16x1024 64x4096
qwen3-30b-a3b | decode        | 1x1024
qwen3-30b-a3b | training      | 1x512 4x512
gpt2-xl       | prefill       | 1x512 8x1024
gpt2-xl       | decode graph  | 1x1024 64x1024
gpt2-xl       | decode        | 1x1024
gpt2-xl       | training      | 1x512 4x512
bert-large    | prefill       | 1x512 8x512
bert-large    | training      | 1x512 8x512
bert-large    | training tf32 | 8x512
qwen2.5-7b    | prefill       | 1x512 8x1024
qwen2.5-7b    | decode graph  | 1x1024 16x1024 64x4096
qwen2.5-7b    | decode        | 1x1024
qwen2.5-7b    | training      | 4x512
qwen3-4b      | prefill       | 1x512 8x1024
qwen3-4b      | decode graph  | 1x1024 16x4096 64x1024
qwen3-4b      | training      | 1x512 4x512
opt-1.3b      | prefill       | 1x512 8x1024
opt-1.3b      | decode graph  | 1x1024 64x1024
opt-1.3b      | training      | 1x512 4x512
"""
_SECOND = """
llama-3.1-8b  | prefill       | 4x4096
llama-3.1-8b  | decode graph  | 1x4096 64x4096
llama-3.1-8b  | decode        | 16x4096
llama-3.1-8b  | training      | 1x2048
gpt2-xl       | prefill       | 1x1024
gpt2-xl       | decode graph  | 16x1024
gpt2-xl       | training      | 8x1024
gpt2-xl       | training tf32 | 4x512
bert-large    | prefill       | 32x512
bert-large    | training      | 32x512
bert-large    | training fp32 | 8x512
qwen2.5-7b    | prefill       | 1x2048
qwen2.5-7b    | training      | 1x512
qwen3-4b      | prefill       | 1x2048 4x4096
qwen3-4b      | decode        | 16x4096
qwen3-4b      | training      | 4x1024
opt-1.3b      | prefill       | 1x2048
opt-1.3b      | decode graph  | 16x2048
opt-1.3b      | decode        | 1x1024
opt-1.3b      | training      | 8x1024
"""


@dataclass(frozen=True)
class Case:
    """One model at one point: what is run, and how it is launched. ``seq`` is the context in decode."""

    model: str
    mode: Mode
    launch: Launch
    dtype: str
    batch: int
    seq: int
    layers: int

    @property
    def id(self) -> str:
        return f"{self.model}/l{self.layers}/{self.mode}/{self.launch}/{self.dtype}/b{self.batch}/s{self.seq}"


def case_table() -> tuple[Case, ...]:
    """Every case, the most useful first; those of one model and dtype lie together, for it is built once."""
    return tuple(case for line in (_FIRST + _SECOND).splitlines() if line for case in cases_of(line))


def chosen(only: Iterable[str]) -> tuple[Case, ...]:
    """The cases whose id contains one of these (all for none)."""
    parts = tuple(only)
    table = case_table()
    for part in parts:
        if not any(part in case.id for case in table):
            raise KernelcastError(f"no case holds {part!r} in its id; known models: {', '.join(MODELS)}; see --list")
    return tuple(case for case in table if not parts or any(part in case.id for part in parts))


def cases_of(line: str) -> Iterator[Case]:
    """The cases of a line of a table: model | mode [graph] [dtype] | sizes."""
    model, what, sizes = (part.strip() for part in line.split("|"))
    mode, *more = what.split()
    launch = "graph" if "graph" in more else "eager"
    dtype = next((part for part in more if part != "graph"), "bf16")
    layers = LAYERS.get(model, int(MODELS[model].get("num_hidden_layers") or MODELS[model]["n_layer"]))
    for size in sizes.split():
        batch, seq = map(int, size.split("x"))
        yield Case(model, mode, launch, dtype, batch, seq, layers)  # type: ignore[arg-type]


def with_layers(config: Config, layers: int) -> Config:
    """The config with so many layers."""
    return {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers}


def parameter_count(config: Config) -> int:
    """Weights of the language model with this config, tied ones once."""
    # Where the product's BERT has a pooler, its masked-LM head is the same layer, a norm and a bias.
    head = 2 * config["hidden_size"] + config["vocab_size"] if config["model_type"] == "bert" else 0
    return parse(config).parameters.total + head
