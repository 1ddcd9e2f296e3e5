"""KernelBench's problems as modules, and their forecasts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from kernelcast.errors import KernelcastError
from kernelcast_lab.data.kernelbench import build, cases, kernelbench, problems
from kernelcast_lab.data.shared import NotExpressibleError, Row
from kernelcast_lab.evaluate.kernelbench import forecast, times, traced


def row(**changed: Any) -> Row:
    cells = {
        "kb_version": "v0.1-shapes (pre 2025-07)", "hardware": "Tesla T4", "mode": "torch_compile_inductor_default",
        "level": "level1", "problem": "19_ReLU.py", "mean_ms": 0.5,
    }  # fmt: skip
    return Row("kernelbench_timings", {**cells, **changed}.items())


def test_every_problem_computes_its_output_on_the_meta_device() -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # instance norm over one channel of many, as the problem has it
        for problem, version in cases():
            module, inputs = build(problem, version)
            output = module(*inputs)
            assert module.training and output.device.type == "meta" and output.numel() > 0, (problem, version)


def test_levels_one_and_two_are_complete() -> None:
    known = list(cases())
    for level in ("level1", "level2"):
        for version in ("old", "new"):
            assert sum(name.startswith(level) and each == version for name, each in known) == 100


def test_a_product_and_a_convolution_have_their_flops() -> None:
    square = forecast("level1/1_Square_matrix_multiplication_", "old", "torch", "h100_sxm")
    assert square.flops == 2 * 2048**3
    # 16 images, 3 to 64 channels, 3x3 without padding: 256 - 2 = 254 rows and columns
    convolution = forecast("level1/63_conv_standard_2D__square_input__square_kernel", "old", "torch", "h100_sxm")
    assert convolution.flops == 2 * 16 * 64 * 254 * 254 * 3 * 3 * 3


def test_an_activation_reads_and_writes_each_element_once() -> None:
    (relu,) = traced("level1/19_ReLU", "new").kernels
    assert sum(x.bytes for x in (*relu.inputs, *relu.outputs)) == 2 * 4096 * 393216 * 4


@pytest.mark.parametrize(
    ("problem", "parameters"),
    [
        ("9_ResNet18", 11_689_512),
        ("10_ResNet101", 44_549_160),
        ("11_VGG16", 138_357_544),
        ("12_VGG19", 143_667_240),
        ("18_SqueezeNet", 1_248_424),
        ("20_MobileNetV2", 3_504_872),
    ],
)
def test_a_network_has_the_parameters_of_torchvisions(problem: str, parameters: int) -> None:
    module, _ = build(f"level3/{problem}", "old")
    assert sum(x.numel() for x in module.parameters()) == parameters


def test_python_calls_are_those_of_the_benchmarks_modules() -> None:
    """Before the first op ``Module.__call__`` has called two functions of PyTorch and ``forward``; nothing between
    operators of tensors."""
    (relu,) = traced("level1/19_ReLU", "old").kernels
    assert relu.at == 3
    product, *others = traced("level2/9_Matmul_Subtract_Multiply_ReLU", "old").kernels
    assert all(each.at == product.at for each in others)


def test_the_first_event_is_recorded_right_before_the_call() -> None:
    eager = times(forecast("level1/19_ReLU", "old", "torch", "h100_sxm"))
    kernels, wall = eager["kernel_time_s"], eager["time_s"]
    assert kernels.low < kernels.value < kernels.high and kernels.value < wall.value < 5e-5


def test_fusion_leaves_fewer_kernels_and_a_graph_waits_less() -> None:
    modes = ("torch", "inductor_default", "inductor_reduce-overhead")
    problem = "level2/81_Gemm_Swish_Divide_Clamp_Tanh_Clamp"
    eager, fused, graph = (forecast(problem, "old", mode, "a100_sxm") for mode in modes)
    assert [len(step.kernels) for step in (eager, fused, graph)] == [7, 2, 3]  # GEMM with bias, six element-wise
    copy = graph.kernels[0].op  # of the input, to where the graph reads it
    assert (copy.name, copy.inputs[0].shape) == ("clone", eager.kernels[0].op.arguments[1].shape)
    # a graph costs as much as launching a few kernels
    assert graph.time_s == pytest.approx(fused.time_s, rel=0.15)
    _, network, replayed = (forecast("level3/4_LeNet5", "old", mode, "a100_sxm") for mode in modes)
    assert replayed.time_s < network.time_s
    assert fused.kernel_time_s < eager.kernel_time_s
    assert fused.idle_s > fused.host.compiled_s  # guards and the wrapper: a few small ops gain nothing by a compiler


def test_a_row_is_a_question() -> None:
    case = kernelbench(row())
    assert case["gpu"] == "t4" and case["measured"] == {"time_s": 5e-4}
    parameters = {"problem": "level1/19_ReLU", "version": "old", "mode": "inductor_default", "gpu": "t4"}
    assert case["parameters"] == parameters


@pytest.mark.parametrize("changed", [{"problem": "9_None.py"}, {"kb_version": "side branch"}])
def test_a_row_of_unknown_shapes_says_so(changed: dict[str, str]) -> None:
    with pytest.raises(NotExpressibleError, match=r"9_None|side branch"):
        kernelbench(row(**changed))


def test_shapes_that_are_not_known_are_not_guessed() -> None:
    assert "new" not in problems()["level1/97_CosineSimilarityLoss"]
    with pytest.raises(KernelcastError, match="has 'old'"):
        build("level1/97_CosineSimilarityLoss", "new")
