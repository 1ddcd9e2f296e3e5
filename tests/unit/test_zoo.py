"""Whole models that are not plain decoders: replayed against what two machines measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")

from kernelcast.app.cli import main
from kernelcast.errors import KernelcastError
from kernelcast.training.step import STEP
from kernelcast_lab.validate.kernels import Case, read_cases
from kernelcast_lab.validate.models import Replayed, measured, replay, summary

ZOO = Path(__file__).parents[2] / "validation" / "zoo"
LONG = ("mamba_130m", "t5_large/training", "gru_tagger/training")  # tens of thousands of ops
# every second: `kernelcast validate --models` replays all of them
WORDS = sorted({case.id for case in read_cases(ZOO) if not case.id.startswith(LONG)})[::2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> list[Replayed]:
    return replay(ZOO, STEP, WORDS)


def test_cases_were_measured_on_both_machines() -> None:
    cases = read_cases(ZOO)
    assert len({case.build for case in cases}) >= 24 and {case.mode for case in cases} == {"inference", "training"}
    for machine in measured(ZOO):
        left = {case.function for case in set(cases) - {model.case for model in machine.models}}
        assert left <= {"graph_sage", "gat"}  # there was no time for their walls on the second
        assert machine.gpu == "h200_sxm"


def test_kernels_of_the_zoo(found: list[Replayed]) -> None:
    """No kernel of a whole model is in any fit."""
    told = summary(found)
    assert told["cases"] == len(WORDS) and told["kernels_error"] < 8
    # grouped filters of 56 channels loop over slow kernels; an LSTM's kernels of two streams slow one another
    known = {"regnet_y_8gf/training/bf16/32", "lstm_language_model/inference/bf16/32x35"}
    far = {one.measured.case.id for one in found if abs(one.kernel_error) > 20.5}
    assert far <= known


# Over all 77 cases 8.6 and 13.6 (`kernelcast validate validation --models`): what is nearer for KernelBench is
# farther here.
MISSED = pytest.mark.xfail(strict=True, reason="walls with the machine's own host are 10.4 and 14.2% off")


@pytest.mark.parametrize(
    ("machine", "own"),
    [pytest.param("h200_sxm", 10.0, marks=MISSED), pytest.param("h200_sxm_machine_2", 14.0, marks=MISSED)],
)
def test_walls_of_the_zoo(found: list[Replayed], machine: str, own: float) -> None:
    """The first machine's speed is read off the other half of the models, the second's host was measured."""
    told = summary(found)["machines"][machine]
    assert told["wall_error"] < 20 and told["wall_error_own_host"] < own
    assert told["inside"] > 0.75 and told["launch_bound_told_right"] > 0.78


def test_no_op_is_costed_by_bytes_alone(found: list[Replayed]) -> None:
    assert min(one.step.coverage for one in found) > 0.99


def test_the_command_replays_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(ZOO.parent), "--models", "--only", "vgg16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {line["machine"] for line in told["cases"]} == {"h200_sxm", "h200_sxm_machine_2"}
    assert told["summary"]["cases"] == 2 and told["summary"]["kernels_error"] < 10
    assert main(["validate", str(ZOO.parent), "--models", "--only", "vgg16"]) == 0
    assert "own host" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "error"), [
    (["--only", "toaster"], "no measured model whose case holds toaster"),
    (["--only", "vgg16", "--predictor", "oracle"], "unknown predictor"),
])  # fmt: skip
def test_bad_words_end_in_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(ZOO.parent), "--models", *words]) == 2
    assert error in capsys.readouterr().err


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match=r"cases\.toml is missing"):
        read_cases(tmp_path)
    (tmp_path / "cases.toml").write_text("cases = [[1, 2]]")
    with pytest.raises(KernelcastError, match="not a list of"):
        read_cases(tmp_path)
    (tmp_path / "h200_sxm.json.gz").write_bytes(b"no")
    with pytest.raises(KernelcastError, match="not a file of measured models"):
        measured(tmp_path)


def test_a_case_tells_its_file_and_function() -> None:
    case = Case("vision.py:resnet50", "inference", "bf16", "adamw", 8, 0)
    assert (case.file, case.function, case.id) == ("vision.py", "resnet50", "resnet50/inference/bf16/8")
