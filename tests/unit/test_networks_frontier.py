"""Layers of the newest models: their weights and what they keep of a sequence, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from model_configs import config_of

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment
from kernelcast.inference.memory import cache_bytes, weight_bytes
from kernelcast.models import model
from kernelcast.models.architecture import Parameters, draft_of
from kernelcast.models.config import parse
from kernelcast.models.layers import (
    BlockResiduals,
    BlockSparseAttention,
    CompressedAttention,
    Experts,
    HyperConnections,
    Indexer,
    Kda,
    LatentAttention,
    LinearAttention,
    Mamba2,
    Mlp,
    Parallel,
    SelfAttention,
)
from kernelcast.models.precision import Precision
from kernelcast.stacks import stack

TOKENS = 10_000


def on(name: str, cache: str | None = None, tp: int = 1, weights: str | None = None) -> Deployment:
    arch = model(name)
    return Deployment(arch, kc.gpu("b200_sxm"), stack("vllm"), Precision.of(arch, weights, cache), Layout(tp=tp))


def mixers(name: str) -> list[object]:
    return [layer.attention for layer in model(name).expand()]


def halves(name: str) -> list[Mlp | None]:
    return [layer.mlp for layer in model(name).expand()]


# ---- weights by hand


def test_an_indexer_reads_the_queries_latent() -> None:
    indexer = Indexer(heads=64, head_dim=128, topk=2048)
    queries, keys, scales = 1536 * 64 * 128, 7168 * 128 + 2 * 128, 7168 * 64  # wq_b; wk and its layernorm; weights
    assert indexer.weights(7168, 1536) == queries + keys + scales
    assert indexer.key_bytes == 128 + 4  # fp8 and one fp32 scale
    plain, sparse = (
        LatentAttention(128, 1536, 512, 128, 64, 128),
        LatentAttention(128, 1536, 512, 128, 64, 128, indexer),
    )
    assert sparse.weights(7168) - plain.weights(7168) == queries + keys + scales
    shared = Indexer(64, 128, 2048, shared=True)
    assert (shared.weights(7168, 1536), shared.key_bytes) == (0, 0)
    with pytest.raises(KernelcastError, match="q_lora_rank"):
        LatentAttention(16, None, 512, 128, 64, 128, indexer)


def test_glm_5_2_chooses_keys_in_a_quarter_of_its_layers() -> None:
    own = [m.indexer is not None and not m.indexer.shared for m in mixers("glm-5.2") if isinstance(m, LatentAttention)]
    assert own[:12] == [True, True, True, False, False, False, True, False, False, False, True, False]
    assert (sum(own), len(own)) == (21, 78)
    assert all(m.indexer and not m.indexer.shared for m in mixers("glm-5") if isinstance(m, LatentAttention))
    both = model("glm-5").parameters.total - model("glm-5.2").parameters.total
    assert both == 57 * Indexer(32, 128, 2048).weights(6144, 2048)
    config = {k: v for k, v in config_of("glm-5.2").items() if k != "indexer_types"}  # from the frequency and offset
    assert parse(config).layers == model("glm-5.2").layers


def test_mamba2_by_hand() -> None:
    mixer = Mamba2(heads=128, head_dim=64, groups=8, state=128, conv_width=4, chunk=128)
    inner, conv = 128 * 64, 128 * 64 + 2 * 8 * 128
    assert (mixer.width, mixer.conv_channels, mixer.in_width) == (inner, conv, inner + conv + 128)
    small = conv * 4 + conv + 3 * 128 + inner  # convolution and its bias; A_log, D, dt_bias; the gated norm
    assert mixer.weights(4096) == 4096 * (inner + conv + 128) + small + inner * 4096
    assert mixer.state_values == inner * 128 + conv * 3
    with pytest.raises(KernelcastError, match="12 Mamba heads do not divide over 8 groups"):
        Mamba2(12, 64, 8, 128, 4, 128)


def test_kimi_delta_attention_by_hand() -> None:
    mixer, width = Kda(heads=32, head_dim=128, conv_width=4, gate_rank=128), 4096
    projections = 2304 * (3 * width + 32 + 128 + 128)  # q, k, v; beta; down to the decay's and the gate's rank
    up = 128 * width + 128 * width
    small = 3 * width * 4 + 32 + width + 128  # convolutions; A_log, dt_bias; the norm of a head
    assert mixer.weights(2304) == projections + up + small + width * 2304
    full = Kda(heads=32, head_dim=128, conv_width=4, gate_rank=None)
    assert full.weights(2304) - mixer.weights(2304) == 2304 * (width - 128) - 128 * width
    assert mixer.state_values == 32 * 128 * 128 + 3 * width * 3


def test_compressed_attention_by_hand() -> None:
    window = CompressedAttention(64, 512, 64, 1024, 8, 1024, 128)
    query = 4096 * 1024 + 1024 + 1024 * 64 * 512
    out = 64 * 512 // 8 * 8 * 1024 + 8 * 1024 * 4096  # a block-diagonal product of 8 groups, and one over all
    assert window.weights(4096) == query + 4096 * 512 + 512 + out + 64
    heavy = CompressedAttention(64, 512, 64, 1024, 8, 1024, 128, ratio=128)
    assert heavy.weights(4096) - window.weights(4096) == 2 * 4096 * 512 + 128 * 512 + 512
    chosen = CompressedAttention(64, 512, 64, 1024, 8, 1024, 128, ratio=4, indexer=Indexer(64, 128, 512))
    compressor = 2 * 4096 * 1024 + 4 * 1024 + 512  # windows overlap: twice the columns
    indexer = 2 * 4096 * 256 + 4 * 256 + 128 + 1024 * 64 * 128 + 4096 * 64
    assert chosen.weights(4096) - window.weights(4096) == compressor + indexer


def test_hyper_connections_by_hand() -> None:
    arch = model("deepseek-v4-flash")
    assert arch.residual == HyperConnections(streams=4, sinkhorn_iterations=20)
    one = 24 * 4 * 4096 + 24 + 3  # (2 + 4) x 4 columns over four streams
    assert arch.residual.weights(4096) == one
    assert arch.parameters.norms == 43 * (2 * one + 2 * 4096) + 4096 + 4 * 4 * 4096 + 4 + 1
    assert [m.ratio for m in mixers("deepseek-v4-flash") if isinstance(m, CompressedAttention)][:5] == [0, 0, 4, 128, 4]
    assert [isinstance(b, Experts) and b.hashed for b in halves("deepseek-v4-flash")] == [True] * 3 + [False] * 40


def test_block_sparse_attention_by_hand() -> None:
    dense = SelfAttention(64, 4, 128, qk_norm="head", rotary_dim=64)
    sparse = BlockSparseAttention(dense, index_heads=4, index_dim=128, block=128, topk_blocks=16, local_blocks=1)
    assert sparse.weights(6144) - dense.weights(6144) == 6144 * (4 + 1) * 128 + 2 * 128
    assert [m == sparse for m in mixers("minimax-m3")] == [False] * 3 + [True] * 57


def test_latent_experts_by_hand() -> None:
    block = Experts(512, 22, 2688, gated=False, activation="relu2", shared_inter=5376, router_bias=True, latent=1024)
    assert replace(block, scoring="sigmoid") in halves("nemotron-3-super-120b-a12b")
    always = 4096 * 512 + 512 + 2 * 4096 * 5376 + 2 * 4096 * 1024  # router, shared, down and up
    assert block.weights(4096) == always + 512 * 2 * 1024 * 2688
    assert block.active_weights(4096) == always + 22 * 2 * 1024 * 2688


def test_kimi_k3_is_a_hybrid_with_latent_experts_and_block_residuals() -> None:
    arch = model("kimi-k3")
    kinds = [type(m).__name__ for m in mixers("kimi-k3")]
    assert (kinds.count("Kda"), kinds.count("LatentAttention"), kinds[:4]) == (
        69,
        24,
        ["Kda", "Kda", "Kda", "LatentAttention"],
    )
    assert arch.residual == BlockResiduals(12)
    latent = next(m for m in mixers("kimi-k3") if isinstance(m, LatentAttention))
    assert (latent.rope, latent.output_gate) == (False, True)
    block = halves("kimi-k3")[1]
    assert isinstance(block, Experts)
    assert (block.width(7168), block.latent_norm, block.shared_inter) == (3584, True, 6144)


def test_layers_of_one_half() -> None:
    layers = list(model("nemotron-nano-9b-v2").expand())
    kinds = ["M" if isinstance(a.attention, Mamba2) else "*" if a.attention else "-" for a in layers]
    assert "".join(kinds) == config_of("nemotron-nano-9b-v2")["hybrid_override_pattern"]
    assert all(layer.sublayers == 1 and layer.norms.count == 1 for layer in layers)
    assert not any(m.rope for m in mixers("nemotron-nano-9b-v2") if isinstance(m, SelfAttention))
    both = mixers("falcon-h1-7b")[0]
    assert isinstance(both, Parallel)
    assert both.weights(3072) == both.attention.weights(3072) + both.recurrent.weights(3072)


def test_gemma4_has_wide_heads_without_values_in_its_full_layers() -> None:
    local, full = mixers("gemma-4-31b")[0], mixers("gemma-4-31b")[5]
    assert isinstance(local, SelfAttention) and isinstance(full, SelfAttention)
    assert (local.window, local.head_dim, local.kv_heads) == (1024, 256, 16)
    assert (full.window, full.head_dim, full.kv_heads, full.rotary_dim) == (None, 512, 4, 128)
    # q, k and the output, norms of q and k; no v
    assert full.weights(5376) == 5376 * (32 * 512 + 4 * 512) + 32 * 512 * 5376 + 2 * 512
    assert full.cache_values_per_token == 2 * 4 * 512
    block = halves("gemma-4-26b-a4b")[0]
    assert isinstance(block, Experts)
    assert (block.shared_inter, block.router_scales) == (2112, 2816 + 128)
    assert next(model("gemma-4-26b-a4b").expand()).norms.count == 7


def test_gemma4_layers_may_borrow_keys_and_values() -> None:
    whole = config_of("gemma-4-31b")
    text = whole["text_config"] | {"num_kv_shared_layers": 12, "use_double_wide_mlp": True}
    arch = parse(whole | {"text_config": text})
    layers = list(arch.expand())
    local, wide = layers[0], layers[-2]
    assert local.mlp and wide.mlp and isinstance(wide.attention, SelfAttention)
    assert wide.attention.weights(5376) == 2 * 5376 * 32 * 256 + 256  # q, its norm, and the output
    assert wide.attention.cache_values_per_token == 0
    assert wide.mlp.inter == 2 * local.mlp.inter
    assert arch.parameters.total == 34_396_717_824  # transformers' modelling class has as many


# ---- what a token leaves, by hand


@pytest.mark.parametrize(
    ("name", "cache", "per_token"),
    [
        ("llama-3.1-8b", None, 32 * 2 * 8 * 128 * 2),
        ("deepseek-v3", None, 61 * 576 * 2),
        ("deepseek-v3", "fp8", 61 * 576),
        ("deepseek-v3.2", None, 61 * (576 * 2 + 132)),  # an indexer's key: 128 in fp8 and a scale
        ("deepseek-v3.2", "fp8", 61 * (576 + 132)),
        ("glm-5", None, 78 * (576 * 2 + 132)),
        ("glm-5.2", None, 78 * 576 * 2 + 21 * 132),  # layers that take another's choice keep no keys for it
        ("kimi-k2.5", None, 61 * 576 * 2),
        ("minimax-m2.5", None, 62 * 2 * 8 * 128 * 2),
        ("minimax-m3", None, 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2),
        ("qwen3.5-397b-a17b", None, 15 * 2 * 2 * 256 * 2),  # every fourth layer attends
        ("nemotron-nano-9b-v2", None, 4 * 2 * 8 * 128 * 2),
        ("kimi-linear-48b-a3b", None, 7 * 576 * 2),
        ("falcon-h1-7b", None, 44 * 2 * 2 * 128 * 2),
        ("granite-4.0-h-small", None, 4 * 2 * 8 * 128 * 2),
    ],
)
def test_bytes_of_one_more_token(name: str, cache: str | None, per_token: int) -> None:
    where = on(name, cache)
    assert cache_bytes(where, TOKENS + 1) - cache_bytes(where, TOKENS) == per_token


@pytest.mark.parametrize(
    ("name", "state"),
    [  # matrices in fp32, the convolution's last three inputs in 16 bits
        ("qwen3.5-397b-a17b", 45 * (64 * 128 * 128 * 4 + (2 * 16 * 128 + 64 * 128) * 3 * 2)),
        ("kimi-linear-48b-a3b", 20 * (32 * 128 * 128 * 4 + 3 * 32 * 128 * 3 * 2)),
        ("nemotron-nano-9b-v2", 27 * (128 * 80 * 128 * 4 + (128 * 80 + 2 * 8 * 128) * 3 * 2)),
        ("falcon-h1-7b", 44 * (24 * 128 * 256 * 4 + (3072 + 2 * 256) * 3 * 2)),
    ],
)
def test_bytes_of_states(name: str, state: int) -> None:
    assert cache_bytes(on(name), 0) == state
    assert cache_bytes(on(name, tp=2), 0) == state / 2


def test_windows_and_compressed_keys() -> None:
    where = on("deepseek-v4-flash")  # 2 layers of a window, 21 compress by 4, 20 by 128
    window, whole = 43 * 128 * 512 * 2, 512 * 2
    sums = 21 * 2 * 2 * 4 * 2 * (512 + 128) * 4 + 20 * 2 * 128 * 512 * 4  # fp32; of keys and weights
    few = 21 * (2048 // 4) * (whole + 132) + 20 * (2048 // 128) * whole
    assert cache_bytes(where, 2048) == window + few + sums
    gemma = on("gemma-4-31b")  # 50 layers see 1,024 keys, 10 see all
    assert cache_bytes(gemma, 4096) == 50 * 1024 * 2 * 16 * 256 * 2 + 10 * 4096 * 2 * 4 * 512 * 2
    columns = cache_bytes(where, np.array([0, 2048]))
    assert columns.tolist() == [sums, window + few + sums]


@pytest.mark.parametrize(
    ("name", "weights", "published_bytes"),
    [  # of whole checkpoints, prediction layers included, which weights of a served model leave out
        ("deepseek-v3", None, 685e9 + 4 * 129280 * 7168),  # 671 + 14 billion in fp8 but for two tables at each end
        ("kimi-k2-thinking", None, 594e9),  # as its model card rounds it
        ("kimi-k2.5", None, 594e9 + 2 * 471_143_920),  # and a tower in 16 bits
        ("glm-5", "bf16", 2 * 754e9),  # weights as the hub counts them
        ("glm-5.2", "bf16", 1_506_659_919_872),  # total_size of its index
        ("glm-5-fp8", None, 754e9 + 2 * 154880 * 6144),
    ],
)
def test_checkpoints_weigh_what_is_published(name: str, weights: str | None, published_bytes: float) -> None:
    assert weight_bytes(on(name, weights=weights)) == pytest.approx(published_bytes, rel=0.03)


# ---- prediction layers, towers, formats


def test_a_prediction_layer_is_a_draft() -> None:
    """DeepSeek-V3's checkpoint has 14 billion weights more than the model: the layer, and copies of both ends."""
    draft = draft_of(model("deepseek-v3"))
    last = list(model("deepseek-v3").expand())[-1]
    assert [run.layer for run in draft.layers] == [last]
    joined = 2 * 7168 * 7168
    assert last.attention and last.mlp
    attention, experts = last.attention.weights(7168), last.mlp.weights(7168)
    layer = Parameters(attention=attention, experts=experts, mlp=joined, norms=5 * 7168)
    assert draft.parameters == layer
    assert draft.parameters.total + 2 * 129280 * 7168 == pytest.approx(14e9, rel=0.05)
    assert draft.joins_target
    assert model("deepseek-v3").parameters.total == 671_026_419_200  # not counted, as its makers count
    sparse = draft_of(model("glm-5.2")).layers[0].layer.attention
    assert isinstance(sparse, LatentAttention) and sparse.indexer and not sparse.indexer.shared
    windowed = draft_of(model("deepseek-v4-pro")).layers[0].layer.attention
    assert isinstance(windowed, CompressedAttention) and windowed.ratio == 0
    two = draft_of(model("nemotron-3-super-120b-a12b")).layers
    assert [type(run.layer.attention or run.layer.mlp).__name__ for run in two] == ["SelfAttention", "Experts"]
    assert isinstance(draft_of(model("qwen3.5-9b")).layers[0].layer.attention, SelfAttention)
    with pytest.raises(KernelcastError, match="no layers that predict"):
        draft_of(model("llama-3.1-8b"))


def test_a_tower_by_hand() -> None:
    tower = model("mistral-small-3.2-24b").vision
    assert tower is not None
    layer = 2 * 1024 + 4 * 1024**2 + 3 * 1024 * 4096  # norms, attention, a gated block
    before = 3 * 14 * 14 * 1024 + 1024
    merged = 1024 + 4 * 1024 * 1024  # a norm, and 2 x 2 patches into one
    projected = 1024 * 5120 + 5120 * 5120
    assert tower.weights == 24 * layer + before + merged + projected
    assert (tower.merge, tower.out_hidden, tower.head_dim) == (2, 5120, 64)
    active = model("mistral-small-3.2-24b").active_parameters
    assert active.vision == 0  # a token of text


def test_a_tower_of_another_kind_is_left_out() -> None:
    config = config_of("gemma-4-31b") | {"vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152}}
    assert parse(config).vision is None


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("kimi-k2.5", "bf16, experts int4"),
        ("deepseek-v4-pro", "fp8_block, experts mxfp4"),
        ("deepseek-v4-pro-fp8", "fp8_block"),
        ("kimi-k3", "bf16, experts mxfp4"),
        ("deepseek-r1-nvfp4", "bf16, mlp nvfp4, experts nvfp4"),
        ("qwen3-32b-nvfp4", "nvfp4, KV cache fp8"),
        ("qwen3-235b-a22b-fp8", "fp8_block"),
        ("llama-3.1-8b-fp8", "fp8, KV cache fp8"),
        ("glm-4.7-fp8", "fp8"),
        ("minimax-m2.5", "fp8_block"),
        ("nemotron-3-ultra-550b-a55b-nvfp4", "fp8, mlp bf16, experts nvfp4, KV cache fp8"),
    ],
)
def test_formats_of_published_checkpoints(name: str, label: str) -> None:
    assert Precision.of(model(name)).label == label


def test_a_checkpoint_in_another_format_has_the_layers_of_its_base() -> None:
    assert model("nvidia/DeepSeek-R1-NVFP4").layers == model("deepseek-r1").layers
    assert config_of("deepseek-r1-nvfp4")["_aliases"][0] == "nvidia/DeepSeek-R1-FP4"  # a base's names are its own


def test_a_field_that_hints_at_other_layers_is_told() -> None:
    config = config_of("llama-3.1-8b") | {"ssm_rank": 8, "expert_count": 0, "moe_dropout": 0.1, "image_token_index": 5}
    assert parse(config).unread == ("ssm_rank",)


def test_linear_attention_as_qwen3_5_has_it() -> None:
    mixer = mixers("qwen3.5-397b-a17b")[0]
    assert mixer == LinearAttention(16, 64, 128, 128, 4)
