"""What is read of kernel names, ATen arguments, traces, Nsight Compute's CSV and tables."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiler_trace import BF16, kernel, linear, op, trace

from kernelcast.diagnose.kernel_names import parse_kernel_name
from kernelcast.diagnose.measured import MeasuredKernel, launch_grid
from kernelcast.diagnose.profiler_trace import NO_OP, NO_SHAPES, TO_HOST, op_of, profile_of
from kernelcast.diagnose.read import read_measured
from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.tracing.aten.outputs import outputs_of

H200 = gpu("h200_sxm")
MEASURED = Path(__file__).parents[2] / "validation" / "kernelcast" / "h200_sxm.parquet"
NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
ADD = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, array<char*, 3ul> >"
)


# ---- names ----


@pytest.mark.parametrize(
    ("name", "kind", "tile", "dtype"),
    [
        (NVJET, "matmul", (128, 256), "bf16"),
        ("nvjet_sm90_qqtst_128x160_128x5_1x2_h_bz_coopA_algo2_TNT", "matmul", (160, 128), "fp8"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4", "matmul",
         (128, 64), "fp32"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x256x32_warpgroupsize2x1x1_execute_segment_k_off_kernel",
         "matmul", (128, 256), "tf32"),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1>(Params)", "matmul",
         (128, 256), "bf16"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)", "matmul", (32, 128), "fp32"),
        ("ampere_sgemm_128x64_tn", "matmul", (64, 128), "fp32"),
        ("fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Kernel)", "attention", None, "fp32"),
        ("void implicit_convolve_sgemm<__nv_bfloat16, __nv_bfloat16, 128, 6, 7>", "conv", None, "fp32"),
        (ADD, "pointwise", None, "bf16"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>", "reduce", None,
         "fp32"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "helper", None, "bf16"),
        ("my_kernel", "other", None, None),
    ],
)  # fmt: skip
def test_what_a_name_says(name: str, kind: str, tile: tuple[int, int] | None, dtype: str | None) -> None:
    said = parse_kernel_name(name)
    assert (said.category, said.dtype) == (kind, dtype)
    assert (said.tile_m, said.tile_n) == (tile or (None, None))


def test_what_the_launch_of_a_product_says() -> None:
    """n = 2816 is 11 tiles of 256, m = 1536 is 12 of 128: one wave of 132; m = 1664 is 143 tiles in two rounds."""
    ran = MeasuredKernel(NVJET, 85.8, (2, 66, 1), (384, 1, 1), 168, 213188)
    one = launch_grid(ran, {"op": "gemm", "m": 1536, "n": 2816, "k": 8192}, H200)
    assert (one.tasks, one.slots, one.ctas_per_sm, one.tail, one.padding) == (132, 132, 1, 0.0, 0.0)
    more = launch_grid(ran, {"op": "gemm", "m": 1664, "n": 2816, "k": 8192}, H200)
    assert more.tasks == 143 and more.tail == pytest.approx(1 - 143 / 264)
    # 132 tiles of a third of the area: padding of the last row
    ragged = launch_grid(ran, {"op": "gemm", "m": 1409, "n": 2816, "k": 8192}, H200)
    assert ragged.padding == pytest.approx(1 - 1409 / 1536)


def test_the_third_axis_of_a_product_counts_parts_of_k() -> None:
    name = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x128_8x4_tn_align1>(Params)"
    ran = MeasuredKernel(name, 10.0, (1, 1, 4), (256, 1, 1), 128, 32768)
    found = launch_grid(ran, {"op": "gemm", "m": 61, "n": 128, "k": 4096}, H200)
    assert (found.split_k, found.tasks) == (4, 4)


def test_tile_sides_fit_the_grids_of_measured_products() -> None:
    """Every product of our campaign whose grid counts tiles: nvjet's in whole clusters, unless it is persistent;
    CUTLASS's dealt out in columns of 1 to 8; xmma's as they are."""
    duckdb = pytest.importorskip("duckdb")
    query = f"SELECT m, n, kernel_name, grid FROM '{MEASURED}' WHERE op = 'gemm' AND kernel_name IS NOT NULL"
    seen = 0
    for m, n, name, text in duckdb.sql(query).fetchall():
        said, grid = parse_kernel_name(name), tuple(map(int, text.split("x")))
        if not said.tile_m or not said.tile_n or "sm90_xmma" in name or (said.persistent and said.split_k):
            continue
        rows, columns = -(-m // said.tile_m), -(-n // said.tile_n)
        if said.persistent:
            whole = -(-rows // said.cluster_m) * said.cluster_m * -(-columns // said.cluster_n) * said.cluster_n
            if math.prod(grid) < rows * columns:  # as many CTAs as there are SMs
                continue
            assert math.prod(grid) == whole, name
        else:
            swizzles = (1, 2, 4, 8) if "cutlass" in name else (1,)
            assert any(grid[:2] == (rows * w, -(-columns // w)) for w in swizzles), (name, grid, m, n)
        seen += 1
    assert seen == 9274


# ---- ATen arguments ----


def test_arguments_of_an_op() -> None:
    event = op(1, "aten::mean", [[1, 64, 256], [], [], []], ["float", "ScalarList", "Scalar", ""],
               values=["", "[-1]", "True", ""])  # fmt: skip
    found = op_of(event)
    assert found is not None and found.name == "mean"
    assert found.arguments[1:] == ((-1,), True, None)
    assert found.inputs[0].dtype == "fp32" and found.inputs[0].stride == (16384, 256, 1)
    assert found.outputs[0].shape == (1, 64)


def test_a_list_of_tensors_takes_its_width_from_the_kernel() -> None:
    event = op(1, "aten::cat", [[[2, 3, 4], [2, 5, 4]], []], ["TensorList", "Scalar"],
               strides=[[[12, 4, 1], [20, 4, 1]], []], values=["", "1"])  # fmt: skip
    wide = op_of(event, ["void at::native::CatArrayBatchedCopy<at::native::OpaqueType<4u>, unsigned int, 3>"])
    assert wide is not None and wide.outputs[0].shape == (2, 8, 4) and wide.outputs[0].dtype == "fp32"
    narrow = op_of(event, ["void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3>"])
    assert narrow is not None and narrow.outputs[0].item_bytes == 2


@pytest.mark.parametrize(
    ("name", "dims", "types", "values", "shape", "dtype"),
    [
        ("add", [[8, 1, 4], [5, 1], []], ["float", "float", "Scalar"], ["", "", "1"], (8, 5, 4), "fp32"),
        ("mul", [[8, 4], []], [BF16, "double"], ["", ""], (8, 4), "bf16"),  # a number does not widen
        ("add", [[8, 4], [8, 4]], [BF16, "float"], ["", ""], (8, 4), "fp32"),
        ("gt", [[8], [8]], ["float", "float"], ["", ""], (8,), "bool"),
        ("sum", [[8, 4, 2], [], []], ["float", "ScalarList", "Scalar"], ["", "[0, 2]", "False"], (4,), "fp32"),
        ("index_select", [[100, 16], [], [7]], [BF16, "Scalar", "long int"], ["", "0", ""], (7, 16), "bf16"),
        ("argmax", [[8, 100], [], []], ["float", "Scalar", "Scalar"], ["", "-1", "False"], (8,), "int64"),
        ("mm", [[8, 4], [4, 6]], [BF16, BF16], ["", ""], (8, 6), "bf16"),
        ("silu_", [[8, 4]], [BF16], [""], (8, 4), "bf16"),
    ],
)  # fmt: skip
def test_outputs_follow_from_the_arguments(
    name: str, dims: list[Any], types: list[str], values: list[str], shape: tuple[int, ...], dtype: str
) -> None:
    found = op_of(op(1, f"aten::{name}", dims, types, values=values))
    assert found is not None
    assert (found.outputs[0].shape, found.outputs[0].dtype) == (shape, dtype)


def test_outputs_are_those_that_pytorch_makes() -> None:
    """Every kernel of a traced training step, its outputs forgotten and told again."""
    torch = pytest.importorskip("torch")
    from kernelcast.tracing import trace as traced

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.front = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
            self.back = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU())

        def forward(self, x: Any) -> Any:
            x = self.back(self.front(x).flatten(2))
            halves = torch.cat((-x[..., 32:].transpose(0, 1), x[..., :32].transpose(0, 1)), dim=-1)
            return (halves.softmax(-1) * halves.pow(2).mean(-1, keepdim=True).rsqrt()).sum()

    step = traced(Net(), (torch.randn(2, 3, 32, 32),), "training", optimizer=None)
    told = 0
    for one in step.kernels:
        found = outputs_of(replace(one, outputs=()))
        if found is None or not one.outputs:
            continue
        first, true = found[0], one.outputs[0]
        assert (first.elements, first.dtype) == (true.elements, true.dtype), one
        told += 1
    assert told > 30 and told > 0.7 * len(step.kernels)


# ---- traces ----


def test_kernels_of_one_op_are_one_call() -> None:
    """A product with split-K: a memset, the product and the sum of its parts."""
    found = profile_of(
        trace(
            linear(1, 8, 4096, 14336),
            kernel(1, "Memset (Device)", 1.0, cat="gpu_memset"),
            kernel(1, "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT", 30.0, at_us=2, grid=(2, 64, 1)),
            kernel(1, "void cublasLt::splitKreduce_kernel<32, 16, int, float>", 2.0, at_us=33),
        ),
        H200,
    )
    (call,) = found.calls
    assert call.time_us == pytest.approx(33.0) and len(call.kernels) == 3
    assert call.main.name.startswith("nvjet")
    assert call.calls[0].arguments == {
        "op": "gemm", "m": 8, "n": 4096, "k": 14336, "layout": "tn", "dtype": "bf16", "stack": "torch"
    }  # fmt: skip
    assert found.duration_us == pytest.approx(35.0) and found.idle_us == pytest.approx(1.0 + 1.0)


def test_alike_calls_are_one_row_with_their_mean() -> None:
    events = [e for i in range(3) for e in (linear(i, 64, 64, 64, at_us=100.0 * i),
                                            kernel(i, NVJET, 10.0 + i, at_us=100.0 * i))]  # fmt: skip
    (call,) = profile_of(trace(*events), H200).calls
    assert call.count == 3 and call.time_us == pytest.approx(11.0) and call.total_us == pytest.approx(33.0)


def test_attention_is_found_around_the_op_that_launches_it() -> None:
    sizes = [[1, 32, 2048, 128], [1, 8, 2048, 128], [1, 8, 2048, 128], [], [], []]
    types, values = [BF16, BF16, BF16, "Scalar", "Scalar", "Scalar"], ["", "", "", "0.", "True", "False"]
    outer = op(1, "aten::_scaled_dot_product_flash_attention", sizes, types, values=values, lasts_us=50)
    inner = op(2, "aten::_flash_attention_forward", sizes, types, values=values, at_us=10, lasts_us=30)
    (call,) = profile_of(trace(outer, inner, kernel(2, "pytorch_flash::flash_fwd_kernel", 80.0)), H200).calls
    told = call.calls[0].arguments
    assert (told["op"], told["backend"], told["causal"], told["kv_heads"]) == ("attention", "fa2", True, 8)


def test_tf32_is_in_the_kernels_name() -> None:
    event = op(1, "aten::mm", [[64, 64], [64, 64]], ["float", "float"])
    name = "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x128x32_warpgroupsize1x1x1"
    (call,) = profile_of(trace(event, kernel(1, name, 5.0)), H200).calls
    assert call.calls[0].arguments["dtype"] == "tf32"


def test_a_compiled_kernel_counts_as_what_it_moves() -> None:
    event = op(1, "triton_poi_fused_add_mul_0", [[2048, 4096], [2048, 4096], []], [BF16, BF16, "Scalar"])
    (call,) = profile_of(trace(event, kernel(1, "triton_poi_fused_add_mul_0", 9.0)), H200).calls
    assert call.calls[0].arguments["op"] == "pointwise"


def test_what_cannot_be_matched_says_why() -> None:
    bare = op(2, "aten::mm", [], [])
    del bare["args"]["Input Dims"]
    found = profile_of(
        trace(
            kernel(None, "my_kernel", 5.0),
            bare, kernel(2, NVJET, 5.0, at_us=10),
            op(3, "aten::copy_", [[64], [64]], ["float", "float"], at_us=20),
            kernel(3, "Memcpy HtoD (Pinned -> Device)", 5.0, at_us=20, cat="gpu_memcpy"),
            op(4, "mylib::attention", [[64, 64]], [BF16], at_us=30), kernel(4, "my_attention", 5.0, at_us=30),
        ),
        H200,
    )  # fmt: skip
    why = {call.unmatched for call in found.calls}
    assert why == {NO_OP, NO_SHAPES, TO_HOST, "no model of mylib::attention"}
    assert all(not call.calls for call in found.calls)


def test_rows_of_kernels_and_annotations() -> None:
    """Of three in a row the longest stays; a product ends the row."""
    add = ("aten::add", [[4096], [4096]], [BF16, BF16])
    mark = {"ph": "X", "cat": "user_annotation", "name": "norm", "pid": 1, "tid": 1, "ts": 0.0, "dur": 35.0, "args": {}}
    events = [mark]
    for number, time_us in enumerate((2.0, 9.0, 3.0)):
        events += [op(number, *add, at_us=10.0 * number, lasts_us=5), kernel(number, ADD + str(number), time_us,
                                                                            at_us=10.0 * number)]  # fmt: skip
    events += [linear(9, 64, 64, 64, at_us=40), kernel(9, NVJET, 5.0, at_us=40)]
    found = {call.main.name[-1]: call for call in profile_of(trace(*events), H200).calls}
    assert [found[word].chain_saved_us for word in "012"] == [2.0, 0.0, 3.0]
    assert [found[word].chain for word in "012T"] == [3, 3, 3, 0]
    assert found["0"].marks == ("norm",) and found["T"].marks == ()


def refused(path: Path, message: str) -> None:
    with pytest.raises(KernelcastError, match=message):
        read_measured(path, H200)


def test_bad_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text, message in (
        ("", "is empty"),
        ("{", "not JSON"),
        ("{}", "no list 'traceEvents'"),
        ('{"traceEvents": []}', "no GPU kernels: profile with"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x"}]}', "no ts, dur or name"),
    ):
        path.write_text(text)
        refused(path, message)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"{}" * 9999)[:-40])
    refused(path, "damaged or truncated")
    refused(tmp_path / "none.json", "no file")
    other = tmp_path / "run.nsys-rep"
    other.write_text("x")
    refused(other, "unknown format")


def test_a_trace_names_its_gpu(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace(linear(1, 64, 64, 64), kernel(1, NVJET, 5.0))))
    assert read_measured(path)[1].id == "h200_sxm"
    path.write_text(json.dumps(trace(linear(1, 64, 64, 64), kernel(1, NVJET, 5.0), gpu="")))
    with pytest.raises(KernelcastError, match="which GPU"):
        read_measured(path)


# ---- Nsight Compute ----

LONG = '"ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"'


def test_a_details_page(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    row = '"ampere_sgemm_128x64_tn","(256, 1, 1)","(8, 4, 1)"'
    path.write_text(
        "==PROF== Connected\nmy program's own words\n" + "\n".join([
            LONG, f'"0",{row},"Duration","ns","12,500"', f'"0",{row},"Registers Per Thread","register/thread","128"',
            f'"0",{row},"L2 Hit Rate","%","40.0"', f'"0",{row},"","",""', f'"1",{row},"Duration","us","13.5"',
        ])
    )  # fmt: skip
    profile, _ = read_measured(path, H200)
    (call,) = profile.calls
    assert (call.count, call.main.grid, call.main.registers) == (2, (8, 4, 1), 128)
    assert call.time_us == pytest.approx(13.0)
    assert call.main.counters == {"l2_hit_share": pytest.approx(0.4)}
    # 32 tiles of 64 x 128
    assert not call.calls and call.unmatched == "m x n is at most 262,144 by its tiles and grid; k is in neither"


def test_a_raw_page_has_units_in_its_second_row(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    path.write_text(
        '"ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum","dram__bytes.sum"\n'
        '"","","","","usecond","Mbyte"\n'
        f'"0","{ADD}","(128, 1, 1)","(16384, 1, 1)","17.1","1.5"\n'
    )
    profile, _ = read_measured(path, H200)
    (call,) = profile.calls
    assert call.time_us == pytest.approx(17.1) and call.main.counters["dram_bytes"] == pytest.approx(1.5e6)
    told = call.calls[0].arguments  # 16,384 CTAs of 1,024 elements
    assert (told["op"], told["rows"] * told["cols"], told["reads"], told["writes"]) == ("pointwise", 1 << 24, 2.0, 1.0)


def test_bad_csvs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ncu.csv"
    for text, message in (
        (LONG, "no kernels under its header"),
        (f'{LONG}\n"0","k","(1, 1, 1)","(1, 1, 1)","Registers Per Thread","","32"', "no time of k: profile with"),
        ('"ID","Kernel Name","Grid Size","Metric Name"\n"0","k","(1)","x"', "no column 'Block Size'"),
    ):
        path.write_text(text)
        refused(path, message)


# ---- tables ----


def test_a_table_with_measured_times(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    path.write_text(
        "op,m,n,k,rows,cols,dtype,measured_us,count,kernel_name,grid\n"
        f"gemm,1536,2816,8192,,,bf16,85.8,2,{NVJET},2x66x1\n"
        "add,,,,4096,4096,bf16,25,,,\n"
    )
    profile, _ = read_measured(path, H200)
    product, add = profile.calls
    assert (product.count, product.main.grid) == (2, (2, 66, 1)) and product.total_us == pytest.approx(171.6)
    assert add.calls[0].arguments == {"op": "add", "rows": 4096, "cols": 4096, "dtype": "bf16"}


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    for text, message in (
        ("op,m,n,k\ngemm,1,2,3\n", "needs a column measured_us or latency_us"),
        ("m,n,k,measured_us\n1,2,3,4\n", "needs a column 'op'"),
        ("op,m,n,k,measured_us\n", "no rows"),
        ("op,m,n,k,measured_us\ngemm,1,2,3,fast\n", "row 1: measured_us must be a time above 0, not 'fast'"),
        ("op,m,n,k,measured_us\ngemm,1,2,3,-1\ngemm,1,2,3,5\n", "row 1: measured_us must be a time above 0"),
        ("op,m,n,k,measured_us\ngemm,1,2,3,\n", "row 1: measured_us is empty"),
        ("op,m,n,k,measured_us,gpu\ngemm,1,2,3,4,h200\ngemm,1,2,3,4,l40s\n", "several GPUs"),
    ):
        path.write_text(text)
        refused(path, message)
