"""Parameters of questions as the API takes them: ids of catalogues, numbers in ranges, short texts; never a file."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Strict, StringConstraints, WithJsonSchema

from kernelcast.app.questions.compare import CompareQuestion
from kernelcast.app.questions.infer import DISAGGREGATED, InferQuestion
from kernelcast.app.questions.kernel import KernelQuestion
from kernelcast.app.questions.load import parse_stages
from kernelcast.app.questions.parameters import CommandParameter, command_parameters
from kernelcast.app.questions.plan import PlanQuestion
from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.app.questions.train import TrainQuestion
from kernelcast.app.questions.values import union_members
from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import gpu_ids
from kernelcast.ops import REGISTRY

QUESTIONS: Mapping[str, Any] = {
    question.command: question
    for question in (KernelQuestion, InferQuestion, SimulateQuestion, CompareQuestion, PlanQuestion, TrainQuestion)
}
_LEFT_OUT = {
    "infer": DISAGGREGATED,
    **dict.fromkeys(("simulate", "plan"), ("trace_format", "skip_bad", "rate_scale", "limit")),  # of a file
}
TEXT_CHARS = 200
LIST_ITEMS = 64
MAX_REQUESTS = 100_000  # of a load
_OF_FILES = re.compile(r"[/\\\x00-\x1f]|\.(toml|json|jsonl|csv|parquet|py|gz|safetensors|npz)$", re.IGNORECASE)
_TEXT_PATTERN = r"^[^/\\\x00-\x1f]*$"

GPU_IDS = gpu_ids()
OPS = tuple(sorted(REGISTRY))
# what the library calls a choice where it refuses, if not by the parameter's name
_NOUNS = {"gpus": "gpu", "draft_model": "model", "between_nodes": "fabric", "transfer_fabric": "fabric",
          "without": "limit", "dtype": "number format of weights", "formats": "number format of weights",
          "kv_dtype": "number format of the KV cache"}  # fmt: skip
# lists that the command line writes with commas
_WITH_COMMAS = {"gpus", "formats"}
_PLAN_COMMAS = {"gpus", "stack", "dtype"}
# lowest and highest of a number. They bound the work of a question; that a question makes sense the library says
_COUNTS: Mapping[str, tuple[int, int]] = {
    "batch": (1, 65_536), "input_len": (1, 16_777_216), "output_len": (1, 1_048_576), "cached": (0, 16_777_216),
    "micro_batch": (1, 1024), "global_batch": (1, 1_048_576), "seq": (1, 16_777_216), "cp": (1, 1024),
    "expert_tp": (1, 1024), "zero": (0, 3), "virtual_stages": (1, 1024), "lora_rank": (1, 65_536),
    "chunk": (0, 16_777_216), "tp": (1, 1024), "pp": (1, 1024), "dp": (1, 1024), "ep": (1, 1024),
    "images": (0, 1024), "image_size": (1, 65_536), "micro_batches": (1, 1024), "draft_tokens": (0, 64),
    "dp_size": (1, 1024), "redundant_experts": (0, 4096), "gpus_per_node": (1, 1024), "max_gpus": (1, 1024),
    "num_prompts": (1, MAX_REQUESTS), "max_concurrency": (1, MAX_REQUESTS), "seed": (0, 2**32 - 1),
    "num_prefixes": (1, MAX_REQUESTS),
    "num_groups": (1, MAX_REQUESTS), "prompts_per_group": (1, MAX_REQUESTS), "max_num_seqs": (1, 65_536),
    "max_num_batched_tokens": (1, 4_194_304), "num_gpu_blocks_override": (1, 2**31 - 1), "block_size": (1, 65_536),
    "replicas": (1, 1024), "prefill_replicas": (0, 1024), "prefill_tp": (1, 1024),
    "scheduler_recv_interval": (1, 65_536), "attention_dp_timeout_iters": (0, 65_536), "top": (1, 10_000),
}  # fmt: skip
_ANY_COUNT = (0, 16_777_216)
_NUMBERS: Mapping[str, tuple[float, float]] = {"acceptance": (0.0, 1.0), "gpu_memory_utilization": (0.0, 1.0)}
_ANY_NUMBER = (0.0, 1e12)


def choice(noun: str, choices: Collection[str], *, empty: bool = False) -> Any:
    """One of these; another is refused as the command line refuses it. ``empty``: or none, as forms send it."""

    def check(value: str) -> str:
        if value not in choices and not (empty and not value):
            raise unknown(noun, value[:TEXT_CHARS], choices)
        return value

    enum = [*choices, *([""] if empty else [])]
    return Annotated[str, Strict(), AfterValidator(check), WithJsonSchema({"type": "string", "enum": enum})]


def comma_list(noun: str, choices: Collection[str]) -> Any:
    """A list of these, or a text with commas, as the command line has it."""

    def check(value: str) -> str:
        for item in map(str.strip, value.split(",")):
            if item not in choices:
                raise unknown(noun, item[:TEXT_CHARS], choices)
        return value

    items = {"type": "string", "enum": [*choices]}
    schema = {"anyOf": [{"type": "array", "items": items, "minItems": 1, "maxItems": LIST_ITEMS},
                        {"type": "string", "description": "with commas", "examples": [",".join([*choices][:2])],
                         "maxLength": TEXT_CHARS * 10}]}  # fmt: skip
    return Annotated[str, BeforeValidator(_joined), AfterValidator(check), WithJsonSchema(schema)]


def _joined(value: Any) -> Any:
    if isinstance(value, list) and 0 < len(value) <= LIST_ITEMS and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if isinstance(value, str) and len(value) <= TEXT_CHARS * 10:
        return value
    raise KernelcastError(f'a list has 1 to {LIST_ITEMS} names, as in ["h100_sxm", "h200_sxm"]')


def text(check: Callable[[str], str] | None = None) -> Any:
    """A short text that is no file's name; what it means the library checks."""

    def plain(value: str) -> str:
        if _OF_FILES.search(value.strip()):
            raise KernelcastError(f"files are not read here: {value[:TEXT_CHARS]!r}")
        return check(value) if check else value

    limits = StringConstraints(strict=True, max_length=TEXT_CHARS)
    schema = WithJsonSchema({"type": "string", "maxLength": TEXT_CHARS, "pattern": _TEXT_PATTERN})
    return Annotated[str, limits, AfterValidator(plain), schema]


def _price(value: str) -> str:
    """GPU=USD: the GPU by its id."""
    name, equals, _ = value.partition("=")
    if equals and name.strip() not in GPU_IDS:
        raise unknown("gpu", name.strip()[:TEXT_CHARS], GPU_IDS)
    return value


def _stages(value: str) -> str:
    """RATExSECONDS,..: no more requests than ``num_prompts`` may have."""
    expected = sum(max(0.0, rate) * max(0.0, seconds) for rate, seconds in parse_stages(value))
    if not expected <= MAX_REQUESTS:
        raise KernelcastError(f"`stages` {value!r} are more than {MAX_REQUESTS:,} requests")
    return value


def _as_read(parameter: CommandParameter) -> Callable[[Any], Any]:
    """Other spellings of a name, as bfloat16 for bf16."""

    def read(value: Any) -> Any:
        return parameter.reads(value) or value if parameter.reads and isinstance(value, str) else value

    return read


def _or_number(value: Any) -> Any:
    """A goal may be a number of milliseconds."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value


_TIME: Any = Annotated[
    text(), BeforeValidator(_or_number),
    WithJsonSchema({"anyOf": [{"type": "string", "maxLength": 32, "pattern": r"^[0-9.]+ *(ms|s|us)?$"},
                              {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9}], "examples": ["500ms"]}),
]  # fmt: skip
_TEXTS: Mapping[str, Any] = {"price": text(_price), "stages": text(_stages)}


def web_parameters(command: str) -> list[CommandParameter]:
    """The parameters of a question that may be given over the network: none that names a file."""
    left_out = _LEFT_OUT.get(command, ())
    parameters = command_parameters(QUESTIONS[command])
    return [parameter for parameter in parameters if not parameter.is_file and parameter.name not in left_out]


def _types(parameter: CommandParameter) -> list[Any]:
    return [option for option in union_members(parameter.type) if option is not type(None)]


def parameter_fields(parameter: CommandParameter) -> dict[str, Any]:
    """A parameter as JSON, for a form."""
    types = _types(parameter)
    names = [str(option) if option == list[str] else getattr(option, "__name__", str(option)) for option in types]
    default = None if parameter.default is MISSING or callable(parameter.default) else parameter.default
    low, high = _range(parameter.name, types)
    return {"name": parameter.name, "flag": parameter.option or None, "type": " or ".join(names), "default": default,
            "help": parameter.help, "panel": parameter.panel, "choices": list(_choices(parameter)) or None,
            "minimum": low, "maximum": high, "unless_given": parameter.unless_given}  # fmt: skip


def _choices(parameter: CommandParameter) -> tuple[str, ...]:
    values = tuple(parameter.values()) if parameter.values else ()
    return (*values, "all") if parameter.name == "gpus" and values and "all" not in values else values


def _range(name: str, types: list[Any]) -> tuple[float | None, float | None]:
    if float in types:
        return _NUMBERS.get(name, _ANY_NUMBER)
    return _COUNTS.get(name, _ANY_COUNT) if int in types and bool not in types else (None, None)


@functools.cache
def type_of(parameter: CommandParameter, command: str) -> Any:
    """What pydantic reads a parameter by."""
    name, types, choices = parameter.name, _types(parameter), _choices(parameter)
    noun = _NOUNS.get(name, name.replace("_", " "))
    if name in (_PLAN_COMMAS if command == "plan" else _WITH_COMMAS) and choices:
        return comma_list(noun, choices)
    if list[str] in types:
        item: Any = choice(noun, choices) if choices else _TEXTS.get(name, text())
        return Annotated[list[item], Field(max_length=LIST_ITEMS)]
    low, high = _range(name, types)
    number = Field(ge=low, le=high, allow_inf_nan=False) if float in types else Field(ge=low, le=high)
    if str in types and parameter.metavar == "TIME":
        return _TIME
    if choices and str in types:
        named = choice(noun, choices)
        return Annotated[named, BeforeValidator(_as_read(parameter))] if parameter.reads else named
    for plain in (bool, float, int):
        if plain in types:
            return Annotated[plain, Strict()] if plain is bool else Annotated[plain, Strict(), number]
    return _TEXTS.get(name, text())
