"""``api.pyi``: what ``kernelcast.infer`` and its like take, word by word, for type checkers and editors.

``python -m kernelcast.app.questions.stub`` writes it anew; a test compares it.
"""

from __future__ import annotations

import json
import re
import types
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from kernelcast.app.questions import CompareQuestion, InferQuestion, PlanQuestion, PoolsQuestion, SimulateQuestion
from kernelcast.app.questions.words import Word, words_of

FILE = Path(__file__).parents[1] / "api.pyi"
_RESULTS = {
    "infer": (InferQuestion, "Inference"), "infer_pools": (PoolsQuestion, "Disaggregated"),
    "simulate": (SimulateQuestion, "Simulation"), "compare": (CompareQuestion, "Comparison"),
    "plan": (PlanQuestion, "Plan"),
}  # fmt: skip
_HEAD = '''"""Made by ``python -m kernelcast.app.questions.stub`` from the questions' own words."""

from collections.abc import Sequence
from pathlib import Path

from kernelcast.app.questions.evidence import evidence as evidence
from kernelcast.forecast import Calibration
from kernelcast.hardware import Gpu
from kernelcast.inference.disaggregated import Disaggregated
from kernelcast.inference.infer import Inference
from kernelcast.models.architecture import Architecture
from kernelcast.search.compare.compare import Comparison
from kernelcast.search.plan.plan import Plan
from kernelcast.serving.simulate import Simulation
'''


def text() -> str:
    """The whole file."""
    return "\n".join([_HEAD, *(_function(name, *one) for name, one in _RESULTS.items())]) + "\n"


def _function(name: str, question: Any, result: str) -> str:
    hints = get_type_hints(question, include_extras=True)
    words = words_of(question)
    alone = [word for word in words if word.name in ("model", "gpu", "gpus")]
    lines = [*(_line(word, hints) for word in alone), "    *,"]
    lines += [_line(word, hints) for word in words if word not in alone]
    return "\n".join([f"def {name}(", *lines, f") -> {result}: ..."])


def _line(word: Word, hints: dict[str, Any]) -> str:
    kind = word.flag.python or _written(get_args(hints[word.name])[0])
    return f"    {word.name}: {kind}," if word.required else f"    {word.name}: {kind} = {_default(word.default)},"


def _default(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _written(kind: Any) -> str:
    """A type as one writes it."""
    if isinstance(kind, types.UnionType):
        return " | ".join(_written(one) for one in get_args(kind))
    if get_origin(kind) is not None:
        return re.sub(r"[\w.]+\.", "", str(kind))
    return "None" if kind is type(None) else kind.__name__


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
