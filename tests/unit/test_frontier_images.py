"""Images before prompts, spare copies of experts, and exchanges beside other work: by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.inference.batch import Batch
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment, forward
from kernelcast.inference.infer import infer
from kernelcast.inference.memory import weight_bytes
from kernelcast.inference.pass_times import visible_share
from kernelcast.inference.workload import Workload, with_images
from kernelcast.models import model
from kernelcast.models.architecture import vision_encoders
from kernelcast.stacks import stack


def deployed(name: str, engine: str = "vllm", **layout: Any) -> Deployment:
    return Deployment(model(name), kc.gpu("h200_sxm"), stack(engine), layout=Layout(**layout))


def test_an_image_is_patches_and_fewer_tokens() -> None:
    """Gemma 3: 896 pixels, patches of 14, 4 x 4 of them a token, whatever the image's own size."""
    tower = model("gemma-3-4b").vision
    assert tower is not None and tower.tokens(300) == (896 // (14 * 4)) ** 2 == 256
    assert tower.patches(300) == 256 * 16
    ((encoder, sequences, patches),) = vision_encoders(model("gemma-3-4b"), 300)
    assert (sequences, patches, encoder.layer_count) == (1, 4096, tower.layers)


def test_layers_with_a_window_see_it_alone() -> None:
    """Qwen2.5-VL: 32 layers, 4 of which see all; windows of 112 pixels are 8 x 8 patches of 14."""
    (full, _, patches), (local, windows, size) = vision_encoders(model("qwen2.5-vl-7b"), 1008)
    assert (full.layer_count, local.layer_count) == (4, 28)
    assert patches == (1008 // 28) ** 2 * 4 and size == 64 and windows == -(-patches // 64)


def test_the_tower_is_read_before_the_prompt() -> None:
    place, asked = deployed("qwen3-vl-8b"), Workload.equal(2, 100, 4)
    seen = with_images(asked, place, 3, 512)
    tower = place.model.vision
    assert tower is not None and seen.inputs == 2 * (100 + 3 * tower.tokens(512),)
    assert [(one.sequences, one.patches) for one in seen.images] == [(6, tower.patches(512))]
    plain, found = infer(place, replace(seen, images=())), infer(place, seen)
    (share,) = (one for one in found.shares if one.part == "images")
    assert share.phase == "prefill"
    host_s, plain_host_s = (
        sum(one.time_s for one in told.shares if (one.part, one.phase) == ("host", "prefill"))
        for told in (found, plain)
    )
    assert found.ttft_s == pytest.approx(plain.ttft_s + share.time_s + host_s - plain_host_s, rel=1e-3)
    assert found.tpot.value == pytest.approx(plain.tpot.value)
    with pytest.raises(KernelcastError, match=r"llama-3\.1-8b reads no images"):
        with_images(asked, deployed("llama-3.1-8b"), 1, 512)


def test_images_are_dealt_out_to_the_gpus_that_cut_layers() -> None:
    seen = with_images(Workload.equal(3, 100, 4), deployed("qwen3-vl-8b", tp=2), 1, 512)
    assert seen.images[0].sequences == 2  # of three, on the fuller GPU


def test_spare_experts_take_memory_and_level_the_load() -> None:
    plain = deployed("deepseek-v3", "sglang", dp=32, ep=32)
    spare = replace(plain, redundant=32)
    (call,) = (one for one in forward(spare, Batch(64 * (1,), 64 * (1000,))) if one.op == "moe")
    assert (call.arguments["slots"], call.arguments["eplb"]) == (288, True)
    each = model("deepseek-v3").layers[-1].layer.mlp.expert_weights(7168)  # type: ignore[union-attr]
    assert weight_bytes(spare) - weight_bytes(plain) == pytest.approx(58 * 32 * each / 32)  # one byte a weight
    prompts = Workload.equal(256, 2048, 1)
    assert infer(spare, prompts).ttft_s < infer(plain, prompts).ttft_s
    with pytest.raises(KernelcastError, match="ep 32 does not divide 256 experts and 7 redundant ones"):
        replace(plain, redundant=7)
    with pytest.raises(KernelcastError, match=r"redundant experts .* need ep above 1"):
        replace(deployed("llama-3.1-8b"), redundant=4)


def test_what_runs_beside_counts_as_far_as_it_is_not_hidden() -> None:
    # experts hide 3 us in 4, but for DRAM's 0.6; of 12 us of a link 4 + 5 are hidden by all the rest
    assert visible_share("experts", 8e-6, 6e-6, 1.2e-6, 64) == pytest.approx(0.6 / 3)
    assert visible_share("all", 18e-6, 24e-6, 2e-6, 64) == pytest.approx(1 - 9 / 12)
    assert visible_share("experts", 8e-6, 6e-6, 1.2e-6, 257) == 1  # larger steps leave no room


def test_exchanges_are_hidden_where_two_halves_take_turns() -> None:
    plain = deployed("deepseek-v3", "sglang", dp=16, ep=16)
    both = replace(plain, overlap=True, layout=replace(plain.layout, micro_batches=2))
    asked = Workload.equal(512, 2048, 1)

    def sent_s(place: Deployment) -> float:
        return sum(one.time_s for one in infer(place, asked).shares if one.part == "communication")

    assert sent_s(both) < 0.2 * sent_s(plain) and infer(both, asked).ttft_s < infer(plain, asked).ttft_s
    with pytest.raises(KernelcastError, match="two-batch overlap hides the exchange"):
        Deployment(model("deepseek-v3"), kc.gpu("h200_sxm"), stack("sglang"), layout=Layout(tp=8), overlap=True)
