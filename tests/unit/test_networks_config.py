"""Model configs: every bundled file is read and weighs what its makers publish; a bad one is refused in one line."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kernelcast.errors import KernelcastError
from kernelcast.networks import (
    SUPPORTED,
    Architecture,
    Attention,
    Dense,
    Experts,
    LinearAttention,
    Mla,
    Parameters,
    model,
    model_ids,
    parse,
)
from kernelcast.networks.catalogue import MODELS

IDS = model_ids()
TOLERANCE = 0.01


@functools.cache
def _config(stem: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / f"{stem}.json").read_text(encoding="utf-8"))
    return config


def _attentions(name: str) -> list[Attention]:
    layers = [layer.attention for layer in model(name).expand()]
    return [a for a in layers if isinstance(a, Attention)]


# --- every file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", IDS)
def test_every_file_is_read(stem: str) -> None:
    config, arch = _config(stem), model(stem)
    text = config.get("text_config", config)
    assert stem == stem.lower()
    assert arch.name == stem
    assert arch.layer_count == text.get("num_hidden_layers", text.get("n_layer"))
    assert len(list(arch.expand())) == arch.layer_count
    assert sum(run.count for run in arch.layer_kinds) == arch.layer_count
    assert 0 < arch.active_parameters.total <= arch.parameters.total


@pytest.mark.parametrize("stem", IDS)
def test_parameters_match_what_is_published(stem: str) -> None:
    config, total = _config(stem), model(stem).parameters.total
    if config["_parameters_from"].startswith("exact"):  # counted by machine: no rounding to allow for
        assert total == config["_parameters"]
    assert total == pytest.approx(config["_parameters"], rel=TOLERANCE)


def test_llama4_checkpoints_hold_the_same_image_part() -> None:
    for stem in ("llama-4-scout", "llama-4-maverick"):
        assert _config(stem)["_parameters"] - model(stem).parameters.total == 871_932_416


def test_the_catalogue_is_broad() -> None:
    assert len(IDS) >= 45
    types = {_config(stem)["model_type"] for stem in IDS}
    # gemma3_text is also read on its own (gemma-3-1b); llama4_text only inside llama4
    assert types == set(SUPPORTED) - {"llama4_text"}


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
    ],
)
def test_active_parameters_match_what_is_published(stem: str, active_e9: float) -> None:
    assert model(stem).active_parameters.total == pytest.approx(active_e9 * 1e9, rel=0.03)


def test_gpt_oss_active_parameters_leave_out_the_embedding_on_its_card() -> None:
    for stem, active_e9 in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)):
        active = model(stem).active_parameters
        assert active.total - active.embedding == pytest.approx(active_e9 * 1e9, rel=0.005)


# --- arithmetic by hand ---------------------------------------------------------------------------------------------


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
    mla = Mla(128, 1536, 512, 128, 64, 128)
    query = 7168 * 1536 + 1536 + 1536 * 128 * 192
    key_value = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    assert mla.weights(7168) == query + key_value + 128 * 128 * 7168
    assert mla.cache_values_per_token == 576
    one_step = Mla(16, None, 512, 128, 64, 128)
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


def test_cache_stops_at_the_window() -> None:
    gemma = model("gemma-3-27b")  # 62 layers: 52 see 1024 keys, 10 all
    per_layer = 2 * 16 * 128
    assert gemma.cache_values(500) == 62 * per_layer * 500
    assert gemma.cache_values(8192) == per_layer * (52 * 1024 + 10 * 8192)
    assert model("llama-3.1-8b").cache_values(100) == 32 * 2 * 8 * 128 * 100
    assert model("bert-base").cache_values(100) == 0
    qwen = model("qwen3-next-80b-a3b")
    assert qwen.cache_values(100) == 36 * (32 * 128 * 128 + 8192 * 3) + 12 * 2 * 2 * 256 * 100


# --- layers in order ------------------------------------------------------------------------------------------------


def test_gemma3_has_five_local_layers_to_one_global() -> None:
    arch = model("gemma-3-27b")
    windows = [a.window for a in _attentions("gemma-3-27b")]
    assert windows[:12] == [1024] * 5 + [None] + [1024] * 5 + [None]
    assert windows.count(None) == 10  # 62 = 10 x 6 + 2
    assert [run.count for run in arch.layers] == [5, 1] * 10 + [2]
    assert all(layer.norms.count == 4 for layer in arch.expand())
    assert all(a.qk_norm == "head" for a in _attentions("gemma-3-27b"))


def test_gemma2_alternates_from_a_local_layer() -> None:
    attentions = _attentions("gemma-2-9b")
    assert [a.window for a in attentions] == [4096, None] * 21
    assert all(a.softcap for a in attentions)


def test_gpt_oss_alternates_and_has_sinks() -> None:
    for stem, layers in (("gpt-oss-20b", 24), ("gpt-oss-120b", 36)):
        attentions = _attentions(stem)
        assert [a.window for a in attentions] == [128, None] * (layers // 2)
        assert all(a.sinks and a.qkv_bias and a.out_bias for a in attentions)
    config = dict(_config("gpt-oss-20b"))
    del config["layer_types"]  # the class fills in the same order
    assert parse(config).layers == parse(_config("gpt-oss-20b")).layers


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
    assert isinstance(lite, Mla)
    assert lite.q_lora_rank is None


def test_qwen3_next_has_three_linear_layers_to_one_full() -> None:
    arch = model("qwen3-next-80b-a3b")
    assert [run.count for run in arch.layers] == [3, 1] * 12
    mixers = [layer.attention for layer in arch.expand()]
    assert [isinstance(m, LinearAttention) for m in mixers] == [True, True, True, False] * 12
    full = mixers[3]
    assert isinstance(full, Attention)
    assert (full.output_gate, full.rotary_dim, full.qkv_width) == (True, 64, 2 * 16 * 256 + 2 * 2 * 256)


def test_llama4_chunks_and_interleaves() -> None:
    maverick = model("llama-4-maverick")
    attentions = _attentions("llama-4-maverick")
    assert [a.window for a in attentions] == [8192, 8192, 8192, None] * 12
    assert [a.rope for a in attentions] == [True, True, True, False] * 12
    assert [a.chunked for a in attentions] == [True, True, True, False] * 12
    mlps = [layer.mlp for layer in maverick.expand()]
    assert [isinstance(m, Experts) for m in mlps] == [False, True] * 24
    assert {m.inter for m in mlps if isinstance(m, Dense)} == {16384}
    assert {(m.inter, m.shared_inter, m.topk) for m in mlps if isinstance(m, Experts)} == {(8192, 8192, 1)}
    assert [run.count for run in model("llama-4-scout").layers] == [3, 1] * 12
    assert [a.qk_norm for a in _attentions("llama-4-scout")[:4]] == ["unweighted"] * 3 + ["none"]


def test_llama4_lists_win_over_intervals() -> None:
    text = _config("llama-4-scout")["text_config"] | {"num_hidden_layers": 4}
    config = _config("llama-4-scout") | {"text_config": text | {"no_rope_layers": [0, 1, 1, 1], "moe_layers": [2]}}
    layers = list(parse(config).expand())
    assert [isinstance(layer.mlp, Experts) for layer in layers] == [False, False, True, False]
    rope = [layer.attention.rope for layer in layers if isinstance(layer.attention, Attention)]
    assert rope == [False, True, True, True]


def test_qwen_windows_hold_only_when_switched_on() -> None:
    config = _config("qwen2.5-7b") | {"sliding_window": 4096, "max_window_layers": 20}
    assert [run.count for run in parse(config).layers] == [28]
    runs = parse(config | {"use_sliding_window": True}).layers
    assert [run.count for run in runs] == [20, 8]
    assert isinstance(runs[1].layer.attention, Attention)
    assert runs[1].layer.attention.window == 4096


def test_small_facts_of_families() -> None:
    qwen = _attentions("qwen2.5-7b")[0]
    assert (qwen.qkv_bias, qwen.out_bias, qwen.qk_norm) == (True, False, "none")
    assert _attentions("qwen3-8b")[0].qk_norm == "head"
    assert _attentions("olmoe-1b-7b")[0].qk_norm == "full"
    glm = _attentions("glm-4.5")[0]
    assert (glm.qkv_bias, glm.out_bias, glm.qk_norm, glm.rotary_dim) == (True, False, "head", 64)
    assert _attentions("mistral-7b-v0.1")[0].window == 4096
    assert _attentions("mistral-7b-v0.3")[0].window is None
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


# --- configs that users bring ---------------------------------------------------------------------------------------


def test_a_gemma3_file_as_published_leaves_out_what_its_class_fills_in() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    arch = parse({"model_type": "gemma3", "text_config": text})
    assert arch.parameters == model("gemma-3-4b").parameters
    assert arch.layers == model("gemma-3-4b").layers


def test_an_old_llama_file_has_no_key_value_heads() -> None:
    config = {k: v for k, v in _config("llama-7b").items() if k != "num_key_value_heads"}
    assert parse(config).layers == model("llama-7b").layers


LLAMA = _config("llama-3.1-8b")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 4096}, ("no 'model_type'", "supported: bert, deepseek_v2")),
        (LLAMA | {"model_type": "mamba2"}, ("model_type 'mamba2' is not supported", "supported: bert", "qwen3_next")),
        (LLAMA | {"model_type": "lama"}, ("did you mean llama",)),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, ("'hidden_size'", "is missing", "llama")),
        ({k: v for k, v in LLAMA.items() if k != "hidden_act"}, ("'hidden_act' is missing",)),
        (LLAMA | {"vocab_size": None}, ("'vocab_size' is missing",)),
        (LLAMA | {"num_hidden_layers": 0}, ("'num_hidden_layers' is 0", "at least 1")),
        (LLAMA | {"num_hidden_layers": True}, ("'num_hidden_layers' is True", "whole number")),
        (LLAMA | {"hidden_size": "4096"}, ("'hidden_size' is '4096'", "whole number")),
        (LLAMA | {"attention_bias": 1}, ("'attention_bias' is 1", "true or false")),
        (LLAMA | {"num_attention_heads": 33, "head_dim": 128}, ("33 query heads", "8 key-value heads")),
        (LLAMA | {"num_attention_heads": 33}, ("does not divide over 33 heads",)),
        (LLAMA | {"quantization_config": {"bits": 4}}, ("no 'quant_method'",)),
        (_config("qwen3-8b") | {"head_dim": None}, ("'head_dim' is missing",)),
        (_config("mixtral-8x7b") | {"num_experts_per_tok": 9}, ("9 of 8 experts",)),
        (_config("gpt-oss-20b") | {"num_hidden_layers": 20}, ("'layer_types' has 24 entries", "asks for 20")),
        (_config("gpt-oss-20b") | {"layer_types": ["mamba"] * 24}, ("layer type 'mamba'", "sliding_attention")),
        (_config("opt-1.3b") | {"word_embed_proj_dim": 512}, ("'word_embed_proj_dim' is 512",)),
        (_config("opt-1.3b") | {"do_layer_norm_before": False}, ("'do_layer_norm_before' is false",)),
        (_config("deepseek-v3") | {"attention_bias": True}, ("'attention_bias' is true",)),
        ({k: v for k, v in _config("deepseek-v3").items() if k != "q_lora_rank"}, ("'q_lora_rank'", "or null")),
        (_config("glm-4.5") | {"partial_rotary_factor": 2}, ("'partial_rotary_factor' is 2",)),
        (_config("qwen3-30b-a3b") | {"mlp_only_layers": 3}, ("'mlp_only_layers' is 3",)),
        ({"model_type": "gemma3"}, ("'text_config' is missing",)),
        ([], ("JSON object",)),
    ],
)
def test_a_bad_config_is_refused_in_one_line(config: Mapping[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(KernelcastError) as caught:
        parse(config)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "stem", ["llama-2-7b", "qwen3-30b-a3b", "mistral-7b-v0.1", "deepseek-v3", "gpt2", "opt-1.3b", "bert-base"]
)
def test_no_size_is_guessed(stem: str) -> None:
    """Without any one of its sizes a config is refused, or reads the same (a key that its class does not need)."""
    whole = parse(_config(stem), name="x")
    for key, value in _config(stem).items():
        if isinstance(value, int) and not isinstance(value, bool) and not key.startswith("_"):
            without = {k: v for k, v in _config(stem).items() if k != key}
            try:
                assert parse(without, name="x") == whole
            except KernelcastError as error:
                assert key in str(error)


# --- finding a model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", IDS)
def test_every_official_name_finds_its_file(stem: str) -> None:
    config = _config(stem)
    for name in (stem, stem.upper(), config["_id"], config["_id"].lower(), *config.get("_aliases", ())):
        assert model(name).name == stem
        assert model(name.rpartition("/")[2]).name == stem


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("qwen/qwen3-8b-base", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b-2507"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "qwen3-next-80b-a3b"),
        ("google/gemma-2-27b-it", "gemma-2-27b"),
        ("google/gemma-3-27b-pt", "gemma-3-27b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("zai-org/GLM-4.5-Air-Base", "glm-4.5-air"),
        ("gpt-3", "gpt3-175b"),
    ],
)
def test_tuned_versions_have_the_same_layers(name: str, stem: str) -> None:
    assert model(name).name == stem


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama-3.1-9b", "llama-3.1-8b"),
        ("mistral-7b", "mistral-7b-v0.3"),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),  # other weights in memory: not the same model
        ("someone/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_an_unknown_name_is_refused_with_a_hint(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    with pytest.raises(KernelcastError, match="unknown model") as caught:
        model(name)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA | {"num_hidden_layers": 2}))
    expected: Architecture = model(file)
    assert (expected.name, expected.layer_count) == ("my-model", 2)
    assert model(folder) == model(str(file)) == expected
    other = tmp_path / "small.json"
    other.write_text(file.read_text())
    assert model(other).name == "small"


def test_a_bad_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match=r"no config\.json at"):
        model(tmp_path)
    with pytest.raises(KernelcastError, match=r"no config\.json at"):
        model(tmp_path / "absent.json")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(KernelcastError, match="not readable as JSON"):
        model(broken)
    broken.write_text("[]")
    with pytest.raises(KernelcastError, match="holds a list"):
        model(broken)


def test_the_hugging_face_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    entry = tmp_path / "hub" / "models--someone--Tiny-Llama"
    for commit, layers in (("aaa", 2), ("bbb", 3)):
        snapshot = entry / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("aaa\n")
    found = model("someone/tiny-llama")
    assert (found.name, found.layer_count) == ("someone/tiny-llama", 2)
    (entry / "refs" / "main").write_text("gone")
    assert model("someone/Tiny-Llama").layer_count in (2, 3)  # the newest: equal times are possible
