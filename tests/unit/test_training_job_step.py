"""The time of a step of a training job: demand counted by hand, laws, and published results."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernelcast.energy.power import with_cap
from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.models import Architecture
from kernelcast.models.catalogue import model
from kernelcast.models.config import parse
from kernelcast.stacks.training_stack import training_stack, training_stack_ids
from kernelcast.training import job_flops, job_work
from kernelcast.training.job import Lora, Offload, Recompute, TrainingJob, precision, precision_names
from kernelcast.training.layer_kernels import CONTEXT, EXPERT, TENSOR, Pass
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.passes import Builder
from kernelcast.training.training_forecast import TrainingForecast
from kernelcast.training.transformer_step import PARTS, forecast, forecast_many

LLAMA, MIXTRAL = model("llama-3.1-8b"), model("mixtral-8x7b")
H100, B200, A100 = gpu("h100_sxm"), gpu("b200_sxm"), gpu("a100_sxm")


def job(architecture: Architecture = LLAMA, *, seq: int = 4096, **changes: Any) -> TrainingJob:
    names = {field.name for field in dataclasses.fields(TrainingLayout)}
    sizes = {name: changes.pop(name) for name in list(changes) if name in names}
    given = {"gpu": H100, "seq": seq, **changes}
    return TrainingJob(model=architecture, layout=TrainingLayout(**sizes), **given)


def gemm_flops(one: Pass) -> float:
    """2 m n k of every product."""
    sizes = [(k.count, k.call.arguments) for k in one.kernels if k.call.op == "gemm"]
    return sum(2.0 * count * given["m"] * given["n"] * given["k"] for count, given in sizes)


def sent_bytes(one: Pass, part: str) -> float:
    return sum(
        launch.count * launch.arguments["bytes"] for x in one.exchanges if x.part == part for launch in x.launches
    )


# ---- Demand


def test_products_of_a_layer_are_two_flops_a_weight_and_token_and_twice_that_backward() -> None:
    layer = LLAMA.layers[0].layer
    unit = Builder(job()).layer(layer)
    # q, k, v: 4096 x (4096 + 2 x 1024); o: 4096 x 4096; gate, up, down: 3 x 4096 x 14336
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert gemm_flops(unit.forward) == pytest.approx(2 * weights * 4096)
    assert gemm_flops(unit.backward) == gemm_flops(unit.wgrad) == gemm_flops(unit.forward)


def test_tensor_parallelism_shards_the_products_and_sends_the_hidden_state() -> None:
    layer = LLAMA.layers[0].layer
    whole, shared = (Builder(job(tp=tp, sequence_parallel=tp > 1)).layer(layer) for tp in (1, 4))
    assert gemm_flops(shared.forward) == pytest.approx(gemm_flops(whole.forward) / 4)
    # an all-gather and a reduce-scatter before and after attention, and the MLP: 4 of 4096 x 4096 x 2 bytes
    assert sent_bytes(shared.forward, TENSOR) == 4 * 4096 * 4096 * 2
    # the same, and the gather of the two column layers' inputs again for the gradients of their weights
    assert sent_bytes(shared.backward, TENSOR) == 6 * 4096 * 4096 * 2


def test_context_parallelism_sends_keys_and_values_round_the_ring() -> None:
    unit = Builder(job(cp=4, seq=8192)).layer(LLAMA.layers[0].layer)
    # 3 steps of the 2048 tokens of a rank, 8 heads of 128 for keys and for values, 2 bytes
    assert sent_bytes(unit.forward, CONTEXT) == 3 * 2 * 2048 * 8 * 128 * 2
    assert sent_bytes(unit.backward, CONTEXT) == 2 * sent_bytes(unit.forward, CONTEXT)  # with their gradients


def test_heads_for_tokens_sends_queries_keys_values_and_outputs() -> None:
    unit = Builder(job(cp=4, cp_comm="a2a", seq=8192)).layer(LLAMA.layers[0].layer)
    # 32 query heads and twice 8, then 32 of the output
    assert sent_bytes(unit.forward, CONTEXT) == 2048 * (32 + 2 * 8 + 32) * 128 * 2


def test_context_parallel_ranks_share_causal_attention_evenly() -> None:
    def scores(unit: Any) -> float:
        total = 0.0
        for kernel in unit.forward.kernels:
            if kernel.call.op == "attention":
                given = kernel.call.arguments
                pairs = given["q_len"] * given["kv_len"] / (2 if given["causal"] else 1)
                total += kernel.count * given["batch"] * pairs
        return total

    one, four = (Builder(job(cp=cp, seq=8192)).layer(LLAMA.layers[0].layer) for cp in (1, 4))
    assert scores(four) == pytest.approx(scores(one) / 4)


def test_experts_send_each_token_to_all_that_it_chose() -> None:
    unit = Builder(job(MIXTRAL, dp=8, ep=8)).layer(MIXTRAL.layers[0].layer)
    # there and back: 4096 tokens, 2 experts, 4096 numbers of 2 bytes
    assert sent_bytes(unit.forward, EXPERT) == 2 * 4096 * 2 * 4096 * 2
    assert sent_bytes(unit.backward, EXPERT) == sent_bytes(unit.forward, EXPERT)


def test_experts_of_a_rank_do_the_work_of_its_tokens_whatever_the_parallelism() -> None:
    """8 ranks hold an expert each and get as many tokens as they send."""
    alone, apart = (Builder(job(MIXTRAL, dp=8, ep=ep)).layer(MIXTRAL.layers[0].layer) for ep in (1, 8))
    assert gemm_flops(apart.forward) == pytest.approx(gemm_flops(alone.forward))


def test_selective_recomputation_runs_its_modules_again() -> None:
    none, attention, mlp = (
        Builder(job(recompute=recompute)).layer(LLAMA.layers[0].layer)
        for recompute in (Recompute(), Recompute("selective"), Recompute("selective", modules=("mlp",)))
    )
    assert not none.recompute.kernels
    assert {kernel.call.op for kernel in attention.recompute.kernels} == {"attention"}
    assert gemm_flops(mlp.recompute) == 2 * 3 * 4096 * 14336 * 4096


def test_frozen_weights_have_no_gradient_and_adapters_do() -> None:
    unit = Builder(job(lora=Lora(16))).layer(LLAMA.layers[0].layer)
    whole = Builder(job()).layer(LLAMA.layers[0].layer)
    assert gemm_flops(unit.wgrad) < 0.02 * gemm_flops(whole.wgrad)  # adapters of rank 16 alone
    # q k v: 16 (4096 + 6144), o: 16 (4096 + 4096), gate and up: 16 (4096 + 28672), down: 16 (14336 + 4096)
    numbers = 16 * (4096 + 6144 + 8192 + 4096 + 28672 + 14336 + 4096)
    assert job_work.trained_parameters(job(lora=Lora(16)), LLAMA.layers[0].layer)[0] == numbers


def test_a_base_in_four_bits_is_made_wide_in_both_passes() -> None:
    plain, narrow = (forecast(job(lora=Lora(16, base=base))) for base in ("", "int4"))
    copies = [sum(k.call.op == "copy" for k in Builder(job(lora=Lora(16, base=base))).layer(LLAMA.layers[0].layer)
                  .backward.kernels) for base in ("", "int4")]  # fmt: skip
    assert copies[1] - copies[0] == 4  # one for each linear layer
    assert narrow.time_s > plain.time_s


def test_narrow_products_are_cast_and_the_head_is_not_narrow() -> None:
    builder = Builder(job(precision=precision("fp8_current")))
    unit, head = builder.layer(LLAMA.layers[0].layer), builder.head()
    assert {k.call.arguments["dtype"] for k in unit.forward.kernels if k.call.op == "gemm"} == {"fp8"}
    assert {k.call.arguments["dtype"] for k in head.forward.kernels if k.call.op == "gemm"} == {"bf16"}
    plain = Builder(job()).layer(LLAMA.layers[0].layer)
    copies = [sum(k.call.op == "copy" for k in each.forward.kernels) for each in (unit, plain)]
    assert copies[0] - copies[1] == 4  # of the inputs of the four linear layers


def test_model_flops_are_six_a_weight_and_token_and_half_of_attention() -> None:
    layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    seen = (4096 + 1) / 2  # keys that a token sees on average
    attention = 32 * 4 * 4096 * seen
    assert job_flops.model_flops(job()) == pytest.approx(4096 * (6 * layers + 3 * attention), rel=1e-3)


# ---- A step


def test_parts_add_up_to_the_step() -> None:
    found = forecast(job(MIXTRAL, dp=16, ep=8, tp=2, pp=2, cp=2, zero=1, sequence_parallel=True, micro_batches=8))
    assert set(found.parts_s) == set(PARTS)
    assert sum(found.parts_s.values()) == pytest.approx(found.time_s)
    assert all(seconds >= 0 for seconds in found.parts_s.values())
    assert found.low_s < found.time_s < found.high_s
    assert found.tokens_per_s_per_gpu == pytest.approx(16 * 8 * 4096 / found.time_s / 128)


def test_many_jobs_are_forecast_as_each_alone() -> None:
    jobs = [job(dp=8, zero=zero, micro_batches=m, pp=pp) for zero in (1, 3) for m in (4, 40) for pp in (1, 4)]
    together = [found.time_s for found in forecast_many(jobs)]
    assert together == pytest.approx([forecast(each).time_s for each in jobs])


@pytest.mark.parametrize("name", precision_names())
def test_every_precision_has_a_step_where_the_gpu_has_its_products(name: str) -> None:
    assert forecast(job(gpu=B200, precision=precision(name))).time_s > 0


@pytest.mark.parametrize("name", training_stack_ids())
def test_every_stack_has_a_step_and_sources(name: str) -> None:
    stack = training_stack(name)
    assert stack.sources
    assert forecast(job(stack=stack, dp=8, zero=3)).time_s >= forecast(job(dp=8, zero=3)).time_s


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b",
                                  "kimi-linear-48b-a3b", "gemma-3-27b", "deepseek-v4-flash",
                                  "llama-4-scout"])  # fmt: skip
def test_models_of_every_family_have_a_step(name: str) -> None:
    found = forecast(job(model(name), dp=8, ep=8 if "experts" in model(name).model_class else 1, gpu=B200))
    assert 0.02 < found.mfu < 0.9


def test_a_model_without_training_kernels_is_refused() -> None:
    with pytest.raises(KernelcastError, match="no training kernels"):
        forecast(job(model("minimax-m3"), gpu=B200))


# ---- Laws


def per_gpu(found: TrainingForecast) -> float:
    return found.tokens_per_s_per_gpu


def test_more_ranks_of_the_same_layout_are_never_faster_per_gpu() -> None:
    """Each with the same work: a sharded optimizer would have less."""
    steps = forecast_many([job(dp=dp, tp=2, sequence_parallel=True, micro_batches=4) for dp in (4, 8, 16, 64, 512)])
    speeds = [per_gpu(step) for step in steps]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(speeds))


@pytest.mark.parametrize("sizes", [{"dp": 64, "zero": 3}, {"dp": 16, "pp": 4, "micro_batches": 8, "zero": 1},
                                   {"dp": 16, "cp": 4, "zero": 1}])  # fmt: skip
def test_a_faster_network_is_never_slower(sizes: dict[str, Any]) -> None:
    steps = [forecast(job(between_nodes=name, **sizes)) for name in ("ib_hdr", "ib_ndr", "ib_xdr")]
    assert steps[0].time_s >= steps[1].time_s >= steps[2].time_s


def test_recomputation_is_never_faster() -> None:
    modes = [
        Recompute(),
        Recompute("selective"),
        Recompute("selective", modules=("core_attn", "mlp")),
        Recompute("full"),
    ]
    times = [forecast(job(recompute=mode)).time_s for mode in modes]
    assert times == sorted(times)


def test_overlap_of_tensor_parallelism_is_never_slower() -> None:
    plain, overlapped = (forecast(job(tp=8, sequence_parallel=True, tp_overlap=overlap)) for overlap in (False, True))
    assert overlapped.time_s < plain.time_s


def test_an_optimizer_or_activations_on_the_host_take_longer() -> None:
    plain = forecast(job(micro_batches=2)).time_s
    for offload in (Offload(optimizer=True), Offload(activation_layers=32)):
        assert forecast(job(micro_batches=2, offload=offload)).time_s >= plain


def test_schedules_without_bubbles_are_faster() -> None:
    plain, zero, dual = (
        forecast(job(pp=4, micro_batches=8, schedule=name)).time_s for name in ("1f1b", "zb-h1", "dualpipe")
    )
    assert dual < zero < plain


def test_nvl72_is_72_gpus_and_not_more() -> None:
    gb200 = gpu("gb200")
    inside, across = (TrainingLayout(dp=dp).group("replicas") for dp in (64, 128))
    assert inside.nodes(gb200) == 1
    assert across.nodes(gb200) == 2  # 64 GPUs of each of two racks
    assert inside.nodes(H100) == 8


# ---- Published results


def gpt3(layers: int, hidden: int, heads: int) -> Architecture:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 51200, "n_positions": 2048}
    kind = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu"}
    return parse({**kind, **sizes})


GPT_175B = gpt3(96, 12288, 96)


def test_gpt3_175b_on_1024_a100() -> None:
    """140 to 163 TFLOP/s a GPU with what is recomputed, 76B to 1T parameters (Narayanan et al., SC21, table 1)."""
    found = forecast(job(GPT_175B, gpu=A100, seq=2048, dp=16, tp=8, pp=8, micro_batches=96, schedule="interleaved",
                         virtual_stages=3, between_nodes="ib_hdr", recompute=Recompute("full")))  # fmt: skip
    linear, attention = 96 * 12 * 12288**2 + 51200 * 12288, 96 * 4 * 12288 * 2048  # they count all of attention
    tokens = found.job.tokens / found.job.gpus / found.time_s
    reached = tokens * (8 * linear + 4 * attention)
    assert 0.9 * 140e12 < reached < 1.1 * 163e12


@pytest.mark.parametrize(("architecture", "sizes", "recompute", "seconds"), [
    (GPT_175B, {"pp": 8, "micro_batches": 64}, Recompute("full"), 18.13),
    (GPT_175B, {"pp": 8, "micro_batches": 64, "sequence_parallel": True}, Recompute("selective"), 13.75),
    (gpt3(105, 20480, 128), {"pp": 35, "micro_batches": 280}, Recompute("full"), 49.05),
    (gpt3(105, 20480, 128), {"pp": 35, "micro_batches": 280, "sequence_parallel": True}, Recompute("selective"), 37.83),
])  # fmt: skip
def test_selective_recomputation_on_a100(
    architecture: Architecture, sizes: dict[str, int], recompute: Recompute, seconds: float
) -> None:
    """Seconds of an iteration (Korthikanti et al. 2022, arXiv 2205.05198, table 5)."""
    found = forecast(job(architecture, gpu=A100, seq=2048, tp=8, schedule="interleaved", virtual_stages=3,
                         between_nodes="ib_hdr", recompute=recompute, **sizes))  # fmt: skip
    assert found.time_s == pytest.approx(seconds, rel=0.10)


@pytest.mark.parametrize(("sizes", "seq", "mfu"), [
    ({"dp": 64, "micro_batches": 32}, 8192, 0.43), ({"dp": 128, "micro_batches": 16}, 8192, 0.41),
    ({"dp": 8, "cp": 16, "cp_comm": "all_gather", "micro_batches": 16}, 131072, 0.38),
])  # fmt: skip
def test_llama_3_405b_on_8k_to_16k_h100(sizes: dict[str, Any], seq: int, mfu: float) -> None:
    """The Llama 3 Herd of Models (arXiv 2407.21783), table 4 and section 3.3.2: the embedding and the head are parts
    of their own. The runs had stragglers, which are not in a step: forecasts are 11 to 14% too fast."""
    parts: dict[str, Any] = {"schedule": "interleaved", "virtual_stages": 8, "stage_layers": (0, *[1] * 126, 0)}
    found = forecast(job(model("llama-3.1-405b"), seq=seq, tp=8, pp=16, zero=2, sequence_parallel=True, **parts,
                         **sizes))  # fmt: skip
    published_s = found.time_s * found.mfu / mfu
    assert found.time_s == pytest.approx(published_s, rel=0.15)


def test_stages_of_a_pipeline_are_even_or_count_embedding_and_loss() -> None:
    def sizes(layers: int, pp: int, virtual: int = 1) -> tuple[int, ...]:
        architecture = replace(LLAMA, layers=(replace(LLAMA.layers[0], count=layers),))
        schedule = "interleaved" if virtual > 1 else "1f1b"
        return job(architecture, pp=pp, virtual_stages=virtual, schedule=schedule, micro_batches=pp).part_layers

    assert sizes(32, 4) == (8, 8, 8, 8)
    assert sizes(30, 4) == (7, 8, 8, 7)
    assert sizes(126, 16, 8) == (0, *[1] * 126, 0)
    assert sum(sizes(61, 4)) == 61
    assert np.ptp(sizes(61, 4)) == 1


def test_a_lower_power_limit_makes_the_products_of_a_step_longer() -> None:
    """nvidia-smi -pl: products at the board's 700 W slow down, by less than the power does (clocks fall)."""
    whole, capped = (forecast(job(LLAMA, gpu=with_cap(H100, watts))) for watts in (None, 500.0))
    assert 1.03 < capped.parts_s["compute"] / whole.parts_s["compute"] < 700 / 500


def test_products_that_a_gpu_or_a_layout_cannot_run_are_refused() -> None:
    for on, name in (("a100_sxm", "fp8"), ("h100_sxm", "mxfp8"), ("h100_sxm", "nvfp4"), ("t4", "bf16")):
        with pytest.raises(KernelcastError, match=f"precision {precision(name).id}: {on}"):
            job(LLAMA, gpu=gpu(on), precision=precision(name))
    with pytest.raises(KernelcastError, match="tp 64 does not divide the 32 heads"):
        job(LLAMA, tp=64)
    with pytest.raises(KernelcastError, match="cp_comm a2a: tp 4 x cp 16 does not divide the heads"):
        job(LLAMA, tp=4, cp=16, cp_comm="a2a")


def test_mfu_of_fp8_with_block_scales_is_relative_to_fp8() -> None:
    found = forecast(job(LLAMA, precision=precision("fp8_block")))
    assert found.mfu * found.job.gpu.tensor_flops_per_s("fp8") == pytest.approx(found.model_tflops_per_gpu * 1e12)
