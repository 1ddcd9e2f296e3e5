"""NeuSight (github sitar-lab/NeuSight, MIT): fp32 ops of PyTorch 2.1, timed by CUDA events around one op.

Launch overhead is inside (floors of 24 to 67 us). Names that end in u take a scalar as second operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast_lab.data.checkout import Part, parts, relation
from kernelcast_lab.data.mapping import OpMap, TableMap

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


SOURCE = "neusight"
LOOKS_FOR = "scripts/asplos/data/dataset/train/collect/OP/TORCH/GPU.csv"
_PLACES = ("scripts/asplos/data", "data", ".")
_DTYPE = "'fp32'"  # kernels are sgemm, scudnn and gcgemm: TF32 was off for products and convolutions
_MATRIX = {"m": "M", "n": "K", "k": "N"}  # N is the contraction
_ROWS = {"rows": "B", "cols": "H"}
# A product with, or a sum of, a tensor and a scalar is our 'scale' (a division by one is a product in PyTorch).
# 'pow' has two tensors and no family with us; 'powu' is a tensor to the power of a scalar, our pow.
_VECTOR = {
    "add": "add", "mul": "mul", "div": "div", "addu": "scale", "mulu": "scale", "divu": "scale", "powu": "pow",
    "relu": "relu", "tanh": "tanh", "gelu": "gelu", "softmax": "softmax", "ln": "layernorm",
}  # fmt: skip


def _ops() -> tuple[OpMap, ...]:
    conv = {name: name for name in ("in_channels", "out_channels", "stride", "padding")}
    conv |= {"batch": "B", "height": "input_size", "width": "input_size"}
    conv |= {"kernel_h": "kernel_size", "kernel_w": "kernel_size", "layout": "'nchw'", "tf32": "'off'"}
    vector = [OpMap(ours, _ROWS, _DTYPE, f"op = '{theirs}'") for theirs, ours in _VECTOR.items()]
    return (
        # torch.nn.Linear's weight is [out, in]; torch.bmm got two matrices as they lie
        OpMap("gemm", {**_MATRIX, "m": "CAST(B AS BIGINT) * M", "layout": "'tn'"}, _DTYPE, "op = 'linear'"),
        OpMap("bmm", {"batch": "B", **_MATRIX, "layout": "'nn'"}, _DTYPE, "op = 'bmm'"),
        OpMap("conv2d", conv, _DTYPE, "op = 'conv'"),
        *vector,
    )


def tables() -> dict[str, TableMap]:
    names = ("M", "N", "K", "H", "in_channels", "out_channels", "kernel_size", "input_size", "stride", "padding")
    ops = TableMap(
        SOURCE,
        _ops(),
        stack="'torch_eager'",  # events around one operator: launch overhead is inside
        version="ltrim(torch_version, 'p')",
        # Which variant of an element-wise kernel ran is the op itself; matrix kernels name their tile.
        kernel_source="CASE WHEN op IN ('bmm', 'linear', 'conv') THEN kernel_name ELSE op END",
        split="split",
        optional=dict.fromkeys(names, "NULL"),
    )
    return {"ops": ops}


def find(path: Path) -> list[Part]:
    """The tables of a checkout; none when it is not one. Files of a test set name their GPU in a column."""
    for subfolder in _PLACES:
        folders = sorted((path / subfolder).glob("dataset*")) if (path / subfolder).is_dir() else []
        files = [
            (split, f) for d in folders for split in ("train", "test") for f in sorted(d.glob(f"{split}/**/*.csv"))
        ]
        if files:
            return parts(("ops", file, {"split": split}) for split, file in files)
    return []


def rows(connection: DuckDBPyConnection, part: Part) -> str:
    """The part under the names that ``tables`` maps; times in microseconds."""
    cells = {
        "op": "lower(r.OPName)",
        "gpu": "r.Device",
        "latency_us": "r.Latency * 1000",
        "torch_version": 'r."Torch Version"',
        "kernel_name": 'r."Kernel Name"',
    }
    return relation(
        connection, part, cells, needed=("OPName", "Latency", "Device", "Torch Version", "Kernel Name", "B")
    )


# ---- Whole models as NeuSight measured them: ``neusight/e2e``, one row a model, mode, size and GPU. fp32 in PyTorch
# 2.1, attention in parts. Before each of 25 runs the caching allocator is emptied; the mean of the fastest five
# forward passes, and of the fastest five backward passes, add up to ``measured_s``. The loss lies between the two and
# is not timed, and gradients are added to those of the run before (github sitar-lab/NeuSight,
# neusight/Tracing/trace.py).


Mode = Literal["inference", "training"]
_MODES: dict[str, Mode] = {"inf": "inference", "train": "training"}


@dataclass(frozen=True)
class ModelCase:
    """One measured case. ``batch`` is of all GPUs together; ``neusight_s``: what NeuSight predicted, where it did."""

    gpu: str
    model: str
    mode: Mode
    seq: int
    batch: int
    fused: bool
    parallelism: str  # none, or dp4, tp4, pp4_1 (stages, microbatches)
    gpus: int
    vendor: str
    measured_s: float
    forward_s: float | None  # None where the source has the sum only
    backward_s: float | None
    neusight_s: float | None

    @property
    def single(self) -> bool:
        return self.parallelism == "none"


def model_cases(folder: Path | str | None) -> list[ModelCase]:
    """Every row with a measured time."""
    from kernelcast_lab.data.shared import read_rows  # which imports this module

    return [_case(row) for row in read_rows(folder, "neusight/e2e") if row["measured_ms"]]


def _case(row: Mapping[str, Any]) -> ModelCase:
    if row["mode"] not in _MODES:
        raise KernelcastError(f"neusight/e2e: mode {row['mode']!r} is neither {' nor '.join(_MODES)}")
    forward_s = _seconds(row["measured_fw_ms"])
    return ModelCase(
        gpu=gpu(str(row["gpu_name"])).id,
        model=str(row["model"]),
        mode=_MODES[row["mode"]],
        seq=int(row["seq"]),
        batch=int(row["batch"]),
        fused=bool(row["fused"]),
        parallelism=str(row["parallelism"]),
        gpus=int(row["num_gpus"]),
        vendor=str(row["vendor"]),
        measured_s=float(row["measured_ms"]) * 1e-3,
        forward_s=forward_s,
        backward_s=None if forward_s is None else _seconds(row["measured_bw_ms"], zero=0.0),
        neusight_s=_seconds(row["neusight_ms"]),
    )


def _seconds(cell: float | None, zero: float | None = None) -> float | None:
    """Milliseconds in seconds; an empty cell, or a 0 that stands for one, is not a time."""
    return cell * 1e-3 if cell else None if cell is None else zero
