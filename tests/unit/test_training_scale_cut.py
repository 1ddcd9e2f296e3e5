"""Tensor, sequence and expert parallelism: the shapes and collectives of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_traces import experts, mlp

import kernelcast as kc
from kernelcast.tracing.traced import Op, Tensor, Trace
from kernelcast.training.expert_parallel import shard_experts
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.placement import Shard, is_collective, shard_in_view, shard_of_result, shard_tensor
from kernelcast.training.scale import scale
from kernelcast.training.tensor_parallel import TensorParallelPlan, shard_tensors

T, H, F = 512, 1024, 4096


def shapes(trace: Trace, name: str, phase: str) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(x.shape for x in op.inputs) for op in trace.ops if op.name == name and op.phase == phase]


def sent(trace: Trace) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(op.phase, op.name, op.inputs[0].shape) for op in trace.ops if is_collective(op)]


def test_columns_then_rows() -> None:
    found = shard_tensors(mlp(1), 4)
    # fc1 by columns: (512, 1024) x (1024, 4096 / 4); fc2 by rows: (512, 1024) x (1024, 1024)
    assert shapes(found, "mm", "forward") == [((T, H), (H, F // 4)), ((T, F // 4), (F // 4, H))]
    assert shapes(found, "relu", "forward") == [((T, F // 4),)]
    # dW2 = dy^T h, dh = dy W2, dW1 = dh^T x, dx = dh W1: each with a quarter of the inner width
    assert shapes(found, "mm", "backward") == [
        ((H, T), (T, F // 4)), ((T, H), (H, F // 4)), ((F // 4, T), (T, H)), ((T, F // 4), (F // 4, H)),
    ]  # fmt: skip
    assert [g.elements for g in found.gradients] == [H * F // 4] * 2
    assert sum(x.elements for x in found.ops[-1].arguments[0]) == 2 * H * F // 4
    assert all(x.elements == H * F // 4 for one in found.ops[-1].arguments[:4] for x in one)  # states as well


def test_megatron_joins_twice_a_block() -> None:
    # once forward after the rows, once backward for the input of the columns (Shoeybi et al. 2019, f and g); the
    # gradient of the model's own input is used by nobody
    assert (
        sent(shard_tensors(mlp(3), 2))
        == [("forward", "all_reduce", (T, H))] * 3 + [("backward", "all_reduce", (H, T))] * 2
    )


def test_sequence_parallel_moves_as_many_bytes_and_cuts_what_lies_between() -> None:
    plain, parts = shard_tensors(mlp(2), 2), shard_tensors(mlp(2), 2, sequence_parallel=True)
    # the residual stream enters whole here (no table of tokens), so the first add is the first with half the tokens
    assert shapes(parts, "add", "forward") == [((T // 2, H), (T // 2, H))] * 2
    assert shapes(plain, "add", "forward") == [((T, H), (T, H))] * 2
    forward = [name for phase, name, _ in sent(parts) if phase == "forward"]
    assert forward == ["reduce_scatter", "all_gather", "reduce_scatter"]
    assert shapes(parts, "mm", "forward") == shapes(plain, "mm", "forward")  # cut layers see all tokens


def test_a_model_without_known_names_is_refused() -> None:
    with pytest.raises(kc.KernelcastError, match="no layer of mlp has a name"):
        shard_tensors(mlp(1), 2, tp_plan=TensorParallelPlan({"other": "column"}))


@pytest.mark.parametrize(
    ("path", "role"),
    [("model.layers.0.self_attn.q_proj", "column"), ("transformer.h.3.attn.c_proj", "row"),
     ("transformer.h.3.mlp.c_proj", "row"), ("bert.encoder.layer.1.attention.self.query", "column"),
     ("bert.encoder.layer.1.attention.output.dense", "row"), ("bert.encoder.layer.1.intermediate.dense", "column"),
     ("bert.encoder.layer.1.output.dense", "row"), ("model.embed_tokens", "vocabulary"), ("lm_head", "column"),
     ("transformer.wte", "vocabulary"), ("transformer.wpe", None), ("model.layers.0.mlp.gate", None),
     ("model.decoder.layers.0.self_attn.out_proj", "row"), ("model.layers.0.mlp.experts", "experts"),
     ("bert.pooler.dense", None)],
)  # fmt: skip
def test_roles(path: str, role: str | None) -> None:
    assert TensorParallelPlan().style(path) == role


def test_axes_are_followed_through_views() -> None:
    joined = Tensor((2, 8, 3072), (8 * 3072, 3072, 1), "bf16", 1)  # q, k and v side by side
    query = replace(joined, shape=(2, 8, 1024))
    heads = Tensor((2, 16, 8, 64), (8 * 3072, 64, 3072, 1), "bf16", 1)
    assert shard_in_view(joined, Shard("model", 2), query) == Shard("model", 2)
    assert shard_in_view(query, Shard("model", 2), heads) == Shard("model", 1)
    # a quarter of the heads; rows of the joined tensor are a quarter as long
    assert shard_tensor(heads, Shard("model", 1), 4) == Tensor((2, 4, 8, 64), (8 * 768, 64, 768, 1), "bf16", 1)
    scores = Tensor((2, 16, 8, 8), (1024, 64, 8, 1), "bf16", 2)
    batched = Tensor((32, 8, 8), (64, 8, 1), "bf16", 2)
    shard = shard_in_view(scores, Shard("model", 1), batched)
    assert shard == Shard("model", 0, outer=2)  # 16 heads, in each of 2 samples
    assert shard_in_view(batched, shard, scores) == Shard("model", 1)  # and back, not the samples
    assert shard_tensor(batched, shard, 4).shape == (8, 8, 8)


def test_sums_over_a_cut_axis_are_terms() -> None:
    x = Tensor((512, 1024), (1024, 1), "bf16", 1)
    row, column = Tensor((1, 1024), (1024, 1), "bf16", 2), Tensor((512, 1), (1, 1), "bf16", 3)
    assert shard_of_result("sum", x, Shard("tokens", 0), row) is None
    assert shard_of_result("sum", x, Shard("model", 1), row) == Shard("model", 1)
    assert shard_of_result("sum", x, Shard("tokens", 0), column) == Shard("tokens", 0)


def test_a_vocabulary_is_cut_and_its_softmax_joined() -> None:
    trace = mlp(1)
    ids, table = Tensor((T,), (1,), "int64", 901), Tensor((1000, H), (H, 1), "bf16", 902)
    looked = Tensor((T, H), (H, 1), "bf16", 903)
    head = Tensor((H, 1000), (1, H), "bf16", 902)  # tied
    logits, out = Tensor((T, 1000), (1000, 1), "fp32", 904), Tensor((T, 1000), (1000, 1), "fp32", 905)
    ops = (
        Op("embedding", (table, ids), {}, (looked,), "kernel", "forward", "wte"),
        Op("mm", (looked, head), {}, (logits,), "kernel", "forward", "lm_head"),
        Op("_log_softmax", (logits, 1, False), {}, (out,), "kernel", "forward", ""),
    )
    found = shard_tensors(replace(trace, ops=(*ops, *trace.ops), gradients=()), 3)
    assert found.ops[0].inputs[0].shape == (334, H)  # 1000 / 3, rounded up as tables are padded
    assert shapes(found, "_log_softmax", "forward") == [((T, 334),)]
    # the lookup's sum; the largest and the sum of each row
    assert [size for _, _, size in sent(found)][:3] == [(T, H), (T,), (T,)]


def test_experts_are_dealt_out() -> None:
    found = shard_experts(experts(count=8), 4)
    assert shapes(found, "_grouped_mm", "forward") == [
        ((1024, 512), (2, 512, 1024), (2,)),
        ((1024, 1024), (2, 1024, 512), (2,)),
    ]
    # to the experts and back, forward and backward
    assert sent(found) == [(phase, "all_to_all", (1024, 512)) for phase in ("forward",) * 2 + ("backward",) * 2]
    assert [g.elements for g in found.gradients] == [2 * 512 * 1024] * 2
    assert all(x.shape[0] == 2 for one in found.ops[-1].arguments for x in one)
    with pytest.raises(kc.KernelcastError, match="ep 3 does not divide the 8 experts"):
        shard_experts(experts(count=8), 3)
    with pytest.raises(kc.KernelcastError, match="no grouped products"):
        shard_experts(mlp(1), 2)


def test_experts_are_cut_by_columns_and_rows() -> None:
    found = shard_tensors(experts(count=8), 2)
    assert shapes(found, "_grouped_mm", "forward") == [
        ((1024, 512), (8, 512, 512), (8,)),
        ((1024, 512), (8, 512, 512), (8,)),
    ]


def test_one_rank_is_the_trace_itself() -> None:
    trace = mlp(2)
    assert shard_tensors(trace, 1) is trace and shard_experts(trace, 1) is trace


@pytest.mark.parametrize("scaled", [False, True])
def test_linears_in_fp8_are_sharded(scaled: bool) -> None:
    """torch._scaled_mm reads a copy of the weight, cast (and scaled) in every step."""
    torch = pytest.importorskip("torch")
    from kernelcast.tracing import trace

    class Product(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            one = torch.ones((), device=x.device)
            small = (weight * one).clamp(-448, 448) if scaled else weight
            a, b = (t.to(torch.float8_e4m3fn) for t in (x, small))
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x

    class Linear(torch.nn.Linear):  # type: ignore[misc,name-defined]
        def forward(self, x: Any) -> Any:
            return Product.apply(x, self.weight)

    class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = Linear(256, 1024, bias=False), Linear(1024, 256, bias=False)

        def forward(self, x: Any) -> Any:
            return self.fc2(torch.relu(self.fc1(x)))

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Block(), Block()])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    found = trace(Model().bfloat16(), torch.empty(512, 256, dtype=torch.bfloat16), "training")
    cut = shard_tensors(found, 4)
    products = [op for op in cut.ops if op.name == "_scaled_mm"]
    assert [op.arguments[1].shape for op in products] == [(256, 256), (256, 256)] * 2
    assert [op.outputs[0].shape for op in products] == [(512, 256), (512, 256)] * 2
    casts = [op.outputs[0].elements for op in cut.ops if op.name == "_to_copy" and op.outputs[0].dtype == "fp8"]
    assert 256 * 1024 // 4 in casts and 256 * 1024 not in casts  # a rank casts its shard of a weight alone
    assert sum(g.elements for g in cut.gradients) == found.parameters / 4 and not cut.unsharded
    assert sum(op.name == "all_reduce" for op in cut.ops) == 2 + 1  # fc2 of each block; the input of the second's fc1


def test_lora_leaves_frozen_layers_that_are_sharded_too() -> None:
    torch = pytest.importorskip("torch")
    from kernelcast.tracing import trace

    class Lora(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.base_layer = torch.nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
            self.lora_A, self.lora_B = (torch.nn.Linear(*sizes, bias=False) for sizes in ((inputs, 8), (8, outputs)))

        def forward(self, x: Any) -> Any:
            return self.base_layer(x) + self.lora_B(self.lora_A(x))

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.ModuleDict({"fc1": Lora(256, 1024), "fc2": Lora(1024, 256)}) for _ in range(4)
            )

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer["fc2"](torch.relu(layer["fc1"](x)))
            return x

    found = trace(Model(), torch.empty(512, 256), "training")
    frozen = 4 * 2 * 256 * 1024
    assert sum(x.elements for x in found.frozen) == frozen
    assert sum(g.elements for g in found.gradients) == found.parameters - frozen
    cut = shard_tensors(found, 4)
    assert sum(x.elements for x in cut.frozen) == frozen / 4
    h100 = kc.gpu("h100_sxm")
    whole = found.footprint.parameters
    plans: list[dict[str, Any]] = [{"dp": 4, "zero": 3}, {"pp": 4, "micro_batches": 4}]
    for plan in plans:
        memory = scale(found, h100, TrainingLayout(**plan)).memory
        assert memory["parameter"] == pytest.approx(whole / 4, rel=0.01), plan
    assert scale(found, h100, TrainingLayout(dp=4, zero=3)).memory["optimizer"] < found.footprint.optimizer / 3.9
