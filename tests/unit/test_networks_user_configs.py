"""Configs that users bring, and models that they name: found, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_configs import config_of

from kernelcast.errors import KernelcastError
from kernelcast.models import Architecture, model, model_ids, parse

LLAMA = config_of("llama-3.1-8b")


# ---- configs


def test_a_gemma3_file_as_published_leaves_out_what_its_class_fills_in() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    arch = parse({"model_type": "gemma3", "text_config": text})
    assert arch.parameters == replace(model("gemma-3-4b").parameters, vision=0)  # no vision_config: the text part
    assert arch.layers == model("gemma-3-4b").layers


def test_an_old_llama_file_has_no_key_value_heads() -> None:
    config = {k: v for k, v in config_of("llama-7b").items() if k != "num_key_value_heads"}
    assert parse(config).layers == model("llama-7b").layers


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 4096}, ("no 'model_type'", "supported: bert, cohere2")),
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
        (config_of("qwen3-8b") | {"head_dim": None}, ("'head_dim' is missing",)),
        (config_of("mixtral-8x7b") | {"num_experts_per_tok": 9}, ("9 of 8 experts",)),
        (
            config_of("gpt-oss-20b") | {"num_hidden_layers": 20},
            ("'layer_types' is a list of 24", "has to be a list of 20"),
        ),
        (config_of("gpt-oss-20b") | {"layer_types": ["mamba"] * 24}, ("layer type 'mamba'", "sliding_attention")),
        (config_of("opt-1.3b") | {"word_embed_proj_dim": 512}, ("'word_embed_proj_dim' is 512",)),
        (config_of("opt-1.3b") | {"do_layer_norm_before": False}, ("'do_layer_norm_before' is false",)),
        (config_of("deepseek-v3") | {"attention_bias": True}, ("'attention_bias' is true",)),
        ({k: v for k, v in config_of("deepseek-v3").items() if k != "q_lora_rank"}, ("'q_lora_rank'", "or null")),
        (config_of("glm-4.5") | {"partial_rotary_factor": 2}, ("'partial_rotary_factor' is 2",)),
        (config_of("qwen3-30b-a3b") | {"mlp_only_layers": 3}, ("'mlp_only_layers' is 3",)),
        ({"model_type": "gemma3"}, ("'text_config' is missing",)),
        (LLAMA | {"hidden_act": "mish"}, ("activation 'mish' is not supported", "silu")),
        (LLAMA | {"rope_scaling": {"rope_type": "spiral", "factor": 2}}, ("rope of type 'spiral'", "yarn")),
        (LLAMA | {"model_type": "lama4"}, ("fields are those of 'llama'", "set model_type to that")),
        (LLAMA | {"model_type": "lama4", "moe_blocks": 4}, ("nearest by its fields is 'llama'", "moe_blocks may mean")),
        ({"model_type": "rwkv", "width": 3}, ("its fields are of no supported type", "cannot be counted")),
        (config_of("minimax-m2") | {"attn_type_list": [0] * 62}, ("'attn_type_list'", "linear attention")),
        (config_of("deepseek-v4-flash") | {"compress_ratios": [8] * 44}, ("'compress_ratios' has 8",)),
        (config_of("deepseek-v4-flash") | {"compress_ratios": [4] * 3}, ("'compress_ratios' has 3 entries", "43")),
        (config_of("glm-5.2") | {"indexer_types": ["full"] * 3}, ("'indexer_types' is a list of 3",)),
        (config_of("glm-5.2") | {"indexer_types": ["half"] * 78}, ("'indexer_types' has layer type 'half'",)),
        (config_of("nemotron-h-8b") | {"hybrid_override_pattern": "MX"}, ("layer type 'X'", "mamba")),
        (config_of("nemotron-h-8b") | {"hybrid_override_pattern": "M*"}, ("has 2 entries", "52")),
        (config_of("kimi-linear-48b-a3b") | {"linear_attn_config": 3}, ("'linear_attn_config' is 3", "object")),
        (
            config_of("gemma-4-31b")
            | {"text_config": config_of("gemma-4-31b")["text_config"] | {"hidden_size_per_layer_input": 256}},
            ("'hidden_size_per_layer_input' is set",),
        ),
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
    "stem",
    [
        "llama-2-7b",
        "qwen3-30b-a3b",
        "mistral-7b-v0.1",
        "deepseek-v3",
        "gpt2",
        "opt-1.3b",
        "bert-base",
        "glm-5",
        "deepseek-v4-flash",
        "minimax-m2",
        "nemotron-3-nano-30b-a3b",
        "falcon-h1-7b",
        "granite-4.0-h-small",
    ],
)
def test_no_size_is_guessed(stem: str) -> None:
    """Without any one of its sizes a config is refused, or reads the same (a key that its class does not need)."""
    whole = parse(config_of(stem), name="x")
    for key, value in config_of(stem).items():
        if key == "num_nextn_predict_layers":  # no key: no such layers
            continue
        if isinstance(value, int) and not isinstance(value, bool) and not key.startswith("_"):
            without = {k: v for k, v in config_of(stem).items() if k != key}
            try:
                assert parse(without, name="x") == whole
            except KernelcastError as error:
                assert key in str(error)


# ---- finding a model


@pytest.mark.parametrize("stem", model_ids())
def test_every_official_name_finds_its_file(stem: str) -> None:
    config = config_of(stem)
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
        ("zhipuai/GLM-5", "glm-5"),
        ("nvidia/DeepSeek-R1-NVFP4", "deepseek-r1-nvfp4"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b-fp8"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b-fp8"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "llama-3.3-70b-nvfp4"),
        ("Qwen/Qwen3-VL-8B-Thinking", "qwen3-vl-8b"),
    ],
)
def test_tuned_versions_have_the_same_layers(name: str, stem: str) -> None:
    assert model(name).name == stem


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama-3.1-9b", "llama-3.1-8b"),
        ("mistral-7b", "mistral-7b-v0.3"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", "Qwen/Qwen2.5-7B"),  # attention in chunks
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
