"""Steps of Hugging Face models on the CPU, with small configs; skipped where transformers is not installed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from kernelcast_lab.collect.cases import MODELS, Case, Config, parameter_count, with_layers  # noqa: E402
from kernelcast_lab.collect.run import time_steps, trace_events  # noqa: E402
from kernelcast_lab.collect.steps import build, make_step  # noqa: E402

CPU = torch.device("cpu")
BATCH, SEQ = 3, 32
SMALL: Config = {
    "hidden_size": 64, "n_embd": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4, "n_head": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "ffn_dim": 96, "moe_intermediate_size": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 128,
}  # fmt: skip
DECODERS = [name for name in MODELS if name != "bert-large"]


def _small(name: str) -> Config:
    return with_layers({key: SMALL.get(key, value) for key, value in MODELS[name].items()}, 2)


def _case(name: str, mode: Any, dtype: str) -> Case:
    return Case(name, mode, "eager", dtype, BATCH, SEQ, 2)


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the ops that make the host wait for the device, which a CUDA graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::item", "aten::_unique2"):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_model_is_as_large_as_its_facts_say(name: str) -> None:
    model = build(_small(name), "bf16", CPU)
    assert sum(weight.numel() for weight in model.parameters()) == parameter_count(_small(name))
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", DECODERS)
def test_decode_reads_the_whole_cache_and_nothing_waits(name: str) -> None:
    model = build(_small(name), "fp32", CPU)
    step: Any = make_step(model, _case(name, "decode", "fp32"), CPU)
    held = dict(zip(step.__code__.co_freevars, (cell.cell_contents for cell in step.__closure__), strict=True))
    before = torch.randint(4, 128, (BATCH, SEQ - 1))
    with torch.inference_mode():
        cached = model(input_ids=before, use_cache=True).past_key_values
        for full, part in zip(held["options"]["past_key_values"].layers, cached.layers, strict=True):
            full.keys[:, :, : SEQ - 1], full.values[:, :, : SEQ - 1] = part.keys, part.values
        expected = model(input_ids=torch.cat([before, held["tokens"]], dim=1), use_cache=False).logits[:, -1]
    with _Waits() as waits:
        first = step()
    torch.testing.assert_close(first[:, -1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step(), first)  # the same place again: every step is alike
    assert waits.seen == set()


@pytest.mark.parametrize("name", MODELS)
def test_training_changes_weights_and_marks_its_phases(name: str) -> None:
    model = build(_small(name), "fp32", CPU)
    step = make_step(model, _case(name, "training", "fp32"), CPU)
    weight = next(p for p in model.parameters() if p.dim() == 2)
    before = weight.detach().clone()
    wall, _, repeats = time_steps(step, CPU)
    events = trace_events(step, CPU)
    assert wall.low_ms <= wall.median_ms <= wall.high_ms
    assert repeats >= 4
    assert not torch.equal(before, weight)
    assert all(p.grad is None for p in model.parameters())
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert names >= {"kernelcast.forward", "kernelcast.backward", "kernelcast.optimizer"}
    assert any("Input Dims" in event.get("args", {}) for event in events if event.get("cat") == "cpu_op")


@pytest.mark.parametrize("name", MODELS)
def test_prefill_gives_the_last_logits(name: str) -> None:
    logits: Any = make_step(build(_small(name), "bf16", CPU), _case(name, "prefill", "bf16"), CPU)()
    assert logits.shape == (BATCH, SEQ if name == "bert-large" else 1, 128)
    assert torch.isfinite(logits).all()
