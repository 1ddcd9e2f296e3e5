"""train from the command line: its keys, its text, names of other projects, config files, and what it refuses."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import Run, instead, strict

import kernelcast as kc

LLAMA = shlex.split("train llama-3.1-8b --gpus 8xH100 --tp 2 --global-batch 32 --seq 4096 --precision fp8")
KEYS = {
    "model", "gpu", "gpus", "stack", "precision", "layout", "seq", "micro_batch", "global_batch", "tokens_per_step",
    "time_s", "time_s_low", "time_s_high", "tokens_per_s", "tokens_per_s_per_gpu", "model_flops",
    "model_tflops_per_gpu", "mfu", "hfu", "parts_s", "breakdown", "memory_bytes", "memory", "stages", "fits", "support",
    "support_by", "evidence", "answered_as", "unread", "run", "predictor",
}  # fmt: skip


def json_of(run: Run, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert code == exit_code, err
    found: dict[str, Any] = strict(out)
    return found


def refused(run: Run, *arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kernelcast: error: ") and err.count("\n") == 1, err
    return err


def test_json_has_the_keys_of_the_contract(run: Run) -> None:
    found = json_of(run, *LLAMA)
    assert set(found) >= KEYS
    assert 0 < found["time_s_low"] <= found["time_s"] <= found["time_s_high"]
    assert found["tokens_per_step"] == 32 * 4096
    assert found["tokens_per_s"] == pytest.approx(32 * 4096 / found["time_s"])
    assert found["tokens_per_s_per_gpu"] == pytest.approx(found["tokens_per_s"] / 8)
    assert sum(found["parts_s"].values()) == pytest.approx(found["time_s"])
    assert found["model_tflops_per_gpu"] == pytest.approx(found["model_flops"] / found["time_s"] / 8 / 1e12)
    # 6 x the weights that products read, without the embedding, and attention: 7.5 B parameters, 131,072 tokens
    assert found["model_flops"] == pytest.approx(6 * 7.5e9 * 131072, rel=0.15)
    parts = {name: size for name, size in found["memory"].items() if name.removesuffix("_bytes") not in
             ("used", "available", "gpu", "missing")}  # fmt: skip
    assert sum(parts.values()) == pytest.approx(found["memory_bytes"])
    assert found["layout"]["dp"] == 4 and found["answered_as"]["dp"] == 4 and found["fits"] is True
    assert "global_batch" not in found["answered_as"] and found["run"] is None


def test_python_answers_the_same(run: Run) -> None:
    answer = kc.train("llama-3.1-8b", gpus="8xH100", tp=2, global_batch=32, seq=4096, precision="fp8")
    found = json_of(run, *LLAMA)
    assert found["time_s"] == pytest.approx(answer.step.time_s) and found["mfu"] == pytest.approx(answer.step.mfu)
    assert "TFLOP/s a GPU" in answer._repr_html_()


def test_text_says_the_step_its_parts_and_memory(run: Run) -> None:
    code, out, _ = run(*LLAMA, "--tokens", "1e12", "--price", "h100_sxm=2")
    assert code == 0
    for words in ("tokens/s a GPU", "MFU", "part of the step", "tensor parallel", "memory, GiB a GPU", "fits", "days",
                  "USD", "support", "evidence", "taken as"):  # fmt: skip
        assert words in out, words


def test_what_does_not_fit_is_answered_with_exit_code_3(run: Run) -> None:
    sharded = ("train", "llama-3.1-70b", "--gpus", "8xH100", "--tp", "8")
    code, out, err = run(*sharded)
    assert (code, err) == (3, "") and "does not fit" in out
    assert json_of(run, *sharded, exit_code=3)["fits"] is False
    huge = ("train", "llama-3.1-405b", "--gpus", "1xL40S", "--seq", "131072", "--micro-batch", "64")
    code, out, err = run(*huge)  # kernels with inputs that no GPU holds have no time
    assert (code, out, err.count("\n")) == (3, "", 1) and "GiB more than l40s has" in err


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--tensor-model-parallel-size 2", "--tp 2"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4", "--pp 2 --virtual-stages 2"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "--cp 2 --cp-comm a2a"),
        ("--micro-batch-size 2 --global-batch-size 64", "--micro-batch 2 --global-batch 64"),
        ("--seq-length 2048", "--seq 2048"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2",
         "--recompute full --recompute-layers 2"),
        ("--recompute-granularity selective --recompute-modules core_attn,mlp", "--recompute core_attn,mlp"),
        ("--fp8-recipe tensorwise", "--precision fp8_current"), ("--fp8-recipe blockwise", "--precision fp8_block"),
        ("--tp 2 --tp-comm-overlap", "--tp 2 --tp-overlap"), ("--use-distributed-optimizer", "--zero 1"),
        ("--parallelism.tensor_parallel_degree 2 --training.local_batch_size 2", "--tp 2 --micro-batch 2"),
        ("--lr 3e-4 --train-iters 100 --bf16", ""),
        ("--optimizer adam", "--optimizer adamw"),
    ],
)  # fmt: skip
def test_names_of_other_projects_mean_the_same(run: Run, theirs: str, ours: str) -> None:
    base = shlex.split("train llama-3.2-1b --gpus 8xH100")
    first, second = (json_of(run, *instead(base, *shlex.split(words))) for words in (theirs, ours))
    assert first["layout"] == second["layout"] and first["time_s"] == second["time_s"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "which GPUs?"), ("--gpus 512", "8xH100"), ("--gpus 8xH1000", "unknown gpu"),
        ("--gpus 6xH100 --tp 4", "6 is no multiple of 4"), ("--gpus 8xH100 --tp 2 --dp 2", "do not make 8 GPUs"),
        ("--gpus 8xH100 --global-batch 7", "--global-batch 7 must be a multiple"),
        ("--gpus 8xH100 --precision fp9", "unknown precision"), ("--gpus 8xH100 --recompute foo", "unknown recompute"),
        ("--gpus 8xH100 --recompute-layers 2", "of --recompute full"), ("--gpus 8xH100 --mtp", "multi-token"),
        ("--gpus 8xH100 --ep 2", "has no experts"), ("--gpus 8xH100 --schedule 1f1b", "--pp is 1"),
        ("--gpus 8xH100 --pp 2 --schedule zigzag", "unknown schedule"), ("--gpus 8xH100 --stack mesh", "mesh"),
        ("--gpus 8xH100 --pp 2 --stage-layers a,b", "whole numbers with commas"),
        ("--gpus 8xH100 --lora-targets qkv", "--lora-rank"), ("--gpus 8xH100 --frozen fp8", "--lora-rank"),
        ("--gpus 8xH100 --qlora --frozen fp8", "int4"), ("--gpus 8xH100 --fp8-param-gather", "--precision of fp8"),
        ("--gpus 8xH100 --mtbf 5", "--checkpoint-every"),
        ("--gpus 8xH100 --price h100_sxm=2", "--tokens"), ("--gpus 8xH100 --config nowhere.yaml", "no file"),
        ("--gpus 8xH100 --gradients fp8", "unknown format of gradients"), ("--gpus 8xH100 --tp 3", "no multiple"),
        ("--gpus 8xH100 --tp 2 --tensor-model-parallel-size 2", "given twice"),
        ("--gpus 8xH100 --precision mxfp8", "no block scales"), ("--gpus 8xA100 --precision fp8", "matrices of fp8"),
        ("--gpus 64xH100 --tp 64", "does not divide the 32 heads"), ("--gpus 8xH100 --cuda-graphs yes", "none"),
        ("--gpus 8xH100 --routing natural", "unknown routing"),
        ("--gpus 8xH100 --checkpoint-s 3", "--checkpoint-every"),
        ("--gpus 8xH100 --offload-layers 99", "the 32 layers"),
        ("--gpus 8xH100 --jitter 5", "a share of a step's time"),
        ("--gpus 8xH100 --seq 512 --mean-length 513", "--mean-length 513 is more than"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(run: Run, words: str, why: str) -> None:
    assert why in refused(run, "train", "llama-3.1-8b", *shlex.split(words))


def test_counts_of_gpus_and_names_of_hugging_face_are_taken(run: Run) -> None:
    base = shlex.split("train llama-3.2-1b --per-device-train-batch-size 2 --max-length 512 --stack hf --lora-r 8")
    answers = [json_of(run, *base, "--gpus", said) for said in ("8xH100", "8 H100", "H100 x 8", "H100:8")]
    assert len({answer["time_s"] for answer in answers}) == 1
    assert (answers[0]["gpus"], answers[0]["stack"], answers[0]["micro_batch"]) == (8, "huggingface", 2)


def test_encoders_and_models_without_a_name_are_refused(run: Run) -> None:
    assert "kernelcast trace" in refused(run, "train", "bert-base", "--gpus", "8xH100")
    assert "which model?" in refused(run, "train", "--gpus", "8xH100")
    assert "positions" in refused(run, "train", "gpt2", "--gpus", "8xH100", "--seq", "4096")


TITAN = """
[model]
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
[quantize.linear.float8]
recipe_name = "rowwise"
[optimizer]
name = "AdamW"
"""
BRIDGE = """
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  seq_length: 8192
  some_new_parallel_trick: 3
mixed_precision: bf16_with_fp8_current_scaling_mixed
train:
  global_batch_size: 64
  micro_batch_size: 1
ddp:
  grad_reduce_in_fp32: false
optimizer:
  optimizer: adam
  lr: 1e-4
"""
SCRIPT = """#!/bin/bash
export TP=2
# --tensor-model-parallel-size 16 is too many
DISTRIBUTED_ARGS=(--nproc_per_node 8 --nnodes ${NODES:-2})
ARGS=(
    --seq-length 4096
    --micro-batch-size 1
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${ARGS[@]} --global-batch-size 64 \\
    --tensor-model-parallel-size $TP --use-distributed-optimizer --recompute-granularity selective \\
    --recompute-modules core_attn mlp --fp8-format hybrid --lr 1e-4 --moe-frobnicate-parallel 3
"""


def test_config_files_are_read(run: Run, tmp_path: Path) -> None:
    titan, bridge, script = tmp_path / "a.toml", tmp_path / "b.yaml", tmp_path / "c.sh"
    for path, text in ((titan, TITAN), (bridge, BRIDGE), (script, SCRIPT)):
        path.write_text(text)

    def of(path: Path, gpus: str, *more: str) -> dict[str, Any]:
        return json_of(run, "train", "llama-3.1-8b", "--gpus", gpus, "--config", str(path), *more)

    found = of(titan, "8xH100")
    assert (found["layout"]["tp"], found["layout"]["dp"], found["layout"]["zero"]) == (2, 4, 3)
    assert (found["micro_batch"], found["seq"], found["recompute"]) == (2, 8192, "full")
    assert found["precision"] == "fp8_current" and found["unread"] == [] and found["stack"] == "torchtitan_eager"
    pytest.importorskip("yaml")
    found = of(bridge, "8xH100", "--seq", "4096")  # a flag comes over the file
    assert (found["layout"]["tp"], found["layout"]["pp"], found["global_batch"], found["seq"]) == (2, 2, 64, 4096)
    assert found["precision"] == "fp8_current" and found["unread"] == ["model.some_new_parallel_trick"]
    found = of(script, "H100")
    assert (found["gpus"], found["layout"]["tp"], found["layout"]["zero"]) == (16, 2, 1)
    assert found["precision"] == "fp8_delayed" and found["unread"] == ["moe_frobnicate_parallel"]
    assert (
        "not read   moe_frobnicate_parallel"
        in run("train", "llama-3.1-8b", "--gpus", "H100", "--config", str(script))[1]
    )
    script.write_text("TP=${TP:-8}\ntorchrun pretrain_gpt.py --tensor-model-parallel-size $TP\n")
    assert of(script, "8xH100")["layout"]["tp"] == 8
    titan.write_text("[parallelism]\ndata_parallel_shard_degree = -1\n[activation_checkpoint]\nmode = 'selective'\n")
    assert of(titan, "1xH200")["layout"]["zero"] == 0
    (tmp_path / "empty.yaml").write_text("[]\n")
    assert "holds no settings" in refused(run, "train", "llama-3.1-8b", "--config", str(tmp_path / "empty.yaml"))


def test_frozen_weights_are_stored_as_they_are_said(run: Run) -> None:
    """8.03 B parameters: 2 bytes in bf16, 1 in fp8, a little more than half of one in NF4."""
    base = shlex.split("train llama-3.1-8b --gpus 1xH100 --lora-rank 16 --recompute full --seq 1024")
    sizes = [
        json_of(run, *base, *more)["memory"]["parameters_bytes"] for more in ([], ["--frozen", "fp8"], ["--qlora"])
    ]
    assert sizes[0] == pytest.approx(2 * 8.03e9, rel=0.02)
    assert sizes[1] == pytest.approx(8.03e9 + 2 * 0.525e9, rel=0.1)  # the embedding stays in bf16
    assert 0.5 * 8.03e9 < sizes[2] < sizes[1]


def test_fp8_weights_are_gathered_in_8_bits(run: Run) -> None:
    base = shlex.split("train llama-3.1-8b --gpus 16xH100 --precision fp8_delayed --recompute full")
    plain, gathered = (json_of(run, *base, *more) for more in ([], ["--fp8-param-gather"]))
    assert gathered["memory_bytes"] < plain["memory_bytes"] and gathered["time_s"] <= plain["time_s"]


def test_a_run_costs_its_tokens(run: Run) -> None:
    """1e12 tokens at so many a second, on 8 GPUs for 2 USD an hour."""
    found = json_of(run, *LLAMA, "--tokens", "1e12", "--price", "h100_sxm=2")
    seconds = 1e12 / found["tokens_per_s"]
    assert found["run"]["hours"] == pytest.approx(seconds / 3600)
    assert found["run"]["usd"] == pytest.approx(seconds / 3600 * 8 * 2)
    assert found["run"]["energy_j"] < 8 * 700 * seconds * 1.001 and found["run"]["goodput"] == 1
    failing = json_of(run, *LLAMA, "--tokens", "1e12", "--checkpoint-every", "100", "--mtbf", "50700")
    assert failing["run"]["goodput"] < 1 and failing["run"]["hours"] > found["run"]["hours"]


def test_no_pytorch_is_needed() -> None:
    lines = (
        "import sys, kernelcast as kc; kc.train('llama-3.2-1b', gpus='2xh100_sxm', global_batch=8)",
        "import kernelcast.app.report.train, kernelcast.search.compare.training",
        "print('torch' in sys.modules)",
    )
    ended = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_search_finds_a_layout_that_fits_and_is_fastest(run: Run) -> None:
    question = shlex.split("train llama-3.2-1b --gpus 8xH100 --global-batch 32 --seq 4096 --search --cp 1")
    found = json_of(run, *question)
    times = [each["time_s"] for each in found["search"]["ranked"]]
    assert found["fits"] and found["time_s"] == times[0] == min(times) and found["layout"]["cp"] == 1
    assert found["search"]["tried"] > 20 and "layouts" in run(*question)[1]
    layout = found["layout"]
    again = json_of(
        run, *question[:-3], "--tp", str(layout["tp"]), "--pp", str(layout["pp"]), "--recompute", found["recompute"],
        "--micro-batch", str(found["micro_batch"]),
    )  # fmt: skip
    assert again["time_s"] == pytest.approx(found["time_s"], rel=1e-6)
    line = next(text for text in run(*question)[1].split("\n\n") if "Megatron   " in text)
    flags = " ".join(line.partition("Megatron   ")[2].split())
    assert json_of(run, *question[:4], *shlex.split(flags))["time_s"] == pytest.approx(found["time_s"], rel=1e-6)
    assert "give --global-batch" in refused(run, "train", "llama-3.2-1b", "--gpus", "8xH100", "--search")
    assert "leave out --dp" in refused(run, *question, "--dp", "2")


def test_gradient_accumulation_is_another_way_to_give_the_batch(run: Run) -> None:
    base = shlex.split("train llama-3.2-1b --gpus 4xA100 --seq 512 --micro-batch 2 --gradient-accumulation-steps 8")
    found = json_of(run, *base)
    assert (found["global_batch"], found["layout"]["micro_batches"]) == (4 * 2 * 8, 8)
    assert "global_batch" not in found["answered_as"]
    assert "--global-batch of 64, not 12" in refused(run, *base, "--global-batch", "12")


def test_names_of_gpus_that_begin_with_a_number_are_no_counts(run: Run) -> None:
    base = shlex.split("train llama-3.2-1b --seq 512 --micro-batch 1 --qlora --recompute full --gpus")
    for given in (("4090", "--dp", "2"), ("3060 Ti", "--dp", "2"), ("2x4090",)):
        found = json_of(run, *base, *given)
        assert (found["gpus"], found["layout"]["dp"]) == (2, 2)
    assert "64 H100" not in refused(run, "train", "llama-3.2-1b", "--gpus", "64")
