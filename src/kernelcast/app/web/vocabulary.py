"""Words of questions as a stranger may give them: ids of catalogues, numbers in ranges, short texts; never a file."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Strict, StringConstraints, WithJsonSchema

from kernelcast.app.questions.load import parse_stages
from kernelcast.app.questions.shared import ROTATIONS
from kernelcast.app.questions.words import Word, options_of
from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast import PREDICTORS
from kernelcast.hardware import fabrics, gpu_ids
from kernelcast.hardware.prices import KINDS as PRICE_KINDS
from kernelcast.inference.deployment import ROUTINGS
from kernelcast.inference.layers import EXCHANGES
from kernelcast.machine.analyse import PIPELINES
from kernelcast.models import model_ids
from kernelcast.models.precision import CACHE, WEIGHTS
from kernelcast.ops import REGISTRY, kernel_class, parameters_of
from kernelcast.search.compare.candidates import BY
from kernelcast.serving.load import DISTRIBUTIONS as LENGTHS
from kernelcast.serving.load import PROCESSES as ARRIVALS
from kernelcast.serving.load import RAMPS
from kernelcast.serving.service import CAPACITIES, POLICIES, ROUTERS
from kernelcast.stacks.stack import stack_ids

TEXT_CHARS = 200
LIST_ITEMS = 64
MOST_REQUESTS = 100_000  # of a load
_OF_FILES = re.compile(r"[/\\\x00-\x1f]|\.(toml|json|jsonl|csv|parquet|py|gz|safetensors|npz)$", re.IGNORECASE)
# a number, or one with letters and separators around it: times, lists of numbers, changes of a GPU
_TEXT_PATTERN = r"^[^/\\\x00-\x1f]*$"

GPU_IDS = gpu_ids()
MODEL_IDS = model_ids()
OPS = tuple(sorted(REGISTRY))
SERVING_STACKS = tuple(stack_ids())

# what a word is one of, by its name; the kind is what the library calls it where it refuses
_NAMED: Mapping[str, tuple[str, Collection[str]]] = {
    "gpu": ("gpu", GPU_IDS),
    "model": ("model", MODEL_IDS),
    "op": ("op", OPS),
    "stack": ("stack", SERVING_STACKS),
    "dtype": ("number format of weights", WEIGHTS),
    "formats": ("number format of weights", (*WEIGHTS, "all")),
    "kv_dtype": ("number format of the KV cache", CACHE),
    "fabric": ("fabric", tuple(fabrics())),
    "between_nodes": ("fabric", tuple(fabrics())),
    "transfer_fabric": ("fabric", tuple(fabrics())),
    "predictor": ("predictor", tuple(PREDICTORS)),
    "draft_model": ("model", ("mtp", *MODEL_IDS)),
    "routing": ("routing", ROUTINGS),
    "exchange": ("exchange", EXCHANGES),
    "moe_backend": ("kernel of experts", parameters_of(kernel_class("moe"))["backend"].options),
    "router": ("router", ROUTERS),
    "schedule_policy": ("policy", POLICIES),
    "capacity_policy": ("capacity", CAPACITIES),
    "arrivals": ("kind of arrivals", ARRIVALS),
    "ramp_up_strategy": ("ramp-up strategy", RAMPS),
    "lengths": ("distribution of lengths", LENGTHS),
    "price_kind": ("kind of price", PRICE_KINDS),
    "by": ("--by", BY),
    "disaggregated": ("--disaggregated", ("also", "only", "no")),
    "cache": ("cache", tuple(ROTATIONS)),
    "without": ("limit", PIPELINES),
    "gpus": ("gpu", (*GPU_IDS, "all")),
}
# lists that a command line writes with commas: of a question, by its name
_WITH_COMMAS = {"gpus", "formats"}
_PLAN_COMMAS = {"gpus", "stack", "dtype"}
# lowest and highest of a number. They bound the work of a question; that a question makes sense the library says
_COUNTS: Mapping[str, tuple[int, int]] = {
    "batch": (1, 65_536), "input_len": (1, 16_777_216), "output_len": (1, 1_048_576), "cached": (0, 16_777_216),
    "chunk": (0, 16_777_216), "tp": (1, 1024), "pp": (1, 1024), "dp": (1, 1024), "ep": (1, 1024),
    "images": (0, 1024), "image_size": (1, 65_536), "micro_batches": (1, 1024), "draft_tokens": (0, 64),
    "redundant_experts": (0, 4096), "gpus_per_node": (1, 1024), "max_gpus": (1, 1024),
    "num_prompts": (1, MOST_REQUESTS), "max_concurrency": (1, MOST_REQUESTS), "seed": (0, 2**32 - 1),
    "num_prefixes": (1, MOST_REQUESTS),
    "num_groups": (1, MOST_REQUESTS), "prompts_per_group": (1, MOST_REQUESTS), "max_num_seqs": (1, 65_536),
    "max_num_batched_tokens": (1, 4_194_304), "num_gpu_blocks_override": (1, 2**31 - 1), "block_size": (1, 65_536),
    "replicas": (1, 1024), "prefill_replicas": (0, 1024), "prefill_tp": (1, 1024),
    "scheduler_recv_interval": (1, 65_536), "attention_dp_timeout_iters": (0, 65_536), "top": (1, 10_000),
}  # fmt: skip
_ANY_COUNT = (0, 16_777_216)
_NUMBERS: Mapping[str, tuple[float, float]] = {"acceptance": (0.0, 1.0), "gpu_memory_utilization": (0.0, 1.0)}
_ANY_NUMBER = (0.0, 1e12)


def named(kind: str, known: Collection[str], *, empty: bool = False) -> Any:
    """One of these words; another is refused as the command line refuses it. ``empty``: or none, as forms send it."""

    def check(value: str) -> str:
        if value not in known and not (empty and not value):
            raise unknown(kind, value[:TEXT_CHARS], known)
        return value

    words = [*known, *([""] if empty else [])]
    return Annotated[str, Strict(), AfterValidator(check), WithJsonSchema({"type": "string", "enum": words})]


def with_commas(kind: str, known: Collection[str]) -> Any:
    """A list of these words, or one text with commas, as the command line has it."""

    def check(value: str) -> str:
        for word in value.split(","):
            if word.strip() not in known:
                raise unknown(kind, word.strip()[:TEXT_CHARS], known)
        return value

    one = {"type": "string", "enum": [*known]}
    several = {"type": "array", "items": one, "minItems": 1, "maxItems": LIST_ITEMS}
    shown = {"anyOf": [several, {"type": "string", "description": "with commas", "examples": [",".join([*known][:2])],
                                 "maxLength": TEXT_CHARS * 10}]}  # fmt: skip
    return Annotated[str, BeforeValidator(_joined), AfterValidator(check), WithJsonSchema(shown)]


def _joined(value: Any) -> Any:
    if isinstance(value, list) and 0 < len(value) <= LIST_ITEMS and all(isinstance(word, str) for word in value):
        return ",".join(value)
    if isinstance(value, str) and len(value) <= TEXT_CHARS * 10:
        return value
    raise KernelcastError(f'a list has 1 to {LIST_ITEMS} words, as in ["h100_sxm", "h200_sxm"]')


def text(check: Callable[[str], str] | None = None) -> Any:
    """A short text that is no file's name; what it means the library checks."""

    def plain(value: str) -> str:
        if _OF_FILES.search(value.strip()):
            raise KernelcastError(f"files are not read here: {value[:TEXT_CHARS]!r}")
        return check(value) if check else value

    limits = StringConstraints(strict=True, max_length=TEXT_CHARS)
    shown = WithJsonSchema({"type": "string", "maxLength": TEXT_CHARS, "pattern": _TEXT_PATTERN})
    return Annotated[str, limits, AfterValidator(plain), shown]


def count(low: int, high: int) -> Any:
    return Annotated[int, Strict(), Field(ge=low, le=high)]


def number(low: float, high: float) -> Any:
    return Annotated[float, Strict(), Field(ge=low, le=high, allow_inf_nan=False)]


def several(one: Any) -> Any:
    return Annotated[list[one], Field(max_length=LIST_ITEMS)]


def _price(value: str) -> str:
    """GPU=USD: the GPU by its id."""
    name, equals, _ = value.partition("=")
    if equals and name.strip() not in GPU_IDS:
        raise unknown("gpu", name.strip()[:TEXT_CHARS], GPU_IDS)
    return value


def _stages(value: str) -> str:
    """RATExSECONDS,..: no more requests than ``num_prompts`` may have."""
    expected = sum(max(0.0, rate) * max(0.0, seconds) for rate, seconds in parse_stages(value))
    if not expected <= MOST_REQUESTS:
        raise KernelcastError(f"--stages {value!r} are more than {MOST_REQUESTS:,} requests")
    return value


def _or_number(value: Any) -> Any:
    """A goal may be a number of milliseconds."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value


_TIME: Any = Annotated[
    text(), BeforeValidator(_or_number),
    WithJsonSchema({"anyOf": [{"type": "string", "maxLength": 32, "pattern": r"^[0-9.]+ *(ms|s|us)?$"},
                              {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9}], "examples": ["500ms"]}),
]  # fmt: skip
_TEXTS: Mapping[str, Any] = {"price": text(_price), "stages": text(_stages)}


@functools.cache
def type_of(word: Word, command: str) -> Any:
    """What pydantic reads a word by."""
    if word.name in (_PLAN_COMMAS if command == "plan" else _WITH_COMMAS):
        return with_commas(*_NAMED[word.name])
    kinds = [kind for kind in options_of(word.kind) if kind is not type(None)]
    found: Any
    if list[str] in kinds:
        return several(named(*_NAMED[word.name]) if word.name in _NAMED else _TEXTS.get(word.name, text()))
    if str in kinds and word.flag.metavar == "TIME":
        found = _TIME
    elif word.name in _NAMED and str in kinds:
        found = named(*_NAMED[word.name])
    elif bool in kinds:
        found = Annotated[bool, Strict()]
    elif float in kinds:
        found = number(*_NUMBERS.get(word.name, _ANY_NUMBER))
    elif int in kinds:
        found = count(*_COUNTS.get(word.name, _ANY_COUNT))
    else:
        found = _TEXTS.get(word.name, text())
    return found
