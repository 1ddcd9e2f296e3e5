"""Every bundled config is read and weighs what its makers publish; a few by hand."""

from __future__ import annotations

import pytest
from model_configs import config_of

from kernelcast.models import SUPPORTED, model, model_ids
from kernelcast.models.architecture import Parameters
from kernelcast.models.layers import Experts, LatentAttention, LinearAttention

IDS = model_ids()
TOLERANCE = 0.01


# ---- every file


@pytest.mark.parametrize("stem", IDS)
def test_every_file_is_read(stem: str) -> None:
    config, arch = config_of(stem), model(stem)
    text = config.get("text_config", config)
    assert stem == stem.lower()
    assert arch.name == stem
    assert arch.layer_count == text.get("num_hidden_layers", text.get("n_layer"))
    assert len(list(arch.expand())) == arch.layer_count
    assert sum(run.count for run in arch.distinct_layers) == arch.layer_count
    assert 0 < arch.active_parameters.total <= arch.parameters.total


@pytest.mark.parametrize("stem", IDS)
def test_parameters_match_what_is_published(stem: str) -> None:
    config, total = config_of(stem), model(stem).parameters.total
    if config["_parameters_from"].startswith("exact"):  # counted by machine: no rounding to allow for
        assert total == config["_parameters"]
    assert total == pytest.approx(config["_parameters"], rel=TOLERANCE)


def test_llama4_checkpoints_hold_the_same_image_part() -> None:
    for stem in ("llama-4-scout", "llama-4-maverick"):
        assert model(stem).parameters.vision == 871_932_416


@pytest.mark.parametrize("stem", IDS)
def test_every_field_that_may_mean_other_layers_is_read(stem: str) -> None:
    assert model(stem).unread == ()


def test_the_catalogue_is_broad() -> None:
    assert len(IDS) >= 128
    types = {config_of(stem)["model_type"] for stem in IDS}
    inside = {config_of(stem).get("text_config", {}).get("model_type") for stem in IDS}
    assert set(SUPPORTED) - types - inside == {"mistral4"}


@pytest.mark.parametrize(
    ("stem", "active_e9"),
    [  # as the model cards and papers give them
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39.0),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22.0),
        ("qwen3-coder-480b-a35b", 35.0),
        ("qwen2-57b-a14b", 14.0),
        ("qwen1.5-moe-a2.7b", 2.7),
        ("deepseek-v2", 21.0),
        ("deepseek-v3", 37.0),
        ("kimi-k2", 32.0),
        ("olmoe-1b-7b", 1.3),
        ("llama-4-scout", 17.0),
        ("llama-4-maverick", 17.0),
        ("minimax-m3", 26.0),
        ("deepseek-v4-pro", 49.0),
        ("qwen3.5-122b-a10b", 10.0),
        ("qwen3.5-397b-a17b", 17.0),
        ("kimi-k3", 104.0),
        ("nemotron-3-nano-30b-a3b", 3.6),
        ("nemotron-3-ultra-550b-a55b", 55.0),
        ("hunyuan-a13b", 13.0),
        ("dots.llm1", 14.0),
        ("ernie-4.5-300b-a47b", 47.0),
        ("gemma-4-26b-a4b", 3.8),
    ],
)
def test_active_parameters_match_what_is_published(stem: str, active_e9: float) -> None:
    assert model(stem).active_parameters.total == pytest.approx(active_e9 * 1e9, rel=0.03)


def test_gpt_oss_active_parameters_leave_out_the_embedding_on_its_card() -> None:
    for stem, active_e9 in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)):
        active = model(stem).active_parameters
        assert active.total - active.embedding == pytest.approx(active_e9 * 1e9, rel=0.005)


# ---- arithmetic by hand


def test_llama_by_hand() -> None:
    p = model("llama-3.1-8b").parameters
    assert p == Parameters(
        embedding=128256 * 4096,
        attention=32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096),
        mlp=32 * 3 * 4096 * 14336,
        norms=(2 * 32 + 1) * 4096,
        head=128256 * 4096,
    )
    assert p.total == 8_030_261_248


def test_mla_by_hand() -> None:
    mla = LatentAttention(128, 1536, 512, 128, 64, 128)
    query = 7168 * 1536 + 1536 + 1536 * 128 * 192
    key_value = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    assert mla.weights(7168) == query + key_value + 128 * 128 * 7168
    assert mla.cache_values_per_token == 576
    one_step = LatentAttention(16, None, 512, 128, 64, 128)
    assert one_step.weights(2048) == 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048


def test_linear_attention_by_hand() -> None:
    linear = LinearAttention(key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128, conv_width=4)
    projections = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048  # q, k; v, z; beta, alpha; out
    conv = (2 * 2048 + 4096) * 4
    assert linear.weights(2048) == projections + conv + 2 * 32 + 128
    assert linear.state_values == 32 * 128 * 128 + 8192 * 3
    assert linear.cache_values_per_token == 0


def test_experts_by_hand() -> None:
    experts = Experts(8, 2, inter=100, gated=True, activation="silu", shared_inter=50, shared_gate=True, bias=True,
                      router_bias=True)  # fmt: skip
    one = 3 * 10 * 100 + 2 * 100 + 10
    always = 10 * 8 + 8 + 3 * 10 * 50 + 10
    assert experts.weights(10) == 8 * one + always
    assert experts.active_weights(10) == 2 * one + always


def test_gpt2_by_hand() -> None:
    p = model("gpt2").parameters
    assert p.embedding == (50257 + 1024) * 768
    assert p.attention == 12 * (768 * 4 * 768 + 4 * 768)
    assert p.mlp == 12 * (2 * 768 * 3072 + 3072 + 768)
    assert p.norms == (2 * 12 + 1) * 2 * 768
    assert p.head == 0  # tied


def test_parts_add() -> None:
    a = Parameters(1, 2, 3, 4, 5, 6)
    assert (a + a * 2).total == 3 * 21
