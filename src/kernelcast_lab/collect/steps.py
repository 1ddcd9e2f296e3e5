"""One step of a Hugging Face model with random weights: prefill, decode or training. Needs torch and transformers.

- prefill: a forward pass without a cache; logits of the last token only, except BERT, which gives all.
- decode: one token for each sequence, over a KV cache that is full with it. The token is written to the same last place
  each time, so every step is alike, nothing waits for the device, and the step can be captured in a CUDA graph. A full
  cache needs no mask: attention is the kernel that SDPA has for grouped heads, without the copies that a mask costs.
- training: forward, loss, backward, fused AdamW, gradients dropped; weights and moments in the case's dtype.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelcast.errors import KernelcastError
from kernelcast_lab.collect.cases import Case, Config
from kernelcast_lab.collect.trace import PHASE

Step = Callable[[], object]
_TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}


def build(config: Config, dtype: str, device: torch.device) -> Any:
    """The model with random weights, made on the device: there the 8e9 normal numbers take a moment, not a minute."""
    transformers = importlib.import_module("transformers")
    made = transformers.AutoConfig.for_model(**config)
    auto = transformers.AutoModelForMaskedLM if config["model_type"] == "bert" else transformers.AutoModelForCausalLM
    options = {"dtype": _TORCH[dtype], "attn_implementation": "sdpa"}
    if "num_experts" in config:
        options["experts_implementation"] = "grouped_mm"  # not what fits this machine: the same one, or an error
    torch.manual_seed(0)
    with device:
        return auto.from_config(made, **options)


def set_precision(dtype: str) -> None:
    """tf32 lets fp32 products use the tensor cores; fp32 does not."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")


def make_step(model: Any, case: Case, device: torch.device) -> Step:
    """A function that runs one step of the case on this model, again and again."""
    makers = {"prefill": _prefill, "decode": _decode, "training": _training}
    return makers[case.mode](model, case, device)


def _tokens(model: Any, batch: int, seq: int, device: torch.device) -> Tensor:
    """Random tokens: alike ones would all be routed to the same experts."""
    return torch.randint(4, model.config.vocab_size, (batch, seq), device=device)  # 0 to 3 may be padding


def _inference(model: Any, tokens: Tensor, options: Mapping[str, Any]) -> Step:
    model.eval()

    def step() -> object:
        with torch.inference_mode():
            return model(input_ids=tokens, **options).logits

    return step


def _prefill(model: Any, case: Case, device: torch.device) -> Step:
    options = {} if model.config.model_type == "bert" else {"use_cache": False, "logits_to_keep": 1}
    return _inference(model, _tokens(model, case.batch, case.seq, device), options)


def _decode(model: Any, case: Case, device: torch.device) -> Step:
    if model.config.model_type == "bert":
        raise KernelcastError("BERT does not decode")
    tokens = _tokens(model, case.batch, 1, device)
    options: dict[str, Any] = {
        "position_ids": torch.full((case.batch, 1), case.seq - 1, device=device),
        "past_key_values": _full_cache(model, case, device),
        "use_cache": True,
    }
    if model.config.model_type == "opt":
        # OPT makes a mask when it gets none, and synchronises to see whether it masks anything: no graph can hold that.
        options["attention_mask"] = torch.zeros(case.batch, 1, 1, case.seq, dtype=model.dtype, device=device)
    return _inference(model, tokens, options)


def _full_cache(model: Any, case: Case, device: torch.device) -> Any:
    """A static cache of random keys and values, full but for the last place of each sequence."""
    caches = importlib.import_module("transformers.cache_utils")
    static: Any = caches.StaticLayer

    class FullLayer(static):  # type: ignore[misc]
        """Writes to the last place and stays there. Not compileable: so that no mask is made for one query."""

        is_compileable = False

        def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self.keys.index_copy_(2, last, keys)
            self.values.index_copy_(2, last, values)
            return self.keys, self.values

        def get_seq_length(self) -> int:
            return case.seq - 1

    last = torch.tensor([case.seq - 1], device=device)
    config = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = [FullLayer(max_cache_len=case.seq) for _ in range(config.num_hidden_layers)]
    for layer in layers:
        nothing = torch.empty(case.batch, kv_heads, 0, head_dim, dtype=model.dtype, device=device)
        layer.lazy_initialization(nothing, nothing)
        layer.keys.normal_()
        layer.values.normal_()
    return caches.Cache(layers=layers)


def _training(model: Any, case: Case, device: torch.device) -> Step:
    model.train()
    tokens = _tokens(model, case.batch, case.seq, device)
    options = {} if model.config.model_type == "bert" else {"use_cache": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    mark = torch.profiler.record_function

    def step() -> object:
        with mark(PHASE + "forward"):
            loss = model(input_ids=tokens, labels=tokens, **options).loss
        with mark(PHASE + "backward"):
            loss.backward()
        with mark(PHASE + "optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    return step
