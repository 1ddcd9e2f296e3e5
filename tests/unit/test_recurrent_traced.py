"""Recurrent layers traced as a GPU runs them: one op a stack, its sizes, its gradient, its kernel calls."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # noqa: E402

import kernelcast as kc  # noqa: E402
from kernelcast.errors import KernelcastError  # noqa: E402
from kernelcast.tracing import trace  # noqa: E402
from kernelcast.tracing.aten import OpSettings, op_launches  # noqa: E402
from kernelcast.tracing.traced import Op, Trace  # noqa: E402
from kernelcast.training import run_step  # noqa: E402

X = torch.empty(12, 4, 64, device="meta")  # steps, sequences, features
BATCH_FIRST = torch.empty(4, 12, 64, device="meta")


class Tagger(nn.Module):
    """A stack of recurrent layers, and a linear one."""

    def __init__(self, kind: str = "LSTM", **how: Any) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(64, 96, **how)
        self.head = nn.Linear((how.get("proj_size") or 96) * (1 + how.get("bidirectional", False)), 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x)[0])


def only(found: Trace, name: str) -> Op:
    (one,) = [op for op in found.ops if op.name == name]
    return one


def launched(op: Op, **settings: Any) -> list[dict[str, Any]]:
    return [
        {**launch.call.arguments, "count": launch.count} for launch in op_launches(op, OpSettings(**settings)).launches
    ]


@pytest.mark.parametrize(("kind", "how", "cell"), [
    ("LSTM", {}, "lstm"), ("GRU", {"bias": False}, "gru"), ("RNN", {"nonlinearity": "relu"}, "rnn"),
    ("LSTM", {"num_layers": 3, "bidirectional": True, "proj_size": 32}, "lstm"),
])  # fmt: skip
def test_a_stack_is_one_op_forward_and_one_backward(kind: str, how: dict[str, Any], cell: str) -> None:
    found = trace(Tagger(kind, **how), X, "training")
    forward, backward = only(found, "_cudnn_rnn"), only(found, "_cudnn_rnn_backward")
    layers, both, size = how.get("num_layers", 1), how.get("bidirectional", False), how.get("proj_size")
    told = {"batch": 4, "steps": 12, "input": 64, "hidden": 96, "layers": layers, "bidirectional": both, "cell": cell,
            "dtype": "tf32", "stack": "torch", "count": 1}  # fmt: skip
    told |= {"projection": size} if size else {}
    assert launched(forward) == [{"op": "recurrent", "training": True, **told}]
    assert launched(backward) == [{"op": "recurrent_backward", **told}]
    assert forward.outputs[0].shape == (12, 4, (size or 96) * (1 + both))
    assert forward.outputs[1].shape == (layers * (1 + both), 4, size or 96)
    given = [x.shape for x in backward.outputs[-len(list(getattr(nn, kind)(64, 96, **how).parameters())) :]]
    assert given == [tuple(x.shape) for x in getattr(nn, kind)(64, 96, **how).parameters()]


def test_outputs_are_those_of_a_cpu() -> None:
    layers = nn.LSTM(64, 96, 2, batch_first=True, bidirectional=True, proj_size=24)
    real = layers(torch.zeros(4, 12, 64))
    shapes: list[Any] = []

    def step(x: Any) -> Any:
        out, (state, cell) = layers.to("meta")(x)
        shapes.extend((out.shape, state.shape, cell.shape))
        return out

    trace(step, BATCH_FIRST)
    assert shapes == [real[0].shape, real[1][0].shape, real[1][1].shape]


def test_only_training_keeps_what_backward_needs() -> None:
    """Five numbers an element of the state and step, four gates and the cell; and what goes from layer to layer. cuDNN
    asked for 21,627,136 bytes in bf16 for 30 steps of 32 sequences in two layers of 512 both ways, 256 of them its own.
    """
    kept = only(trace(Tagger(), X, "training"), "_cudnn_rnn").outputs[3]
    assert kept.bytes == 12 * 4 * 96 * 5 * 4
    both = nn.LSTM(512, 512, 2, bidirectional=True).bfloat16()
    asked = trace(lambda x: both.to("meta")(x)[0], torch.empty(30, 32, 512, dtype=torch.bfloat16, device="meta"))
    assert only(asked, "_cudnn_rnn").outputs[3].bytes == 21_627_136 - 256
    assert only(trace(Tagger(), X), "_cudnn_rnn").outputs[3].bytes == 0


def test_a_batch_first_input_is_copied_and_dropout_has_its_kernels() -> None:
    found = trace(Tagger(num_layers=3, batch_first=True, dropout=0.1), BATCH_FIRST, "training")
    first, layers, dropped = launched(only(found, "_cudnn_rnn"))
    assert (first["op"], first["access"], first["reads"]) == ("pointwise", "strided", 1.0)
    assert (layers["batch"], layers["steps"]) == (4, 12)
    assert (dropped["op"], dropped["count"], dropped["rows"], dropped["cols"]) == ("dropout", 2, 48, 96)
    # input for its own gradient and for the weights'; the output's gradient comes from a copy of a transposed tensor
    assert [one["op"] for one in launched(only(found, "_cudnn_rnn_backward"))][:2] == ["pointwise", "pointwise"]
    alone = trace(Tagger(batch_first=True), torch.empty(1, 12, 64, device="meta"))
    assert [one["op"] for one in launched(only(alone, "_cudnn_rnn"))] == ["recurrent"]


def test_formats() -> None:
    forward = only(trace(Tagger().bfloat16(), X.bfloat16()), "_cudnn_rnn")
    # weights of bf16 are copied into one buffer first: two matrices and two biases of 4 x 96 rows
    fill, *copies, layers = launched(forward)
    assert (fill["op"], fill["cols"]) == ("fill", 384 * (64 + 96 + 2))
    assert [one["rows"] * one["cols"] for one in copies] == [384 * 64, 384 * 96, 384, 384]
    assert layers["dtype"] == "bf16"
    plain = only(trace(Tagger(), X), "_cudnn_rnn")
    assert launched(plain, capability="7.0")[0]["dtype"] == "fp32"  # tensor cores of Volta have no tf32
    assert launched(plain, capability="gfx942")[0]["dtype"] == "fp32"

    def narrow(x: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return tagger(x)

    tagger = Tagger().to("meta")
    assert launched(only(trace(narrow, X), "_cudnn_rnn"))[-1]["dtype"] == "bf16"


def test_inference_mode_takes_the_same_way() -> None:
    def step(x: Any) -> Any:
        with torch.inference_mode():
            return tagger(x)

    tagger = Tagger("GRU").to("meta")
    assert only(trace(step, X), "_cudnn_rnn").outputs[0].shape == (12, 4, 96)


class Packed(nn.Module):
    def __init__(self, lengths: Any) -> None:
        super().__init__()
        self.layers, self.lengths = nn.LSTM(64, 96, batch_first=True), lengths

    def forward(self, x: Any) -> Any:
        packed = pack_padded_sequence(x, self.lengths, batch_first=True)
        return pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0]


def test_a_packed_batch_has_its_rows_and_the_standard_algorithm() -> None:
    found = trace(Packed([12, 10, 10, 4]), BATCH_FIRST, "training")
    forward = only(found, "_cudnn_rnn")
    assert forward.outputs[0].shape == (36, 96)
    (told,) = launched(forward)
    assert (told["batch"], told["steps"], told["algorithm"]) == (3, 12, "standard")  # 36 rows over 12 steps
    assert [op.outputs[0].shape for op in found.ops if op.name == "new_full"] == [(12, 4, 96)]
    with pytest.raises(KernelcastError, match="lengths depend on the data"):
        trace(lambda x, lengths: Packed(lengths).to("meta")(x), (BATCH_FIRST, torch.empty(4, dtype=torch.long)))


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gated = nn.LSTMCell(64, 96), nn.GRUCell(64, 96)

    def forward(self, x: Any) -> Any:
        return self.gated(x, self.lstm(x)[0])


def test_cells_are_two_products_and_their_gates() -> None:
    found = trace(Cells(), torch.empty(4, 64, device="meta"), "training")
    names = [op.name for op in found.kernels]
    assert names[:8] == ["zeros", "mm", "mm", "_thnn_fused_lstm_cell", "mm", "mm", "_thnn_fused_gru_cell", "mean"]
    # 4 x 96 numbers of the state: gates of both products (8), the cell (1), and 2 x 4 biases for 4 sequences (2); out
    # two states, and four gates for backward
    (gates,) = launched(only(found, "_thnn_fused_lstm_cell"))
    assert (gates["reads"], gates["writes"]) == (8 + 1 + 2, 6)
    backward = launched(only(found, "_thnn_fused_gru_cell_backward"))
    assert [one["op"] for one in backward] == ["pointwise", "reduce_sum", "reduce_sum"]
    # in: the gradient of one state (1), the cell before and after (2), the gates kept (4); out: gates (4) and cell (1)
    gates, bias = launched(only(found, "_thnn_fused_lstm_cell_backward_impl"))
    assert (bias["op"], bias["rows"], bias["cols"], bias["axis"]) == ("reduce_sum", 4, 4 * 96, "rows")
    assert (gates["reads"], gates["writes"]) == (1 + 2 + 4, 4 + 1)


def test_many_kernels_of_an_op_wait_for_the_host() -> None:
    """The host launches each of so many kernels, the first through PyTorch's dispatcher; those that the GPU works on
    meanwhile are hidden."""
    step = run_step(trace(Tagger().bfloat16(), X.bfloat16()), kc.gpu("h200_sxm"))
    (layers,) = [kernel for kernel in step.kernels if kernel.op.name == "_cudnn_rnn"]
    # a product and its gates for each of 12 steps, the input's product; weights of bf16 are copied, five kernels
    assert layers.launches == 12 * 2 + 1 + 5
    at, launching_s = step.kernels.index(layers), (layers.launches - 1) * step.host.series_s
    assert step.ends_s[at] - step.launched_s[at] >= launching_s * (1 - 1e-9)
    assert step.launched_s[at + 1] - step.launched_s[at] >= launching_s * (1 - 1e-9)
    assert step.launch_bound
    graph = run_step(step.trace, step.gpu, graph=True)
    assert graph.time_s < step.time_s / 2
