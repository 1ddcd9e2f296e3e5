"""Memory of a training job: each tensor and each part of a rank by hand, and laws that hold for every layout."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kernelcast as kc
from kernelcast.errors import DoesNotFit
from kernelcast.models import model
from kernelcast.models.architecture import Architecture
from kernelcast.models.catalogue import model_ids
from kernelcast.models.layers import Dense, Experts, LatentAttention, Layer, LayerRun, Norms, SelfAttention
from kernelcast.stacks.training_stack import training_stack
from kernelcast.training import pipeline
from kernelcast.training.job import Lora, Offload, Recompute, TrainingJob, precision
from kernelcast.training.job_memory import PARTS, check_fits, held, memory
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.rank_weights import layer_weights
from kernelcast.training.saved_tensors import Sharded, head_steps, kept, layer_steps, most_alive

H = 128
ATTENTION = SelfAttention(8, 2, 16)  # queries of 128, keys and values of 32 each
LATENT = LatentAttention(8, 48, 32, 16, 8, 16)  # queries and keys of 8 x 24, values of 8 x 16
DENSE = Layer(ATTENTION, Dense(256, True, "silu"), Norms("rmsnorm", 2))
MOE = Layer(LATENT, Experts(8, 2, 64, True, "silu", shared_inter=64), Norms("rmsnorm", 2))
WORKSPACE = 2 * 32 * 2**20


def architecture(*runs: tuple[int, Layer], vocab: int = 1024, tied: bool = False) -> Architecture:
    layers = tuple(LayerRun(*run) for run in runs)
    return Architecture("small", "llama", "decoder", H, vocab, layers, tied, 4096, "rmsnorm")


def job(model: Architecture, layout: TrainingLayout | None = None, **more: Any) -> TrainingJob:
    return TrainingJob(
        model=model, layout=layout or TrainingLayout(), **{"gpu": kc.gpu("h100_sxm"), "seq": 512, **more}
    )


# ---- tensors of a layer, in bytes a token


def test_a_gpt_layer_keeps_32_bytes_a_hidden_value() -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1): 34 s b h and 5 a s^2 b. Of it 2 s b h are dropout masks,
    and flash attention keeps the logarithm of each row's sum in place of the scores. 4 bytes a row for each norm."""
    gpt = Layer(SelfAttention(8, 8, 16), Dense(4 * H, False, "gelu"), Norms("layernorm", 2))
    assert kept(layer_steps(gpt, Sharded(hidden=H))) == 32 * H + 2 * 4 + 8 * 4


def test_grouped_queries_and_a_gated_mlp() -> None:
    norms = 2 * (2 * H + 4)
    inputs = 2 * (2 * H)  # of q, k, v and of gate and up
    attention = 2 * 128 + 2 * 2 * 32 + 2 * 128 + 4 * 8  # q; k and v; output; logarithms
    mlp = 2 * 512 + 2 * 256
    assert kept(layer_steps(DENSE, Sharded(hidden=H))) == norms + inputs + attention + mlp


def test_tensor_parallelism_divides_what_lies_between_its_products_and_sequence_parallelism_the_rest() -> None:
    norms_and_inputs = 4 * 2 * H
    between = 2 * 128 + 2 * 2 * 32 + 2 * 128 + 4 * 8 + 2 * 512 + 2 * 256
    each = Sharded(hidden=H, tp=2)
    assert kept(layer_steps(DENSE, each)) == norms_and_inputs + 8 + between / 2
    both = replace(each, sequence_parallel=True)
    assert kept(layer_steps(DENSE, both)) == norms_and_inputs / 2 + 8 + between / 2


def test_key_value_heads_are_replicated_when_there_are_fewer_than_ranks() -> None:
    two, four = (kept(layer_steps(DENSE, Sharded(hidden=H, tp=tp))) for tp in (2, 4))
    kv = 2 * 2 * 32
    rest = kept(layer_steps(DENSE, Sharded(hidden=H))) - 4 * 2 * H - 8 - kv
    assert two - four == rest / 4  # keys and values stay halves


def test_fp8_keeps_inputs_of_products_in_a_byte_and_the_output_of_attention_twice() -> None:
    plain, fp8 = (
        kept(layer_steps(DENSE, Sharded(hidden=H, linear=linear, quantised=linear < 2))) for linear in (2.0, 1.0)
    )
    assert plain - fp8 == H + H + 256 - 128  # qkv, fc1 and fc2 shrink; the output product's copy is new


def test_latent_attention() -> None:
    """Latents of 48 and 32, before and after their norm; q and k of 192, v and the output of 128; the shared position
    key of 8 is not kept by itself."""
    attention = Layer(LATENT, None, Norms("rmsnorm", 1))
    norms = 2 * H + 4 + 2 * (48 + 32) + 4
    inputs = 2 * H + 2 * (48 + 32)
    core = 2 * 192 + 2 * 192 + 2 * 128 + 2 * 128 + 4 * 8
    steps = layer_steps(attention, Sharded(hidden=H))
    assert kept(steps) == norms + inputs + core
    again = 2 * (48 + 32) + 2 * (192 + 192 + 128)  # up-projections run again: their inputs' norm, q, k and v
    assert kept(steps) - kept(steps, ("mla_up_proj",)) == again


def test_experts_keep_topk_tokens_a_token() -> None:
    block = Layer(None, Experts(8, 2, 64, True, "silu", shared_inter=64), Norms("rmsnorm", 1))
    routed = 2 * (2 * H + 2 * 128 + 2 * 64)
    shared = 2 * 128 + 2 * 64
    router = 8 * (3 * 4 + 1 + 8)
    steps = layer_steps(block, Sharded(hidden=H))
    assert kept(steps) == (2 * H + 4) + 2 * H + router + routed + shared
    assert kept(steps, ("moe",)) == (2 * H + 4) + 2 * H
    assert kept(steps) - kept(steps, ("moe_act",)) == 2 * (2 * 64) + 2 * 64
    assert kept(steps) - kept(steps, ("shared_experts",)) == shared


def test_the_worst_moment_of_a_layer_is_the_backward_pass_of_its_activation() -> None:
    """The input of the last product is gone; the gradients of gate and up (1,024) and of their product (512) are there,
    and the gradient beside the layer (256)."""
    steps = layer_steps(DENSE, Sharded(hidden=H))
    assert most_alive(steps, 2 * H) == kept(steps) - 512 + 1024 + 512 + 256


@pytest.mark.parametrize(
    ("module", "saved"), [("layernorm", 4 * H), ("mlp_act", 512), ("mlp", 1024 + 512), ("core_attn", 32)]
)
def test_selective_recomputation(module: str, saved: float) -> None:
    steps = layer_steps(DENSE, Sharded(hidden=H))
    assert kept(steps) - kept(steps, (module,)) == saved


def test_torchtitans_selective_op_keeps_attention_and_half_of_the_products() -> None:
    """Of q, k, v (192), the output (128), gate and up (512) and down (128), half, beside the layer's input."""
    steps = layer_steps(DENSE, Sharded(hidden=H))
    products = 2 * (192 + 128 + 512 + 128) / 2
    assert kept(steps, ("op",)) == 2 * H + 4 + (2 * 128 + 4 * 8) + products


@pytest.mark.parametrize(("fused", "each"), [(True, 2), (False, 12)])
def test_logits_are_overwritten_by_their_gradient_or_there_three_times_in_fp32(fused: bool, each: float) -> None:
    steps = head_steps("rmsnorm", Sharded(hidden=H), 100_000, fused)
    behind_the_head = 2 * H if fused else 0.0  # the gradient of the product's input, when that of the logits is there
    assert most_alive(steps, 0.0) == (2 * H + 4) + 2 * H + each * 100_000 + behind_the_head


# ---- a rank


def test_every_part_of_one_gpu_by_hand() -> None:
    """Four layers, 512 tokens: weights in bf16, fp32 copy, gradients in fp32, two moments."""
    small = architecture((4, DENSE))
    needed = memory(job(small))
    layer = H * (128 + 64) + 128 * H + 3 * H * 256 + 2 * H
    numbers = 4 * layer + 2 * 1024 * H + H
    assert numbers == small.parameters.total
    each = kept(layer_steps(DENSE, Sharded(hidden=H)))
    loss = 2 * H + 4 + 2 * H + 2 * H + 2 * 1024  # last norm's input, its output, the gradient of that, the logits'
    shapes = H * 192 + 128 * H + H * 512 + 256 * H
    assert needed.parts == {
        "parameters": 2 * numbers, "main_parameters": 4 * numbers, "gradients": 4 * numbers, "optimizer": 8 * numbers,
        "activations": 512 * 4 * each, "logits": 512 * loss, "communication": 0,
        "workspace": WORKSPACE + 2 * shapes + 2 * 1024 * H,
    }  # fmt: skip
    assert needed.peak_bytes == sum(needed.parts.values())
    assert set(needed.parts) == set(PARTS)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_the_tensors_are_those_that_a_traced_step_keeps(model_type: str, tmp_path: Path) -> None:
    """Hugging Face's model on meta tensors, op by op: activations and logits at the peak, and no gradients before the
    first backward pass. (Qwen3 norms queries and keys.) The trace has no workspaces."""
    pytest.importorskip("transformers")
    from kernelcast.app.questions.trace import trace_step
    from kernelcast.tracing.build import TraceRequest

    config = {
        "model_type": model_type, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64,
        "num_key_value_heads": 2, "intermediate_size": 1408, "vocab_size": 4000, "max_position_embeddings": 1024,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]],
        "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    traced = trace_step(TraceRequest(str(path), 2, 512, dtype="bf16", mode="training"), "adamw", 1, "fused", False)
    eager = job(model(path), micro_batch=2, stack=training_stack("huggingface"))
    parts = memory(eager).parts
    assert parts["activations"] + parts["logits"] == pytest.approx(traced.footprint.activations, rel=0.01)
    assert parts["gradients"] == traced.footprint.gradients == 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "qwen3-235b-a22b", "gpt3-175b", "mixtral-8x7b"])
def test_ranks_have_all_weights_of_a_model(name: str) -> None:
    whole = model(name)
    layers = sum(run.count * layer_weights(run.layer, whole.hidden, 1, 1, 1).total for run in whole.layers)
    outer = whole._outer_parameters().total
    assert layers + outer == whole.parameters.total


def test_every_bundled_model_has_its_parameters_and_needs_less_when_divided() -> None:
    for name in model_ids():
        whole = replace(model(name), quantization=None)
        text = whole.parameters.total - whole.parameters.vision
        one = memory(job(whole))
        assert one.parts["parameters"] == pytest.approx(2 * text, rel=2e-3), name
        assert memory(job(whole, TrainingLayout(pp=2, micro_batches=4))).peak_bytes < one.peak_bytes, name


def test_zero_and_the_distributed_optimizer() -> None:
    """12 bytes of copy and moments are sharded first, then 4 of gradients, then the parameters, of which FSDP keeps the
    fp32 ones alone. Context parallel ranks share the shards."""
    small = architecture((4, DENSE))
    numbers = small.parameters.total

    def parts(zero: int, dp: int, cp: int = 1) -> dict[str, float]:
        return dict(memory(job(small, TrainingLayout(dp=dp, cp=cp, zero=zero))).parts)

    assert parts(1, 4)["optimizer"] == parts(1, 2, 2)["optimizer"] == 8 * numbers / 4
    assert parts(1, 4)["gradients"] == 4 * numbers
    assert parts(2, 4)["gradients"] == 4 * numbers / 4
    assert parts(3, 4)["parameters"] == 0
    assert parts(3, 4)["main_parameters"] == 4 * numbers / 4
    unit = 2 * 0 + max(1024 * H + H, H * 192 + 128 * H + 3 * H * 256 + 2 * H)  # the head with its norm, or a layer
    unit = max(unit, 2 * 1024 * H + H)  # embedding and head are on one stage and gathered together
    assert parts(3, 4)["communication"] == unit * (2 * 2 + 2 + 4)


def test_fsdp_in_a_pipeline_keeps_parameters_gathered_and_gradients_whole() -> None:
    small = architecture((4, DENSE))
    stage = memory(job(small, TrainingLayout(dp=4, pp=2, zero=3, micro_batches=4))).stages[1]
    layer = layer_weights(DENSE, H, 1, 1, 1).total
    numbers, head = 2 * layer + 1024 * H + H, 1024 * H + H
    assert stage["communication"] == numbers * (2 + 4) + max(layer, head) * (2 + 4)


def test_experts_are_divided_by_ep_and_their_state_by_ranks_with_the_same() -> None:
    small = architecture((4, MOE))
    experts = 4 * 8 * 3 * H * 64
    dense = small.parameters.total - experts
    layout = TrainingLayout(dp=8, ep=4, zero=1)
    parts = memory(job(small, layout)).parts
    assert parts["parameters"] == 2 * (dense + experts / 4)
    assert parts["optimizer"] == 8 * (dense / 8 + experts / 4 / 2)


def test_lora_has_no_gradient_of_the_base_and_fsdp_shards_it() -> None:
    """Frozen parameters are divided by TP, by the pipeline, and by ZeRO-3."""
    small = architecture((4, DENSE))
    adapters = 4 * 8 * (H + 192 + 128 + H + H + 512 + 256 + H)  # rank 8
    numbers = small.parameters.total
    one = memory(job(small, lora=Lora(8))).parts
    assert one["parameters"] == 2 * (numbers + adapters)
    assert (one["gradients"], one["optimizer"]) == (4 * adapters, 8 * adapters)
    fsdp = memory(job(small, TrainingLayout(dp=4, zero=3), lora=Lora(8))).parts
    assert fsdp["parameters"] == pytest.approx(2 * (numbers + adapters) / 4)
    tp = memory(job(small, TrainingLayout(tp=2), lora=Lora(8))).parts
    assert tp["parameters"] < 0.55 * one["parameters"]
    first, last = memory(job(small, TrainingLayout(pp=2), lora=Lora(8))).stages
    assert first.parts["parameters"] + last.parts["parameters"] == one["parameters"]


def test_qlora_stores_products_in_nf4() -> None:
    small = architecture((4, DENSE))
    plain, quantised = (memory(job(small, lora=Lora(8, base=base))).parts["parameters"] for base in ("", "int4"))
    products = 4 * (H * 192 + 128 * H + 3 * H * 256)
    assert plain - quantised == pytest.approx(products * (2 - 0.5 - 1 / 64 - 4 / (64 * 256)))


@pytest.mark.parametrize(
    ("optimizer", "state"), [("adamw", 8), ("adamw8bit", 2.03125), ("muon", 4), ("sgd_momentum", 4), ("sgd", 0)]
)
def test_states_of_optimizers(optimizer: str, state: float) -> None:
    small = architecture((2, DENSE))
    assert memory(job(small, optimizer=optimizer)).parts["optimizer"] == state * small.parameters.total


def test_gradients_in_16_bits_are_cast_at_the_optimizers_step() -> None:
    """Of a model with little else the cast, 4 bytes a parameter, is the peak."""
    small = architecture((2, DENSE), vocab=256)
    plain, half = (
        memory(job(small, seq=2, precision=precision(name))).parts["gradients"] for name in ("bf16", "bf16_grad")
    )
    assert (plain, half) == (4 * small.parameters.total, (2 + 4) * small.parameters.total)


def test_offload() -> None:
    """Of four layers two are on the GPU at a time; copies and moments are on the host."""
    small = architecture((4, DENSE))
    each = 512 * kept(layer_steps(DENSE, Sharded(hidden=H)))
    here, away = (memory(job(small, offload=Offload(activation_layers=layers))).stages[0] for layers in (0, 4))
    assert here["activations"] - away["activations"] == 2 * each
    parts = memory(job(small, offload=Offload(optimizer=True))).parts
    assert (parts["main_parameters"], parts["optimizer"]) == (0, 0)


def test_full_recomputation_keeps_the_input_of_a_layer() -> None:
    small = architecture((8, DENSE), vocab=8)
    steps = layer_steps(DENSE, Sharded(hidden=H))
    whole, alive, stream = kept(steps), most_alive(steps, 2 * H), 2 * H

    def activations(**recompute: Any) -> float:
        needed = memory(job(small, recompute=Recompute(**recompute)))
        return float(needed.parts["activations"]) / 512

    assert activations() == 7 * whole + alive
    assert activations(mode="full") == 7 * stream + alive
    assert activations(mode="full", layers=4) == stream + 3 * whole + alive  # two kept inputs, four layers at once
    assert activations(mode="full", method="block", layers=6) == 6 * stream + whole + alive


# ---- schedules


def test_405b_with_16_stages_of_8_parts_has_its_embedding_and_loss_on_their_own() -> None:
    """Megatron's --account-for-embedding-in-pipeline-split and -loss-: 126 layers + 2 over 16 x 8 parts."""
    interleaved = TrainingLayout(pp=16, schedule="interleaved", virtual_stages=8, micro_batches=16)
    asked = job(architecture((126, DENSE)), interleaved)
    assert asked.part_layers == (0, *[1] * 126, 0)
    first, second, *_, last = memory(asked).stages
    layer = 2 * layer_weights(DENSE, H, 1, 1, 1).total
    assert first.parts["parameters"] == 7 * layer + 2 * 1024 * H
    assert second.parts["parameters"] == 8 * layer
    assert last.parts["parameters"] == 7 * layer + 2 * (1024 * H + H)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)])
@pytest.mark.parametrize("groups", [1, 3])
def test_micro_batches_in_flight_are_those_of_the_schedule(
    schedule: Any, stages: int, virtual: int, groups: int
) -> None:
    """As counted in the order that a stage takes its passes in: interleaved, a virtual stage holds a part of a
    micro-batch, not all of it."""
    layout = TrainingLayout(pp=stages, schedule=schedule, virtual_stages=virtual, micro_batches=groups * stages)
    for stage, order in enumerate(pipeline.orders(schedule, stages, groups * stages, virtual)):
        passes, running = held(layout, stage)
        states = {state for state in pipeline.held_passes(order) if state.backward}
        counted = {
            (stage + int(part) * stages, tuple(int(count) for count in row))
            for row, part in zip(passes, running, strict=True)
        }
        expected = {
            (state.part, tuple(dict(state.held).get(stage + part * stages, 0) for part in range(virtual)))
            for state in states
        }
        most = max(sum(counts) for _, counts in expected)
        assert counted <= expected
        assert int(passes.sum(axis=1).max()) == most == pipeline.most_in_flight(order)


def test_dualpipe_holds_two_parts_and_one_micro_batch_more_than_stages() -> None:
    small = architecture((8, DENSE), vocab=8)
    one, two = (
        memory(job(small, TrainingLayout(pp=4, micro_batches=16, schedule=schedule))).stages[1].parts
        for schedule in ("1f1b", "dualpipe")
    )
    assert two["parameters"] == 2 * one["parameters"]
    passes, _ = held(TrainingLayout(pp=4, micro_batches=16, schedule="dualpipe"), 1)
    assert passes.sum(axis=1).tolist() == [5, 5]


def test_what_does_not_fit_is_refused_with_its_parts() -> None:
    whole = TrainingJob(model=model("llama-3.1-70b"), gpu=kc.gpu("h100_sxm"), layout=TrainingLayout(), seq=4096)
    with pytest.raises(DoesNotFit, match=r"parameters 131\.4, main parameters 262\.8") as refused:
        check_fits(whole)
    assert "GiB more than h100_sxm has" in str(refused.value)
    assert "\n" not in str(refused.value)


# ---- laws


MODULES = ("core_attn", "layernorm", "mlp_act", "moe_act", "mlp", "moe", "mla_up_proj")
MODES = [
    Recompute("none"), Recompute("selective", modules=("op",)), Recompute("full"), Recompute("full", layers=2),
    Recompute("full", "block", 1),
    *(Recompute("selective", modules=some) for count in (1, 2) for some in itertools.combinations(MODULES, count)),
]  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> TrainingJob:
    size = st.sampled_from([1, 2, 4])
    pp = draw(size)
    virtual = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    schedule: Any = "interleaved" if virtual > 1 else draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "dualpipe"]))
    tp, dp, cp = draw(size), draw(size), draw(size)
    layout = TrainingLayout(
        dp=dp, tp=tp, cp=cp, pp=pp, ep=draw(st.sampled_from([1, dp])), schedule=schedule, virtual_stages=virtual,
        micro_batches=pp * draw(size), sequence_parallel=tp > 1 and draw(st.booleans()),
        zero=draw(st.integers(0, 2)) if dp * cp > 1 else 0, cp_comm=draw(st.sampled_from(["p2p", "all_gather", "a2a"])),
    )  # fmt: skip
    layer = draw(st.sampled_from([DENSE, MOE]))
    assume(layer is MOE or layout.ep == 1)
    assume(layout.cp_comm != "a2a" or 2 * tp * cp <= 8)  # heads, of twice as many ranks too
    return job(
        architecture((8, layer)), layout, recompute=draw(st.sampled_from(MODES)), micro_batch=draw(size),
        gpu=kc.gpu("b200_sxm"), precision=precision(draw(st.sampled_from(["bf16", "fp8", "mxfp8", "bf16_grad"]))),
    )  # fmt: skip


@given(jobs())
@settings(max_examples=60, deadline=None)
def test_parts_add_up_and_recomputation_and_offload_never_need_more(asked: TrainingJob) -> None:
    needed = memory(asked)
    for stage in needed.stages:
        assert stage.used_bytes == pytest.approx(sum(stage.parts.values()))
        assert min(stage.parts.values()) >= 0
    assert needed.peak_bytes == max(stage.used_bytes for stage in needed.stages)
    plain = memory(replace(asked, recompute=Recompute("none"))).peak_bytes
    assert needed.peak_bytes <= plain * (1 + 1e-9)
    moved = memory(replace(asked, offload=Offload(activation_layers=4, optimizer=True))).peak_bytes
    assert moved <= needed.peak_bytes * (1 + 1e-9)


@given(jobs(), st.sampled_from(["tp", "cp", "dp", "zero", "sequence_parallel", "ep"]))
@settings(max_examples=80, deadline=None)
def test_more_sharding_never_needs_more(asked: TrainingJob, what: str) -> None:
    """Of the same micro-batch, on more ranks. (Tokens of one micro-batch: cp and tp divide them.)"""
    layout = asked.layout
    if what == "zero":
        assume(layout.dp * layout.cp > 1 and layout.zero < 2)
        more = replace(layout, zero=layout.zero + 1)
    elif what == "sequence_parallel":
        assume(layout.tp > 1)
        layout, more = (replace(layout, sequence_parallel=shards) for shards in (False, True))
    elif what == "ep":
        assume(asked.model.layers[0].layer is MOE and layout.dp > 1)
        layout, more = (replace(layout, ep=ep) for ep in (1, layout.dp))
    else:
        more = replace(layout, **{what: 2 * getattr(layout, what)})
        assume(what != "tp" or layout.ep == 1)
    less_bytes, more_bytes = (memory(replace(asked, layout=each)).peak_bytes for each in (layout, more))
    assert more_bytes <= less_bytes * (1 + 1e-9)


def test_buffers_of_nccl_are_reserved_where_there_are_several_gpus() -> None:
    llama, stack, gpu = model("llama-3.2-1b"), training_stack("megatron"), kc.gpu("h100_sxm")
    alone, two = (memory(job(llama, TrainingLayout(dp=dp))) for dp in (1, 2))
    assert (alone.reserved_bytes, two.reserved_bytes) == (1e9, 1e9 + 3e9)
    assert (stack.reserved_bytes, stack.nccl_bytes) == (1e9, 3e9)
    assert alone.fullest.available_bytes == gpu.dram_bytes - 1e9


def test_an_activation_input_in_8_bits_takes_half() -> None:
    """Megatron's activation_func_fp8_input_store: of gate and up, 512 numbers a token in each of four layers."""
    small, formats = architecture((4, DENSE)), precision("bf16")
    narrow = replace(formats, activation_input_bytes=1.0)
    wide, less = (memory(job(small, precision=each)).parts["activations"] for each in (formats, narrow))
    assert wide - less == 4 * 512 * 512


def test_what_eager_activations_keep() -> None:
    """Beside what the next product reads: ReLU nothing, the tanh form of GELU op by op four tensors, else its input."""
    layers = {
        name: Layer(ATTENTION, Dense(256, False, name), Norms("layernorm", 2)) for name in ("gelu", "relu", "gelu_new")
    }
    shape = Sharded(hidden=H, saved=(("relu", 0.0), ("gelu_new", 4.0)))
    gelu, relu, op_by_op = (kept(layer_steps(layer, shape)) for layer in layers.values())
    assert (gelu - relu, op_by_op - gelu) == (2 * 256, 3 * 2 * 256)
    masked = kept(layer_steps(layers["gelu"], replace(shape, masked=True)))
    assert masked - gelu == 2 * H  # a byte a number of each of two dropouts
