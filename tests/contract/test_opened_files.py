"""A command opens the data files that its question needs, not the whole catalogues."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import contextlib, io, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from kernelcast.app.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(sys.argv[2:]) == 0
print(len({path for path in opened if sys.argv[1] in path.replace(chr(92), "/")}))
"""


@pytest.mark.parametrize(
    ("folder", "most", "command"),
    [
        # the GPU, one whose power was measured, and their bases
        ("hardware/catalogue", 5, "kernel gemm --m 4096 --n 4096 --k 4096 --gpu h200_sxm"),
        ("models/configs", 1, "infer llama-3.1-8b --gpu h200_sxm"),
        ("models/configs", 2, "infer qwen3.5-397b-a17b-fp8 --gpu h200_sxm --tp 8"),  # built on another file
    ],
)
def test_only_the_files_of_the_question_are_opened(folder: str, most: int, command: str) -> None:
    done = subprocess.run([sys.executable, "-c", COUNT, folder, *command.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) <= most
