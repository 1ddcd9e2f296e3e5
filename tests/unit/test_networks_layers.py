"""What each family's config says of its layers: their order, windows, experts and small facts."""

from __future__ import annotations

from model_configs import attentions_of, config_of

from kernelcast.models import model, parse
from kernelcast.models.layers import Dense, Experts, LatentAttention, LinearAttention, SelfAttention


def test_gemma3_has_five_local_layers_to_one_global() -> None:
    arch = model("gemma-3-27b")
    windows = [a.window for a in attentions_of("gemma-3-27b")]
    assert windows[:12] == [1024] * 5 + [None] + [1024] * 5 + [None]
    assert windows.count(None) == 10  # 62 = 10 x 6 + 2
    assert [run.count for run in arch.layers] == [5, 1] * 10 + [2]
    assert all(layer.norms.count == 4 for layer in arch.expand())
    assert all(a.qk_norm == "head" for a in attentions_of("gemma-3-27b"))


def test_gemma2_alternates_from_a_local_layer() -> None:
    attentions = attentions_of("gemma-2-9b")
    assert [a.window for a in attentions] == [4096, None] * 21
    assert all(a.softcap for a in attentions)


def test_gpt_oss_alternates_and_has_sinks() -> None:
    for stem, layers in (("gpt-oss-20b", 24), ("gpt-oss-120b", 36)):
        attentions = attentions_of(stem)
        assert [a.window for a in attentions] == [128, None] * (layers // 2)
        assert all(a.sinks and a.qkv_bias and a.out_bias for a in attentions)
    config = dict(config_of("gpt-oss-20b"))
    del config["layer_types"]  # the class fills in the same order
    assert parse(config).layers == parse(config_of("gpt-oss-20b")).layers


def test_deepseek_starts_dense() -> None:
    for stem, dense, layers in (("deepseek-v3", 3, 61), ("deepseek-v2", 1, 60), ("kimi-k2", 1, 61), ("glm-4.5", 3, 92)):
        first, rest = model(stem).layers
        assert (first.count, rest.count) == (dense, layers - dense)
        assert isinstance(first.layer.mlp, Dense)
        assert isinstance(rest.layer.mlp, Experts)
    mlp = model("deepseek-v2").layers[1].layer.mlp
    assert isinstance(mlp, Experts)
    assert (mlp.experts, mlp.topk, mlp.inter, mlp.shared_inter, mlp.router_bias) == (160, 6, 1536, 2 * 1536, False)
    lite = model("deepseek-v2-lite").layers[0].layer.attention
    assert isinstance(lite, LatentAttention)
    assert lite.q_lora_rank is None


def test_qwen3_next_has_three_linear_layers_to_one_full() -> None:
    arch = model("qwen3-next-80b-a3b")
    assert [run.count for run in arch.layers] == [3, 1] * 12
    mixers = [layer.attention for layer in arch.expand()]
    assert [isinstance(m, LinearAttention) for m in mixers] == [True, True, True, False] * 12
    full = mixers[3]
    assert isinstance(full, SelfAttention)
    assert (full.output_gate, full.rotary_dim, full.qkv_width) == (True, 64, 2 * 16 * 256 + 2 * 2 * 256)


def test_llama4_chunks_and_interleaves() -> None:
    maverick = model("llama-4-maverick")
    attentions = attentions_of("llama-4-maverick")
    assert [a.window for a in attentions] == [8192, 8192, 8192, None] * 12
    assert [a.rope for a in attentions] == [True, True, True, False] * 12
    assert [a.chunked for a in attentions] == [True, True, True, False] * 12
    mlps = [layer.mlp for layer in maverick.expand()]
    assert [isinstance(m, Experts) for m in mlps] == [False, True] * 24
    assert {m.inter for m in mlps if isinstance(m, Dense)} == {16384}
    assert {(m.inter, m.shared_inter, m.topk) for m in mlps if isinstance(m, Experts)} == {(8192, 8192, 1)}
    assert [run.count for run in model("llama-4-scout").layers] == [3, 1] * 12
    assert [a.qk_norm for a in attentions_of("llama-4-scout")[:4]] == ["unweighted"] * 3 + ["none"]


def test_llama4_lists_win_over_intervals() -> None:
    text = config_of("llama-4-scout")["text_config"] | {"num_hidden_layers": 4}
    config = config_of("llama-4-scout") | {"text_config": text | {"no_rope_layers": [0, 1, 1, 1], "moe_layers": [2]}}
    layers = list(parse(config).expand())
    assert [isinstance(layer.mlp, Experts) for layer in layers] == [False, False, True, False]
    rope = [layer.attention.rope for layer in layers if isinstance(layer.attention, SelfAttention)]
    assert rope == [False, True, True, True]


def test_qwen_windows_hold_only_when_switched_on() -> None:
    config = config_of("qwen2.5-7b") | {"sliding_window": 4096, "max_window_layers": 20}
    assert [run.count for run in parse(config).layers] == [28]
    runs = parse(config | {"use_sliding_window": True}).layers
    assert [run.count for run in runs] == [20, 8]
    assert isinstance(runs[1].layer.attention, SelfAttention)
    assert runs[1].layer.attention.window == 4096


def test_small_facts_of_families() -> None:
    qwen = attentions_of("qwen2.5-7b")[0]
    assert (qwen.qkv_bias, qwen.out_bias, qwen.qk_norm) == (True, False, "none")
    assert attentions_of("qwen3-8b")[0].qk_norm == "head"
    assert attentions_of("olmoe-1b-7b")[0].qk_norm == "full"
    glm = attentions_of("glm-4.5")[0]
    assert (glm.qkv_bias, glm.out_bias, glm.qk_norm, glm.rotary_dim) == (True, False, "head", 64)
    assert attentions_of("mistral-7b-v0.1")[0].window == 4096
    assert attentions_of("mistral-7b-v0.3")[0].window is None
    bert = model("bert-base")
    assert (bert.kind, bert.head, bert.token_types, bert.learned_positions) == ("encoder", "pooler", 2, 512)
    assert model("opt-125m").learned_positions == 2050


def test_quantised_checkpoints_say_so() -> None:
    v3, oss = model("deepseek-v3").quantization, model("gpt-oss-120b").quantization
    assert v3 is not None
    assert (v3.method, v3.weight_block) == ("fp8", (128, 128))
    assert oss is not None
    assert oss.method == "mxfp4"
    assert "lm_head" in oss.not_converted
    assert model("llama-3.1-8b").quantization is None
