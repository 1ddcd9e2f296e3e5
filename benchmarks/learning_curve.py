"""How fast `kernelcast calibrate` learns a GPU that the weights never saw.

    python benchmarks/learning_curve.py --data measured --gpu h200_sxm --family gemm -o .cache/learning_curve

needs PyTorch (it fits weights without the GPU) and measured tables: a folder as `kernelcast data import` writes it.
Prints and writes learning_curve.md, .json and .png.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from kernelcast_lab.evaluate.learning_curve import COUNTS, CurvePlan, CurvePoint, learning_curve, write_curves
from kernelcast_lab.fit.families import family_columns


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, action="append", help="measured tables; may be repeated")
    parser.add_argument("--gpu", action="append", required=True, help="GPU to leave out; may be repeated")
    parser.add_argument("--family", action="append", required=True, help="may be repeated")
    parser.add_argument("--source", help="only calls of this source calibrate and test")
    parser.add_argument("--by", action="append", default=[], help="a curve for each op, dtype, …; may be repeated")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="numbers of calls")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=60_000, help="rows of the fit")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    plan = CurvePlan(counts=tuple(int(text) for text in given.counts.split(",")), repeats=given.repeats)
    main_recipe = replace(plan.settings.main, epochs=given.epochs)
    plan = replace(plan, settings=replace(plan.settings, rows=given.rows, main=main_recipe))
    points: list[CurvePoint] = []
    for family in given.family:
        columns = family_columns(given.data, family)
        for gpu in given.gpu:
            points += learning_curve(
                columns, family, gpu, plan, source=given.source, by=given.by, seed=given.seed, say=_say
            )
            path = write_curves(points, given.out)
    print(path.read_text())


if __name__ == "__main__":
    main()
