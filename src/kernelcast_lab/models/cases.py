"""Which whole models are measured, at which points, and in which order.

A model is what its config.json on the Hugging Face hub says, as far as it changes the work; nothing is downloaded.
Cases come in two rounds: the first covers every model and mode, so that a run cut short still has all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from kernelcast.errors import KernelcastError

Mode = Literal["prefill", "decode", "training"]
Launch = Literal["eager", "graph"]
Config = dict[str, Any]

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# fmt: off
MODELS: dict[str, Config] = {
    "llama-3.1-8b": {  # huggingface.co/meta-llama/Llama-3.1-8B
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "qwen2.5-7b": {  # huggingface.co/Qwen/Qwen2.5-7B
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "use_sliding_window": False,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "qwen3-4b": {  # huggingface.co/Qwen/Qwen3-4B
        "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "use_sliding_window": False,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    },
    "gpt2-xl": {  # huggingface.co/openai-community/gpt2-xl
        "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257,
        "n_positions": 1024, "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "resid_pdrop": 0.1, "tie_word_embeddings": True,
    },
    "opt-1.3b": {  # huggingface.co/facebook/opt-1.3b
        "model_type": "opt", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "ffn_dim": 8192, "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 2048,
        "activation_function": "relu", "dropout": 0.1, "attention_dropout": 0.0, "layerdrop": 0.0,
        "tie_word_embeddings": True,
    },
    "bert-large": {  # huggingface.co/google-bert/bert-large-uncased
        "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {  # huggingface.co/Qwen/Qwen3-30B-A3B
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    },
}
# fmt: on

# A dozen of 48 alike layers measure the same kernels in a quarter of the time and memory (30.5e9 -> 8.1e9 weights).
LAYERS = {"qwen3-30b-a3b": 12}

# "mode [eager|graph] [dtype]": "batch x sequence ..."; for decode the sequence is the context, new token included.
Points = dict[str, dict[str, str]]
_FIRST: Points = {
    "llama-3.1-8b": {
        "prefill": "1x512 1x2048 8x1024",
        "decode graph": "1x1024 16x1024 64x1024 16x4096",
        "decode eager": "1x1024",
        "training": "1x512 4x512",
    },
    "qwen3-30b-a3b": {
        "prefill": "1x512 1x2048 8x1024",
        "decode graph": "1x1024 16x1024 64x4096",
        "decode eager": "1x1024",
        "training": "1x512 4x512",
    },
    "gpt2-xl": {
        "prefill": "1x512 8x1024",
        "decode graph": "1x1024 64x1024",
        "decode eager": "1x1024",
        "training": "1x512 4x512",
    },
    "bert-large": {
        "prefill": "1x512 8x512",
        "training": "1x512 8x512",
        "training tf32": "8x512",
    },
    "qwen2.5-7b": {
        "prefill": "1x512 8x1024",
        "decode graph": "1x1024 16x1024 64x4096",
        "decode eager": "1x1024",
        "training": "4x512",
    },
    "qwen3-4b": {
        "prefill": "1x512 8x1024",
        "decode graph": "1x1024 16x4096 64x1024",
        "training": "1x512 4x512",
    },
    "opt-1.3b": {
        "prefill": "1x512 8x1024",
        "decode graph": "1x1024 64x1024",
        "training": "1x512 4x512",
    },
}
_SECOND: Points = {
    "llama-3.1-8b": {
        "prefill": "4x4096",
        "decode graph": "1x4096 64x4096",
        "decode eager": "16x4096",
        "training": "1x2048",
    },
    "gpt2-xl": {
        "prefill": "1x1024",
        "decode graph": "16x1024",
        "training": "8x1024",
        "training tf32": "4x512",
    },
    "bert-large": {
        "prefill": "32x512",
        "training": "32x512",
        "training fp32": "8x512",
    },
    "qwen2.5-7b": {"prefill": "1x2048", "training": "1x512"},
    "qwen3-4b": {"prefill": "1x2048 4x4096", "decode eager": "16x4096", "training": "4x1024"},
    "opt-1.3b": {"prefill": "1x2048", "decode graph": "16x2048", "decode eager": "1x1024", "training": "8x1024"},
}


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
    return tuple(case for points in (_FIRST, _SECOND) for case in _cases(points))


def chosen(only: Iterable[str]) -> tuple[Case, ...]:
    """The cases whose id holds one of these words (all for none)."""
    words = tuple(only)
    table = case_table()
    for word in words:
        if not any(word in case.id for case in table):
            raise KernelcastError(f"no case holds {word!r} in its id; known models: {', '.join(MODELS)}; see --list")
    return tuple(case for case in table if not words or any(word in case.id for word in words))


def _cases(points: Points) -> Iterable[Case]:
    for model, modes in points.items():
        for what, sizes in modes.items():
            mode, *more = what.split()
            launch = "graph" if "graph" in more else "eager"
            dtype = next((word for word in more if word not in ("graph", "eager")), "bf16")
            for size in sizes.split():
                batch, seq = map(int, size.split("x"))
                yield Case(model, mode, launch, dtype, batch, seq, layer_count(model))  # type: ignore[arg-type]


def layer_count(model: str) -> int:
    """Layers that are measured: all of them, unless LAYERS says fewer."""
    config = MODELS[model]
    return LAYERS.get(model, int(config.get("num_hidden_layers") or config["n_layer"]))


def cut(config: Config, layers: int) -> Config:
    """The config with so many layers."""
    return {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers}


def longest(model: str) -> int:
    """Positions that the model has embeddings for."""
    config = MODELS[model]
    return int(config.get("max_position_embeddings") or config["n_positions"])


def parameter_count(config: Config) -> int:
    """Weights of the language model with this config, tied ones once."""
    count = _gated if "rope_theta" in config else _classic
    return count(config)


def _gated(config: Config) -> int:
    """Llama's kin: grouped heads, RMSNorm, a gated MLP or experts; Qwen2 has biases, Qwen3 norms on heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    qkv = (heads + 2 * config["num_key_value_heads"]) * head_dim
    attention = hidden * qkv + heads * head_dim * hidden
    attention += {"qwen2": qkv, "qwen3": 2 * head_dim, "qwen3_moe": 2 * head_dim}.get(config["model_type"], 0)
    if "num_experts" in config:
        mlp = config["num_experts"] * (3 * hidden * config["moe_intermediate_size"] + hidden)  # and the router
    else:
        mlp = 3 * hidden * config["intermediate_size"]
    tables = 1 if config["tie_word_embeddings"] else 2
    layer = attention + mlp + 2 * hidden
    return int(config["num_hidden_layers"] * layer + hidden + tables * config["vocab_size"] * hidden)


def _classic(config: Config) -> int:
    """GPT-2, OPT and BERT: as many KV heads as heads, LayerNorm, biases everywhere, learned positions."""
    kind, vocab = config["model_type"], config["vocab_size"]
    hidden = config.get("hidden_size") or config["n_embd"]
    layers = config.get("num_hidden_layers") or config["n_layer"]
    inter = config.get("intermediate_size") or config.get("ffn_dim") or 4 * hidden
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inter + inter + hidden + 4 * hidden
    positions = config.get("max_position_embeddings") or config["n_positions"]
    positions += {"opt": 2, "bert": config.get("type_vocab_size", 0)}.get(kind, 0)  # OPT's offset; segments
    head = hidden * hidden + 3 * hidden + vocab if kind == "bert" else 0  # BERT's head: a layer, a norm, a bias
    return int(layers * layer + 2 * hidden + (vocab + positions) * hidden + head)
