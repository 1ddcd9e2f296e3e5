"""A traced step on many GPUs, whole: times, parts, bytes, memory, reports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from small_traces import experts, mlp

import kernelcast as kc
from kernelcast.app.report.trace import answer_rows, fields, memory_rows, part_rows
from kernelcast.hardware import Gpu
from kernelcast.schedule.timeline import host
from kernelcast.tracing.fusion import fuse
from kernelcast.tracing.traced import Trace
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.memory import FRAGMENTED, FRAMEWORK_BYTES
from kernelcast.training.pipeline import sent_bytes
from kernelcast.training.rank import Rank
from kernelcast.training.scale import ScaledStep, scale
from kernelcast.training.step import run_step

TRACE = mlp(8, tokens=2048)
WEIGHTS = 8 * 2 * 1024 * 4096 * 2  # bytes, in bf16


@pytest.fixture(scope="module")
def h100() -> Gpu:
    return kc.gpu("h100_sxm")


def scaled(gpu: Gpu, **plan: Any) -> ScaledStep:
    return scale(TRACE, gpu, TrainingLayout(**plan))


PLANS: list[dict[str, Any]] = [
    {}, {"dp": 4}, {"dp": 4, "overlap": False}, {"dp": 4, "zero": 1}, {"dp": 4, "zero": 2, "micro_batches": 2},
    {"dp": 4, "zero": 3}, {"tp": 4}, {"tp": 2, "sequence_parallel": True}, {"pp": 4}, {"pp": 4, "micro_batches": 8},
    {"pp": 2, "micro_batches": 4, "schedule": "gpipe", "dp": 2},
    {"pp": 2, "micro_batches": 4, "schedule": "interleaved", "virtual_stages": 2},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "micro_batches": 4}, {"dp": 2, "pp": 2, "zero": 3, "micro_batches": 2},
    {"dp": 32, "tp": 2, "zero": 1},
]  # fmt: skip


def test_one_gpu_is_the_single_step(h100: Gpu) -> None:
    alone, found = run_step(TRACE, h100), scaled(h100)
    assert found.time_s == alone.time_s
    # of many GPUs only the time that they wait for the host has the host's width: theirs is the narrower interval
    assert found.low_s == pytest.approx(alone.low_s, rel=0.03) and 0.9 * alone.high_s < found.high_s <= alone.high_s
    assert found.mfu == pytest.approx(alone.mfu)
    assert found.energy is not None and alone.energy is not None
    assert found.energy.value == pytest.approx(alone.energy.value)
    assert found.parts_s["kernels"] + found.parts_s["optimizer"] == pytest.approx(alone.kernel_time_s)
    assert scale(TRACE, h100, TrainingLayout(), graph=True).time_s == run_step(TRACE, h100, graph=True).time_s


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: TrainingLayout(**plan).label)
def test_joules_are_of_all_gpus(plan: dict[str, Any], h100: Gpu) -> None:
    alone, found = scaled(h100).energy, scaled(h100, **plan)
    assert alone is not None and found.energy is not None
    assert found.energy.low < found.energy.value < found.energy.high
    share = found.energy.value / (found.gpus * found.time_s) / h100.power_w
    assert 0.15 < share <= 1 + 1e-9  # between rest and the limit
    passes = found.layout.micro_batches * found.layout.dp
    assert found.energy.value > 0.5 * passes * alone.value  # the same products; the optimizer once a step


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: TrainingLayout(**plan).label)
def test_parts_add_up(plan: dict[str, Any], h100: Gpu) -> None:
    found = scaled(h100, **plan)
    assert all(value >= 0 for value in found.parts_s.values())
    assert sum(found.parts_s.values()) == pytest.approx(found.time_s)
    for stage in found.stages:
        assert stage.time_s == pytest.approx(found.time_s)
        assert 0 <= stage.parts_s["exposed"] <= stage.collectives_s * (1 + 1e-9)
    hidden, waited = found.overlapped_s, found.parts_s["exposed"]
    assert hidden + waited == pytest.approx(sum(s.collectives_s for s in found.stages) / len(found.stages))
    assert found.tokens == 2048 * found.layout.dp * found.layout.micro_batches
    assert found.tokens_per_s_per_gpu * found.layout.gpus == pytest.approx(found.tokens_per_s)


@pytest.mark.parametrize("plan", PLANS[1:], ids=lambda plan: TrainingLayout(**plan).label)
def test_faster_links_are_never_slower(plan: dict[str, Any], h100: Gpu) -> None:
    faster = h100.replace(link_bytes_per_s=2 * h100.link_bytes_per_s)
    assert scaled(faster, **plan).time_s <= scaled(h100, **plan).time_s * (1 + 1e-9)


def test_bytes_of_data_parallelism(h100: Gpu) -> None:
    # a ring all-reduce sends each byte 2 (n - 1) / n times; ZeRO 1 and 2 the same in two halves; ZeRO 3 gathers the
    # parameters twice and scatters the gradients once: 3 (n - 1) / n (Rajbhandari et al. 2020)
    ring = WEIGHTS * 3 / 4
    assert scaled(h100, dp=4).sent_bytes == pytest.approx(2 * ring)
    assert scaled(h100, dp=4, zero=1).sent_bytes == pytest.approx(2 * ring)
    assert scaled(h100, dp=4, zero=2).sent_bytes == pytest.approx(2 * ring)
    assert scaled(h100, dp=4, zero=3).sent_bytes == pytest.approx(1.5 * 2 * ring)
    # gradients of earlier micro-batches are kept whole up to ZeRO 1, and sent each time from ZeRO 2 on
    assert scaled(h100, dp=4, micro_batches=3).sent_bytes == pytest.approx(2 * ring)
    assert scaled(h100, dp=4, zero=2, micro_batches=3).sent_bytes == pytest.approx((3 + 1) * ring)
    assert scaled(h100, dp=4, pp=2, micro_batches=3).sent_bytes == pytest.approx(ring)  # each stage has half


def test_overlap_hides_some_of_it(h100: Gpu) -> None:
    late, early = scaled(h100, dp=8, overlap=False), scaled(h100, dp=8)
    assert late.overlapped_s <= host("server").gap_s  # it may start in the gap that follows the last kernel
    assert early.overlapped_s > 0 and early.parts_s["exposed"] < late.parts_s["exposed"]
    # all at the end is one bucket; with overlap none waits where links are free
    alone = scaled(h100)
    assert late.time_s == pytest.approx(alone.time_s + late.parts_s["exposed"])


def test_zero_divides_the_optimizer(h100: Gpu) -> None:
    whole, shard = scaled(h100, dp=8), scaled(h100, dp=8, zero=1)
    assert shard.parts_s["optimizer"] < whole.parts_s["optimizer"] / 4
    assert shard.parts_s["kernels"] == pytest.approx(whole.parts_s["kernels"])


def test_pipeline_of_equal_stages(h100: Gpu) -> None:
    # without an optimizer, with the host out of the way: one slot of each stage is a quarter of the passes
    bare = replace(TRACE, ops=tuple(op for op in TRACE.ops if op.phase != "optimizer"))
    found = scale(bare, h100, TrainingLayout(pp=4, micro_batches=8, schedule="gpipe"), graph=True)
    assert [stage.layers for stage in found.stages] == [2, 2, 2, 2]
    assert found.bubble_share * found.time_s / (found.time_s - found.parts_s["links"]) == pytest.approx(
        3 / 11, rel=0.02
    )
    # each link is crossed by the first forward and the last backward pass: 2 (p - 1) sends, and no other waits
    assert 0 < found.parts_s["links"] < found.time_s / 10


def test_pipeline_memory_by_schedule(h100: Gpu) -> None:
    first, last = scaled(h100, pp=4, micro_batches=8).stages[0::3]
    assert (first.in_flight, last.in_flight) == (4, 1)
    assert [s.in_flight for s in scaled(h100, pp=4, micro_batches=8, schedule="gpipe").stages] == [8] * 4
    # two layers keep x, fc1's and relu's results: 2048 x (1024 + 2 x 4096) bf16 each, but the model's input is no
    # activation; stage 0 has four micro-batches of them
    saved = 2 * 2048 * (1024 + 2 * 4096) * 2
    assert first.memory["activation"] == pytest.approx(4 * saved, rel=0.2)
    assert first.memory["activation"] > 3 * last.memory["activation"]


@pytest.mark.parametrize("virtual", [2, 4])
def test_memory_of_virtual_stages(virtual: int, h100: Gpu) -> None:
    # Narayanan et al. 2021 and Megatron's reports: interleaving with v parts of a stage holds 1 + (p - 1) / (p v) times
    # the activations of 1F1B on the first stage
    plain = scaled(h100, pp=2, micro_batches=4).stages[0]
    found = scaled(h100, pp=2, micro_batches=4, schedule="interleaved", virtual_stages=virtual).stages[0]
    assert found.in_flight == pytest.approx(plain.in_flight * (1 + 1 / (2 * virtual)))
    # a pass of the whole model peaks 10% above what it keeps: one working layer counts in both
    assert found.memory["activation"] / plain.memory["activation"] == pytest.approx(1 + 1 / (2 * virtual), rel=0.06)


def lora(layers: int = 2) -> Trace:
    """The same model of which the last layers are trained alone."""
    weights = {x.storage: x for op in TRACE.ops if op.name == "t" and op.phase == "forward" for x in op.inputs}
    frozen = tuple(x for x in weights.values() if x.shape in ((4096, 1024), (1024, 4096)))[: 2 * (8 - layers)]
    size = WEIGHTS * layers // 8
    footprint = replace(TRACE.footprint, optimizer=2 * size)
    return replace(TRACE, gradients=TRACE.gradients[: 2 * layers], frozen=frozen, footprint=footprint)


def test_frozen_parameters_are_sharded(h100: Gpu) -> None:
    def memory(**plan: Any) -> Any:
        return scale(lora(), h100, TrainingLayout(**plan)).memory

    assert memory(dp=8)["parameter"] == WEIGHTS and memory(dp=8)["optimizer"] == WEIGHTS * 2 / 4
    assert memory(dp=8, zero=3)["parameter"] == pytest.approx(WEIGHTS / 8)
    assert memory(dp=8, zero=3)["gathered"] == 2 * WEIGHTS / 8
    assert memory(tp=4)["parameter"] == pytest.approx(WEIGHTS / 4)
    stages = scale(lora(), h100, TrainingLayout(pp=4, micro_batches=4)).stages
    assert [s.memory["parameter"] for s in stages] == [WEIGHTS / 4] * 4
    assert [s.memory["optimizer"] for s in stages] == [0, 0, 0, WEIGHTS / 2]
    # gathered twice, as trained ones are; of gradients there are those of the trained alone
    ring = WEIGHTS * 7 / 8
    assert scale(lora(), h100, TrainingLayout(dp=8, zero=3)).sent_bytes == pytest.approx((2 + 1 / 4) * ring)
    assert scale(lora(), h100, TrainingLayout(dp=8)).sent_bytes == pytest.approx(2 * ring / 4)


def test_memory_of_shards(h100: Gpu) -> None:
    plain = scaled(h100, dp=8).memory
    assert plain["parameter"] == WEIGHTS and plain["optimizer"] == 2 * WEIGHTS
    one, two, three = (scaled(h100, dp=8, zero=zero).memory for zero in (1, 2, 3))
    assert one["optimizer"] == pytest.approx(2 * WEIGHTS / 8) and one["parameter"] == WEIGHTS
    assert two["gradient"] <= WEIGHTS / 8 + 1
    assert three["parameter"] == pytest.approx(WEIGHTS / 8)
    assert three["gathered"] == 2 * WEIGHTS / 8  # the layer that runs, and the next
    assert scaled(h100, tp=4).memory["parameter"] == WEIGHTS / 4
    model_bytes = plain.used_bytes - plain["overhead"]
    assert plain["overhead"] == pytest.approx(model_bytes * FRAGMENTED + FRAMEWORK_BYTES)


def test_what_does_not_fit_says_by_how_much(h100: Gpu) -> None:
    small = h100.replace(dram_bytes=2**28)  # the optimizer's one kernel needs twice that
    found = scale(TRACE, small, TrainingLayout())
    assert not found.fits
    assert found.memory.missing_bytes == pytest.approx(found.memory.used_bytes - 2**28)
    assert "misses by" in answer_rows(found)[-1][2]


def test_experts_are_shared_out_over_data_parallel_ranks(h100: Gpu) -> None:
    trace = experts()
    alone, found = scale(trace, h100, TrainingLayout(dp=4)), scale(trace, h100, TrainingLayout(dp=4, ep=4))
    # each expert is on one rank only: no gradients to join, but tokens travel four times
    assert found.sent_bytes == 0 < alone.sent_bytes
    assert found.parts_s["communication"] > 0
    assert found.memory["parameter"] == alone.memory["parameter"] / 4
    half = scale(trace, h100, TrainingLayout(dp=4, ep=2))
    assert half.sent_bytes == pytest.approx(trace.footprint.gradients / 2 * 2 * 1 / 2)  # half of them, by two ranks


def test_more_nodes_use_their_ports(h100: Gpu) -> None:
    inside, across = scaled(h100, dp=8), scaled(h100, dp=16)
    assert across.parts_s["exposed"] > inside.parts_s["exposed"]
    slow = scaled(h100, dp=16, between_nodes="ib_hdr") if "ib_hdr" in kc.hardware.fabrics() else across
    assert slow.time_s >= across.time_s


def test_an_all_to_all_sends_over_ports_what_leaves_the_node(h100: Gpu) -> None:
    group = TrainingLayout(dp=32, ep=32).group("ep")
    inside, across = (launch.call.arguments for launch in group.launches("all_to_all", 2**30, "bf16", h100))
    assert (inside.get("fabric"), inside["world"]) == (None, 8)
    assert inside["bytes"] == 2**30 / 4  # 8 of 32 ranks are in the node, the GPU itself among them
    assert (across["fabric"], across["world"]) == ("ib_ndr", 32)
    assert across["bytes"] * 31 / 32 == pytest.approx(2**30 * 24 / 32)  # sent over the GPU's own port
    (whole,) = TrainingLayout(dp=8, ep=8).group("ep").launches("all_to_all", 2**30, "bf16", h100)
    assert whole.call.arguments.get("fabric") is None


def test_reports(h100: Gpu) -> None:
    for plan in PLANS:
        found = scaled(h100, **plan)
        told = json.loads(json.dumps(fields(found)))
        assert told["time_s"] == found.time_s and told["gpus"] == found.layout.gpus
        assert sum(told["parts_s"].values()) == pytest.approx(told["time_s"])
        assert len(told["stages"]) == len(memory_rows(found)) == found.layout.pp
        assert len(part_rows(found)) >= 3
        drawn = found.timeline()
        assert len({lane.process for lane in drawn.lanes if lane.events}) == found.layout.pp
        assert drawn.end_s == pytest.approx(found.time_s, rel=1e-6)
        assert min(event.time_s for lane in drawn.lanes for event in lane.events) >= 0


@pytest.mark.parametrize(
    ("plan", "bucket"),
    [({"dp": 0}, "dp must be a whole number"), ({"zero": 4}, "zero must be 0, 1, 2 or 3"),
     ({"zero": 3}, "shards over the dp ranks"),
     ({"schedule": "zigzag"}, "unknown schedule"),
     ({"dp": 4, "ep": 3}, "ep 3 x expert_tp 1 does not divide the 4 ranks"),
     ({"sequence_parallel": True}, "needs tp of 2"), ({"virtual_stages": 2}, "needs schedule='interleaved'"),
     ({"pp": 2, "virtual_stages": 2, "schedule": "interleaved", "micro_batches": 3}, "multiple of pp 2"),
     ({"pp": 2, "stage_layers": (8,)}, "names 1 parts of the model, not 2"),
     ({"between_nodes": "rope"}, "unknown fabric")],
)  # fmt: skip
def test_plans_that_cannot_be(plan: dict[str, Any], bucket: str) -> None:
    with pytest.raises(kc.KernelcastError, match=bucket):
        TrainingLayout(**plan)


def test_embedding_and_head_are_parts_of_their_own(h100: Gpu) -> None:
    """Llama 3.1 405B has 126 layers for 16 x 8 virtual stages: Megatron counts the embedding and the head as two."""
    torch = pytest.importorskip("torch")
    from kernelcast.tracing import trace

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens, self.lm_head = torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

        def forward(self, ids: Any) -> Any:
            x = self.embed_tokens(ids)
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.lm_head(x)

    found = trace(Model(), torch.zeros(2, 128, dtype=torch.long), "training")
    plan: dict[str, Any] = {"pp": 4, "schedule": "interleaved", "virtual_stages": 2, "micro_batches": 4}
    step = scale(found, h100, TrainingLayout(**plan))
    assert [stage.layers for stage in step.stages] == [1, 2, 2, 1]
    alone = scale(found, h100, TrainingLayout(pp=8, micro_batches=8))
    assert [stage.layers for stage in alone.stages] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert alone.stages[0].memory["parameter"] == pytest.approx(1000 * 64 * 4)
    # what the embedding sends is what a layer sends: one tensor of the hidden size
    assert alone.schedule is not None
    rank = Rank(found, alone.layout, alone.times, host("server"), False, False, None)
    sizes = [sent_bytes(rank.layers, rank.part_of, part)[0] for part in range(7)]
    assert sizes == [2 * 128 * 64 * 4] * 7
    given = scale(found, h100, TrainingLayout(pp=3, micro_batches=4, stage_layers=(0, 6, 0)))
    assert [stage.layers for stage in given.stages] == [0, 6, 0]
    with pytest.raises(kc.KernelcastError, match="the first and the last may have none"):
        scale(found, h100, TrainingLayout(pp=3, micro_batches=4, stage_layers=(3, 0, 3)))
    with pytest.raises(kc.KernelcastError, match=r"9 parts .* more than the 6 layers found in .*, its embedding"):
        scale(found, h100, TrainingLayout(pp=9))


def test_questions_that_cannot_be(h100: Gpu) -> None:
    with pytest.raises(kc.KernelcastError, match="more than the 8 layers"):
        scaled(h100, pp=16)
    with pytest.raises(kc.KernelcastError, match="add up to 8 layers"):
        scaled(h100, pp=2, stage_layers=(4, 5))
    with pytest.raises(kc.KernelcastError, match="no trace of a training step"):
        scale(replace(TRACE, mode="inference"), h100, TrainingLayout())
    with pytest.raises(kc.KernelcastError, match="interference"):
        scale(TRACE, h100, TrainingLayout(), interference=1.0)


def test_a_real_model(h100: Gpu) -> None:
    """GPT-2 of Hugging Face: q, k, v in one matrix, a tied table, masks, dropout."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kernelcast.tracing import trace

    config = transformers.GPT2Config(n_embd=256, n_layer=2, n_head=4, n_positions=128, attn_implementation="eager")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(2, 128, dtype=torch.long, device="meta")
    found = trace(model, {"input_ids": ids, "labels": ids}, "training")
    alone = run_step(found, h100)
    assert scale(found, h100, TrainingLayout()).time_s == alone.time_s
    cut = scale(found, h100, TrainingLayout(tp=2))
    joined = [op for op in cut.rank_trace.ops if op.name == "all_reduce" and op.inputs[0].shape == (2, 128, 256)]
    # the table of tokens; attention and MLP of two layers, forward and backward; and the head's input backward
    assert len(joined) == 1 + 2 * 2 * 2 + 1
    scores = [op.inputs[0].shape for op in cut.rank_trace.ops if op.name == "_softmax"]
    assert scores == [(2, 2, 128, 128)] * 2  # two of four heads
    sharded = sum(g.elements for g in cut.rank_trace.gradients)
    assert sharded == pytest.approx(found.parameters / 2, rel=0.01)
    assert scale(found, h100, TrainingLayout(pp=2, micro_batches=2)).time_s > 0


def test_compiled_ranks_fuse_what_they_run(h100: Gpu) -> None:
    torch = pytest.importorskip("torch")
    from kernelcast.tracing import trace

    class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

        def forward(self, x: Any) -> Any:
            inner = self.fc1(x)
            return x + self.fc2(0.5 * inner * (1 + torch.tanh(inner + 0.04 * inner**3)))

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    step = trace(Model(), torch.empty(8, 512, 256, device="meta"), "training")
    alone = run_step(fuse(step), h100)
    assert scale(step, h100, TrainingLayout(), compiled=True).time_s == pytest.approx(alone.time_s)
    plans: list[dict[str, Any]] = [{"dp": 4}, {"dp": 4, "zero": 3}, {"tp": 2}, {"pp": 4, "micro_batches": 8}]
    for plan in plans:
        eager, found = (scale(step, h100, TrainingLayout(**plan), compiled=compiled) for compiled in (False, True))
        assert found.compiled and found.parts_s["kernels"] < eager.parts_s["kernels"]
        assert found.parts_s["communication"] == pytest.approx(eager.parts_s["communication"])
        assert found.sent_bytes == eager.sent_bytes and found.flops == eager.flops
    with pytest.raises(kc.KernelcastError, match="is fused already: give the trace as it was, and compiled=True"):
        scale(fuse(step), h100, TrainingLayout(dp=2))


def test_checkpointed_layers_run_twice_and_are_joined_twice(h100: Gpu) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from kernelcast.tracing import trace

    class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc1, self.fc2 = torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

        def forward(self, x: Any) -> Any:
            return x + self.fc2(torch.dropout(self.fc1(self.norm(x)), 0.1, True))

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.embed_tokens, self.again = torch.nn.Embedding(100, 64), again
            self.layers = torch.nn.ModuleList(Block() for _ in range(4))

        def forward(self, ids: Any) -> Any:
            x = self.embed_tokens(ids)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            return x

    ids = torch.zeros(32, 128, dtype=torch.long)
    once, twice = (scale(trace(Model(again), ids, "training"), h100, TrainingLayout(tp=2)) for again in (False, True))
    assert twice.memory["activation"] < once.memory["activation"] / 2
    assert twice.flops > once.flops and twice.model_flops == once.model_flops
    joined = [sum(op.name == "all_reduce" for op in found.rank_trace.ops) for found in (once, twice)]
    # the table, each block forward and backward; again nothing reads what fc2 makes, so nobody joins it
    assert joined == [1 + 4 + 4, 1 + 4 + 4]
