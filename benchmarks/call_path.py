"""How many files and functions of the product a command goes through: what a newcomer has to walk to follow it.

    python benchmarks/call_path.py                 # four commands; exits 1 if one goes through too many
    python benchmarks/call_path.py --files infer   # the files of one, with the functions that ran in each

Counts functions that ran (not the importing of a module), in the process of the command and its threads.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import subprocess
import sys
import threading
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

COMMANDS = {
    "kernel": ("kernel gemm --m 4096 --n 4096 --k 4096 --gpu h200_sxm", 35),
    "infer": ("infer llama-3.1-8b --gpu h200_sxm --batch 8 --input-len 2048 --output-len 256", 65),
    "simulate": ("simulate llama-3.1-8b --gpu h200_sxm --request-rate 8 --num-prompts 50", 75),
    "compare": ("compare llama-3.1-8b --gpus l40s,h100_sxm --batch 8", 75),
}


def walked(arguments: list[str]) -> dict[str, list[str]]:
    """Functions that ran, by file, of the command in this process."""
    ran: defaultdict[str, set[str]] = defaultdict(set)

    def profile(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:  # a module or a class body
            return
        if "/src/kernelcast/" in code.co_filename and not code.co_name.startswith("<"):
            ran[code.co_filename.rpartition("/src/kernelcast/")[2]].add(code.co_qualname)

    main = import_module("kernelcast.app.cli" if find_spec("kernelcast.app") else "kernelcast.cli").main
    threading.setprofile(profile)
    sys.setprofile(profile)
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    sys.setprofile(None)
    assert code == 0, arguments
    return {name: sorted(functions) for name, functions in sorted(ran.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", choices=COMMANDS, help="list the files of one command")
    parser.add_argument("--walk", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.walk:
        print(json.dumps(walked(options.walk)))
        return 0
    too_many = False
    for name in (options.files,) if options.files else COMMANDS:
        command, most = COMMANDS[name]
        run = [sys.executable, str(Path(__file__)), "--walk", *command.split()]  # each in a process of its own
        files = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
        too_many |= len(files) > most
        print(f"{name:9} {len(files):4} files (at most {most}), {sum(map(len, files.values())):4} functions")
        for path, functions in files.items() if options.files else ():
            print(f"    {path}: {', '.join(functions)}")
    return int(too_many)


if __name__ == "__main__":
    sys.exit(main())
