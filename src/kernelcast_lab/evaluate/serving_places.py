"""Where AIConfigurator's measured points were served: model, GPU, engine, formats and layout. What the table leaves out
is as public recipes have it."""

from __future__ import annotations

from dataclasses import replace

from kernelcast.hardware import gpu
from kernelcast.inference.deployment import Deployment, Layout
from kernelcast.inference.workload import Speculation
from kernelcast.models import model
from kernelcast.models.architecture import draft_of
from kernelcast.models.precision import Precision
from kernelcast.stacks import stack
from kernelcast_lab.data.serving import ServingPoint

_BLACKWELL = "10"
_ACCEPTANCE = {"trtllm": 0.7, "sglang": 0.5}  # of guessed tokens, in tenths: set on the points that are not held out
_NAMES = {  # of sources: of the catalogue, where it does not know theirs
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "llama-4-scout", "zhipuai/GLM-5": "glm-5",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b", "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b", "nvidia/DeepSeek-R1-NVFP4": "deepseek-r1",
}  # fmt: skip
# fp8 checkpoints of these have a scale for every 128 x 128 weights; the table says fp8 of theirs too
_BLOCKS = ("deepseek", "glm", "minimax", "qwen3-235b", "qwen3.5")


def guesses_of(point: ServingPoint, place: Deployment) -> Speculation | None:
    """The model's own further layers guess."""
    if not point.draft_tokens:
        return None
    return Speculation(point.draft_tokens, _ACCEPTANCE[point.stack], replace(place, model=draft_of(place.model)))


def deployment_of(point: ServingPoint) -> Deployment:
    """Where a point was served."""
    found, place = model(_NAMES.get(point.model, point.model)), gpu(point.gpu)
    layout = Layout(tp=point.tp, pp=point.pp, dp=point.dp, ep=point.moe_ep or 1)
    formats = _precision(point, found.name, place.compute_capability)
    engine = replace(stack(point.stack), moe_backend=_experts_kernel(point, place.compute_capability))
    return Deployment(found, place, engine, formats, layout)


def _experts_kernel(point: ServingPoint, capability: str) -> str:
    """What InferenceX's recipes ask for on Blackwell (benchmarks/single_node/*_b200*.sh): TensorRT-LLM's generated
    kernels; with attention DP TensorRT-LLM's CUTLASS or, of 8 bits, DeepGEMM, and SGLang's of DeepEP; "": the usual."""
    if not (point.public and capability.startswith(_BLACKWELL)) or point.stack == "vllm":
        return ""
    if point.stack == "sglang" and point.dp > 1:
        return ""
    if point.stack == "trtllm" and point.dp > 1:
        return "deepgemm" if point.weights == "fp8" else "cutlass"
    return "trtllm"


def _precision(point: ServingPoint, name: str, capability: str) -> Precision:
    """As the table says, but for what its labels leave out."""
    # NVIDIA's quantised checkpoints, which TensorRT-LLM serves, come with an fp8 KV cache; InferenceX's recipes give
    # one to vLLM with quantised Llama, and to SGLang on B200 (benchmarks/single_node/*_b200.sh).
    blackwell = capability.startswith(_BLACKWELL)
    given = {"vllm": "Llama" in point.model, "sglang": blackwell}.get(point.stack, False) and point.public
    cache = "fp8" if (point.stack == "trtllm" or given) and point.weights != "bf16" else None
    if name == "gpt-oss-120b":  # mxfp4 experts, the rest bf16; the table calls it nvfp4 everywhere
        return Precision("bf16", cache, "mxfp4_fp8" if blackwell else "mxfp4")
    if name.startswith("kimi") and point.weights == "int4":  # only its experts are
        return Precision("bf16", cache, "int4")
    if name.startswith(_BLOCKS) and point.weights == "fp8":
        return Precision("fp8_block", cache)
    return Precision(point.weights, cache, point.experts)
