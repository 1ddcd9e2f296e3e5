"""Bodies of the API's questions, made from the questions' own words; those that name files are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, create_model

from kernelcast.app.questions import Word
from kernelcast.app.web.asked import QUESTIONS, web_words
from kernelcast.app.web.vocabulary import TEXT_CHARS, type_of
from kernelcast.errors import KernelcastError
from kernelcast.ops import REGISTRY, parameters_of
from kernelcast.ops.base import Parameter

_PARAMETERS, _LENGTHS = 64, 4096  # of an op; of a list of lengths
_LAYERS, _LARGEST, _LONGEST = 1024, 2**40, 8192  # of a model's config: layers, any number, any list
_NEEDED = ("gpu", "gpus")  # by every question that has it, whatever the command line's default
_EXAMPLES: Mapping[str, dict[str, Any]] = {
    "kernel": {"op": "gemm", "gpu": "h200_sxm", "parameters": {"m": 4096, "n": 4096, "k": 4096}},
    "infer": {"model": "llama-3.1-8b", "gpu": "h200_sxm", "batch": 8, "input_len": 2048, "output_len": 256},
    "simulate": {"model": "llama-3.1-8b", "gpu": "h100_sxm", "request_rate": 4, "num_prompts": 100, "input_len": 512,
                 "output_len": 128, "goodput": ["ttft:500"]},
    "compare": {"model": "llama-3.1-8b", "gpus": ["h100_sxm", "h200_sxm"], "batch": 8},
    "plan": {"model": "llama-3.1-8b", "gpus": ["h100_sxm"], "max_gpus": 4, "request_rate": 4, "num_prompts": 200,
             "ttft_p99": "1s", "tpot_p99": "50ms"},
}  # fmt: skip


def _bounded(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config whose reading is bounded: layers, numbers, lists."""
    open_values: list[Any] = [config]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            if any(len(key) > TEXT_CHARS for key in value):
                raise KernelcastError(f"config: a key has at most {TEXT_CHARS} characters")
            layers = [value.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers", "depth")]
            if any(isinstance(number, int | float) and number > _LAYERS for number in layers):
                raise KernelcastError(f"config: a model has at most {_LAYERS:,} layers here")
            open_values += value.values()
        elif isinstance(value, list):
            if len(value) > _LONGEST:
                raise KernelcastError(f"config: a list has at most {_LONGEST:,} entries here")
            open_values += value
        elif isinstance(value, int | float) and abs(value) > _LARGEST:
            raise KernelcastError(f"config: a number is at most {_LARGEST:,} here, not {value:g}")
    return config


def _not_a_folder(name: str) -> str:
    if name == "config":  # the command line calls a config.json by its folder
        raise KernelcastError("name: a model of its own is called something, not 'config'")
    return name


Config = Annotated[dict[str, Any], AfterValidator(_bounded)]
OwnName = Annotated[
    str,
    StringConstraints(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"),
    AfterValidator(_not_a_folder),
]
_OWN: dict[str, Any] = {
    "config": (Config | None, Field(None, description="a Hugging Face config.json, in place of a model's name")),
    "name": (OwnName, Field("my-model", description="what a model with a config of its own is called")),
}
Value = (
    Annotated[bool, Field(strict=True)] | Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True)]
    | Annotated[str, StringConstraints(strict=True, max_length=TEXT_CHARS)]
    | Annotated[list[Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]], Field(max_length=_LENGTHS)]
)  # fmt: skip


class Body(BaseModel):
    """What all of them are: strict, and nothing beside their words."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    def given(self) -> dict[str, Any]:
        """The words that were said, and are not as usual."""
        told = self.model_dump(exclude_unset=True, exclude_none=True)
        fields = type(self).model_fields
        return {name: _typed(value) for name, value in told.items() if value != fields[name].default}


def _typed(value: Any) -> Any:
    """4 rather than 4.0, as a person types it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _field(word: Word, command: str) -> tuple[Any, Any]:
    kind, about = type_of(word, command), word.flag.help
    if word.required or (word.name in _NEEDED and command != "plan"):
        return kind, Field(description=about)
    return kind | None, Field(word.default, description=about)


def _made(command: str) -> type[Body]:
    """The body of a question."""
    words = [word for word in web_words(command) if word.name != "parameters"]
    fields = {word.name: _field(word, command) for word in words}
    if command == "kernel":
        fields["parameters"] = (
            dict[Annotated[str, StringConstraints(max_length=TEXT_CHARS)], Value],
            Field(default_factory=dict, max_length=_PARAMETERS, description="of the op: GET /api/v1/ops lists them"),
        )
    else:
        fields["model"] = (fields["model"][0] | None, Field(None, description="a name of GET /api/v1/models"))
        fields |= _OWN
    extra: Any = {"examples": [_EXAMPLES[command]]}
    make: Any = create_model  # whose fields are known when it runs
    made: type[Body] = make(f"{command.title()}Body", __base__=Body, __doc__=QUESTIONS[command].__doc__, **fields)
    made.model_config = {**made.model_config, "json_schema_extra": extra}
    made.model_rebuild(force=True)
    return made


BODIES: Mapping[str, type[Body]] = {command: _made(command) for command in QUESTIONS}


def op_schema(op: str) -> dict[str, Any]:
    """The parameters of an op as JSON Schema."""
    specs = parameters_of(REGISTRY[op]).values()
    return {
        "type": "object",
        "title": f"{op} parameters",
        "properties": {spec.name: _schema(spec) for spec in specs},
        "required": [spec.name for spec in specs if spec.required],
        "additionalProperties": False,
    }


def _schema(spec: Parameter) -> dict[str, Any]:
    number: dict[str, Any] = {"type": "number" if spec.type == "real" else "integer", "minimum": spec.low,
                              "maximum": spec.high}  # fmt: skip
    kinds: dict[str, dict[str, Any]] = {
        "size": number,
        "real": number,
        "flag": {"type": "boolean"},
        "choice": {"type": "string", "enum": [*spec.options]},
        "lengths": {"type": "array", "items": number, "minItems": 1, "maxItems": _LENGTHS},
    }
    usual = {} if spec.required or spec.default is None else {"default": spec.default}
    return {**kinds[spec.type], "description": spec.help.replace("``", ""), **usual}
