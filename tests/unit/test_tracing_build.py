"""What a name, a config or a file becomes: the class, its inputs, its format; and what people do to models first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelcast.app.cli import main
from kernelcast.app.questions.trace import trace_step
from kernelcast.errors import KernelcastError
from kernelcast.models.catalogue import bundled
from kernelcast.tracing import trace
from kernelcast.tracing.aten.table import model_flops, op_flops
from kernelcast.tracing.build import BuiltModel, TraceRequest, build
from kernelcast.tracing.traced import Trace

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 99,
      "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
BART = {"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99,
        "max_position_embeddings": 64}  # fmt: skip
WHISPER = {**BART, "model_type": "whisper", "num_mel_bins": 20, "max_source_positions": 30, "max_target_positions": 16,
           "pad_token_id": 1, "decoder_start_token_id": 2}  # fmt: skip
SWITCH = {**T5, "model_type": "switch_transformers", "num_experts": 4, "num_sparse_encoder_layers": 1,
          "num_sparse_decoder_layers": 1, "expert_capacity": 64}  # fmt: skip
VIT = {**SMALL, "model_type": "vit", "image_size": 32, "patch_size": 8}
WAV2VEC2 = {**SMALL, "model_type": "wav2vec2", "conv_dim": [16, 16], "conv_kernel": [10, 8], "conv_stride": [5, 4],
            "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}  # fmt: skip
DEBERTA = {**SMALL, "model_type": "deberta-v2", "relative_attention": True, "max_relative_positions": 16,
           "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "pad_token_id": 0}  # fmt: skip
CLIP = {"model_type": "clip", "text_config": {**SMALL, "max_position_embeddings": 16},
        "vision_config": {**SMALL, "image_size": 32, "patch_size": 8}, "projection_dim": 16}  # fmt: skip
SWIN = {"model_type": "swin", "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2],
        "window_size": 4}  # fmt: skip
CONVNEXT = {"model_type": "convnext", "depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "image_size": 32}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
DETR = {"model_type": "detr", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 5,
        "use_timm_backbone": False, "backbone_config": {**RESNET, "out_features": ["stage2"]}}  # fmt: skip
SEGFORMER = {"model_type": "segformer", "hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2,
             "num_attention_heads": [1, 2], "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2],
             "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "image_size": 32}  # fmt: skip


def config(folder: Path, raw: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return str(path)


def run(built: BuiltModel, mode: Any) -> Trace:
    return trace(built.model, built.inputs, mode, precision=built.precision, loss=built.loss, name=built.name)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("raw", "architecture", "name", "inputs"),
    [
        (T5, "T5ForConditionalGeneration", "T5ForConditionalGeneration", {"input_ids": [2, 8]}),
        (T5, None, "T5ForConditionalGeneration", {"input_ids": [2, 8]}),
        (T5, "T5EncoderModel", "T5EncoderModel", {"input_ids": [2, 8]}),
        (SWITCH, "SwitchTransformersForConditionalGeneration", None, {"input_ids": [2, 8]}),
        (BART, None, "BartForConditionalGeneration", {"input_ids": [2, 8]}),
        (BART, "BartForSequenceClassification", None, {"input_ids": [2, 8]}),
        (WHISPER, None, "WhisperForConditionalGeneration", {"input_features": [2, 20, 60]}),
        (VIT, None, "ViTForImageClassification", {"pixel_values": [2, 3, 32, 32]}),
        (SWIN, "SwinForImageClassification", None, {"pixel_values": [2, 3, 32, 32]}),
        (CONVNEXT, None, "ConvNextForImageClassification", {"pixel_values": [2, 3, 32, 32]}),
        (SEGFORMER, "SegformerForSemanticSegmentation", None, {"pixel_values": [2, 3, 32, 32]}),
        (CLIP, "CLIPModel", None, {"input_ids": [2, 8], "pixel_values": [2, 3, 32, 32]}),
        (WAV2VEC2, "Wav2Vec2ForCTC", None, {}),
        ({**WAV2VEC2, "model_type": "hubert"}, "HubertForCTC", None, {}),
        ({**SMALL, "model_type": "bert"}, "BertModel", "BertModel", {"input_ids": [2, 8]}),
        ({**SMALL, "model_type": "bert"}, None, "BertForMaskedLM", {"input_ids": [2, 8]}),
        ({**SMALL, "model_type": "bert"}, "BertForSequenceClassification", None, {"input_ids": [2, 8]}),
        ({**SMALL, "model_type": "bert"}, "BertForQuestionAnswering", None, {"input_ids": [2, 8]}),
        ({**SMALL, "model_type": "bert"}, "BertForMultipleChoice", None, {"input_ids": [2, 2, 8]}),
        (DEBERTA, "DebertaV2ForMaskedLM", None, {"input_ids": [2, 8]}),
        ({**SMALL, "model_type": "llama"}, "LlamaForSequenceClassification", None, {"input_ids": [2, 8]}),
        ({**SMALL, "model_type": "llama"}, "NobodyKnowsThisClass", "LlamaForCausalLM", {"input_ids": [2, 8]}),
    ],
)
def test_a_config_is_built_by_its_architecture(
    tmp_path: Path, raw: dict[str, Any], architecture: str | None, name: str | None, inputs: dict[str, Any], mode: Any
) -> None:
    given = {**raw, "architectures": [architecture]} if architecture else raw
    sound = raw["model_type"] in ("wav2vec2", "hubert")
    built = build(TraceRequest(config(tmp_path, given), batch=2, seq=4000 if sound else 8, mode=mode))
    assert built.summary["class"] == (name or architecture)
    assert built.summary["inputs"].items() >= ({"input_values": [2, 4000]} if sound else inputs).items()
    found = run(built, mode)
    assert len(found.ops) > 20
    if mode == "training":
        assert found.gradients
        assert built.precision == "mixed"


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_detr_traces_with_its_masks_and_its_checks_of_finite_numbers(tmp_path: Path, mode: Any) -> None:
    raw = {**DETR, "architectures": ["DetrForObjectDetection"]}
    built = build(TraceRequest(config(tmp_path, raw), mode=mode, image=64))
    assert built.summary["inputs"] == {"pixel_values": [1, 3, 64, 64]}
    assert len(run(built, mode).ops) > 100


def test_without_timm_transformers_own_resnet_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else plain(name))
    raw = {**DETR, "architectures": ["DetrModel"], "use_timm_backbone": True, "backbone": "resnet18"}
    del raw["backbone_config"]
    built = build(TraceRequest(config(tmp_path, raw), image=64))
    assert built.summary["notes"] == ["timm is not installed: transformers' own ResNet stands in for its resnet18"]


def test_cache_and_logits_are_as_asked_and_told(tmp_path: Path) -> None:
    path = config(tmp_path, {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})

    def last(**asked: Any) -> tuple[dict[str, Any], tuple[int, ...], int]:
        built = build(TraceRequest(path, seq=8, **asked))
        found = run(built, asked.get("mode", "inference"))
        head = next(op for op in found.ops if op.module == "lm_head" and op.op_type == "kernel")
        kept = sum(op.name == "cat" and op.module.endswith("self_attn") for op in found.ops)
        return built.summary, head.outputs[0].shape[-2:], kept

    told, shape, kept = last()
    assert (told["logits"], told["cache"], shape) == ("last", False, (1, 99))
    told, shape, _ = last(logits="all")
    assert (told["logits"], shape) == ("all", (8, 99))
    told, _, more = last(cache=True)
    assert told["cache"] is True
    assert more == kept + 2  # keys and values are put behind those of the cache
    assert last(mode="training")[0]["logits"] == "all"
    bert = tmp_path / "bert"
    bert.mkdir()
    with pytest.raises(KernelcastError, match="logits last: BertForMaskedLM gives all, or none"):
        build(TraceRequest(config(bert, {**SMALL, "model_type": "bert"}), logits="last"))


@pytest.mark.parametrize(
    ("said", "asked", "mode", "format_", "why", "precision"),
    [
        (None, None, "inference", "bf16", "bf16 where the config says nothing", "pure"),
        ("float16", None, "training", "fp16", "fp16 as the config says", "mixed"),
        ("float32", None, "training", "fp32", "fp32 as the config says", "pure"),
        ("float32", "bf16", "training", "bf16", "bf16 as given", "mixed"),
    ],
)
def test_a_config_is_traced_in_its_own_format_unless_asked(
    tmp_path: Path, said: str | None, asked: str | None, mode: str, format_: str, why: str, precision: str
) -> None:
    raw = {**SMALL, "model_type": "llama", **({"torch_dtype": said} if said else {})}
    built = build(TraceRequest(config(tmp_path, raw), seq=8, dtype=asked, mode=mode))
    assert (built.summary["dtype"], built.summary["dtype_why"], built.precision) == (format_, why, precision)
    assert {str(x.dtype)[6:] for x in built.model.parameters()} == {{"bf16": "bfloat16", "fp16": "float16"}.get(
        format_, "float32")}  # fmt: skip


def test_a_sequence_longer_than_the_model_is_refused_and_left_out_is_its_longest(tmp_path: Path) -> None:
    path = config(tmp_path, {**SMALL, "model_type": "bert", "max_position_embeddings": 64})
    with pytest.raises(KernelcastError, match="seq 65 exceeds the 64 positions"):
        build(TraceRequest(path, seq=65))
    assert build(TraceRequest(path)).summary["inputs"]["input_ids"] == [1, 64]


def test_rotary_positions_go_on_behind_those_of_the_config(tmp_path: Path) -> None:
    path = config(tmp_path, {**LLAMA, "max_position_embeddings": 64})
    built = build(TraceRequest(path, seq=128, mode="training"))
    assert built.summary["inputs"]["input_ids"] == [1, 128]
    assert built.summary["notes"] == [
        "128 tokens are more than the 64 that the config names: its rotary positions go on"
    ]
    assert run(built, "training").tokens == 128


# ---- files ----

HEAD = "import torch\nfrom torch import nn\n"


def file(folder: Path, text: str) -> str:
    path = folder / "model.py"
    path.write_text(HEAD + text)
    return f"{path}:build"


def test_a_model_of_ones_own_keeps_its_format_unless_asked(tmp_path: Path) -> None:
    path = file(tmp_path, "def build(batch):\n    return nn.Linear(4, 4).half(), torch.randn(batch, 4).half()\n")
    own, asked = build(TraceRequest(path, mode="training")), build(TraceRequest(path, dtype="bf16"))
    assert own.summary["dtype_why"] == "in the model's own fp16"
    assert own.precision == "pure"
    assert asked.summary["dtype_why"] == "converted to bf16"
    assert asked.inputs.dtype == asked.model.weight.dtype == torch.bfloat16
    wide = build(TraceRequest(path, mode="training", precision="autocast"))
    assert wide.model.weight.dtype == wide.inputs.dtype == torch.float32


@pytest.mark.parametrize(
    ("text", "conv"),
    [
        (  # channels last stays through convolution, norm and pooling
            "def build(batch):\n    m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2), "
            "nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)\n"
            "    return m, torch.randn(batch, 3, 16, 16).to(memory_format=torch.channels_last)\n",
            True,
        ),
        ("def build():\n    return nn.Linear(4, 4).cuda(), torch.randn(2, 4).to('cuda:0')\n", False),
        ("def build():\n    return torch.compile(nn.Linear(4, 4)), torch.randn(2, 4)\n", False),
        ("def build():\n    return nn.DataParallel(nn.Linear(4, 4)), torch.randn(2, 4)\n", False),
        ("def build():\n    return nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(4)), torch.randn(2, 4)\n", False),
        (  # lengths that the function draws are what the model asks for
            "class M(nn.Module):\n    def forward(self, x, n):\n        return x[:, : int(n.max())] * 2\n"
            "def build():\n    return M(), (torch.randn(2, 9), torch.randint(1, 9, (2,)))\n",
            False,
        ),
    ],
)
def test_what_people_do_to_a_model_first(tmp_path: Path, text: str, conv: bool) -> None:
    found = run(build(TraceRequest(file(tmp_path, text))), "inference")
    assert found.kernels
    if conv:
        outs = [
            op.outputs[0]
            for op in found.ops
            if op.name in ("convolution", "native_batch_norm", "max_pool2d_with_indices")
        ]
        assert [out.stride[1] for out in outs] == [1] * 4


def test_torchvisions_models_import_and_trace(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    text = (
        "import torchvision\ndef build():\n    return torchvision.models.regnet_y_400mf(), torch.randn(1, 3, 64, 64)\n"
    )
    built = build(TraceRequest(file(tmp_path, text)))
    assert built.summary["class"] == "RegNet"
    assert sum(op.name == "convolution" for op in run(built, "inference").ops) > 50


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        ("def build():\n    return nope\n", 4, "fails: NameError"),
        ("import nothing_of_that_name\n", 3, "does not import: ModuleNotFoundError"),
        (
            "class M(nn.Module):\n    def forward(self, x):\n        return x if x.sum() > 0 else -x\n"
            "def build():\n    return M(), torch.randn(4)\n",
            5,
            "needs the value of a tensor",
        ),
        (
            "def build():\n    return nn.Sequential(nn.LazyLinear(4), nn.Linear(5, 5)), torch.randn(2, 4)\n",
            None,
            "the pass that gives lazy modules their sizes fails",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(tmp_path: Path, text: str, line: int | None, error: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(KernelcastError, match=error) as caught:
        run(build(TraceRequest(path)), "inference")
    if line:
        assert str(caught.value).startswith(f"{path.removesuffix(':build')}:{line}: ")
    assert "\n" not in str(caught.value)


def test_lazy_modules_given_as_they_are_say_what_to_do() -> None:
    with pytest.raises(KernelcastError, match="LazyLinear has no sizes yet: run the model once before tracing"):
        trace(torch.nn.LazyLinear(4), torch.randn(2, 4))


def test_autocast_is_seen_inside_attention_of_torch_nn() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return self.attention(x, x, x, need_weights=False)[0]

    found = trace(Model(), torch.randn(2, 4, 16), "training")
    products = [op for op in found.ops if op.name in ("mm", "bmm", "addmm") or "scaled_dot" in op.name]
    assert len(products) >= 6
    assert {op.inputs[0].dtype for op in products} == {"bf16"}


LLAMA = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "tf32", None])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_autocast_of_weights_in_fp32_is_on(dtype: str | None, mode: str, tmp_path: Path) -> None:
    found = trace_step(
        TraceRequest(config(tmp_path, VIT), 2, dtype=dtype, mode=mode, precision="autocast"), "adamw", 1, "fused", False
    )
    products = [op for op in found.kernels if op.name in ("mm", "addmm", "convolution") or "scaled_dot" in op.name]
    assert {op.inputs[0].dtype for op in products} == {"bf16"}
    assert found.built["autocast"] == "bf16" and found.built["dtype"] == "fp32"
    with pytest.raises(KernelcastError, match="runs products in bf16 or fp16, not fp32"):
        trace(torch.nn.Linear(4, 4), torch.randn(2, 4), precision="autocast", dtype="fp32")


def test_a_module_s_name_is_corrected_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    with pytest.raises(KernelcastError, match=r"give the file, as in .*net\.py:build"):
        build(TraceRequest(f"{tmp_path}/net:build"))


def test_checkpointing_is_of_a_function_s_model_too(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"""
import transformers
def build(batch, seq):
    return transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**{LLAMA}))
""")

    def found(what: str, checkpointing: bool) -> Trace:
        return run(build(TraceRequest(what, 2, 16, mode="training", checkpointing=checkpointing)), "training")

    plain, again = (found(f"{path}:build", checkpointing) for checkpointing in (False, True))
    assert not any(op.recomputed for op in plain.ops)
    # the layer's forward pass, once more: it is not the model's work, so that MFU does not count it
    assert {op.module.split(".")[1] for op in again.ops if op.recomputed} == {"layers"}
    assert again.footprint.activations < plain.footprint.activations
    flops = [[sum(count(op) for op in each.kernels) for each in (plain, again)] for count in (model_flops, op_flops)]
    assert flops[0][0] == flops[0][1] and flops[1][0] < flops[1][1]


@pytest.mark.parametrize("raw", [{**SMALL, "model_type": "bert"}, LLAMA], ids=["bert", "llama"])
def test_a_graph_replays_the_kernels_of_attention_that_run_eagerly(raw: dict[str, Any], tmp_path: Path) -> None:
    request = TraceRequest(config(tmp_path, raw), 2, 16)
    eager, graph = (trace_step(request, "adamw", 1, "fused", graph) for graph in (False, True))
    assert [op.name for op in graph.kernels] == [op.name for op in eager.kernels]
    assert not eager.notes and any("while a stream is captured" in note for note in graph.notes)
    # what transformers does where a program captures it as it is: a mask, and for BERT no fused attention
    built = build(request)
    captured = trace(built.model, built.inputs, graph=True)
    assert any("captured as it is" in note for note in captured.notes)
    assert len(captured.kernels) > len(eager.kernels)


def test_a_type_without_code_is_built_as_the_class_that_it_names(tmp_path: Path) -> None:
    """Kimi-K2's model_type is kimi_k2, which transformers does not have; its architecture is DeepSeek-V3's."""
    raw = bundled("kimi-k2") | SMALL
    small = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
             "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 2, "n_group": 1,
             "topk_group": 1}  # fmt: skip
    built = build(TraceRequest(config(tmp_path, raw | small), 1, 16))
    assert type(built.model).__name__ == "DeepseekV3ForCausalLM"
    assert "model_type kimi_k2: built as DeepseekV3ForCausalLM" in str(built.summary)
    assert run(built, "training").gradients
    with pytest.raises(KernelcastError, match="transformers does not build"):
        build(TraceRequest(config(tmp_path, {**raw, "architectures": ["NoSuchModel"]}), 1, 16))


def test_the_command_tells_what_was_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    main(["trace", path, "--gpu", "h200_sxm", "--mode", "training", "--seq", "16", "--json"])
    told = json.loads(capsys.readouterr().out)["built"]
    assert told["class"] == "LlamaForCausalLM"
    assert told["inputs"] == {"input_ids": [1, 16], "labels": [1, 16], "use_cache": False}
    assert told["precision"] == "mixed"
    main(["trace", path, "--gpu", "h200_sxm", "--seq", "16", "--cache"])
    text = " ".join(capsys.readouterr().out.split())
    assert "LlamaForCausalLM on input_ids 1x16; with a cache; the last logits" in text
    assert "weights bf16 where the config says nothing" in text


def test_the_command_cuts_by_a_plan_and_lists_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {**SMALL, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "model_type": "llama"}
    path = config(tmp_path, {**raw, "architectures": ["LlamaForCausalLM"]})
    common = ["trace", path, "--gpu", "h200_sxm", "--mode", "training", "--seq", "16", "--tp", "2"]
    main([*common, "--tp-plan", "hf", "--json"])
    (uncut,) = json.loads(capsys.readouterr().out)["uncut"]  # Hugging Face leaves the table of tokens whole
    assert uncut["module"] == "model.embed_tokens"
    assert uncut["parameters"] == 99 * 64
    plan = tmp_path / "plan.toml"
    plan.write_text('"mlp.gate_proj" = "colwise"\n"mlp.up_proj" = "colwise"\n"mlp.down_proj" = "rowwise"\n')
    main([*common, "--tp-plan", str(plan)])
    assert "replicated every GPU has all of" in " ".join(capsys.readouterr().out.split())
