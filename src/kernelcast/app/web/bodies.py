"""Bodies of the API's questions, made from the questions' parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, create_model, model_validator

from kernelcast.app.questions.parameters import CommandParameter
from kernelcast.app.web.parameters import QUESTIONS, TEXT_CHARS, type_of, web_parameters
from kernelcast.errors import KernelcastError
from kernelcast.ops import REGISTRY, parameters_of
from kernelcast.ops.base import Parameter
from kernelcast.stacks.engine_flags import canonical_names

_PARAMETERS, _LENGTHS = 64, 4096  # of an op; of a list of lengths
_LAYERS, _LARGEST, _LONGEST = 1024, 2**40, 8192  # of a model's config: layers, any number, any list
_REQUIRED = ("gpu", "gpus")  # by every question that has it, whatever the command line's default
_EXAMPLES: Mapping[str, dict[str, Any]] = {
    "kernel": {"op": "gemm", "gpu": "h200_sxm", "parameters": {"m": 4096, "n": 4096, "k": 4096}},
    "infer": {"model": "llama-3.1-8b", "gpu": "h200_sxm", "batch": 8, "input_len": 2048, "output_len": 256},
    "simulate": {"model": "llama-3.1-8b", "gpu": "h100_sxm", "request_rate": 4, "num_prompts": 100, "input_len": 512,
                 "output_len": 128, "goodput": ["ttft:500"]},
    "compare": {"model": "llama-3.1-8b", "gpus": ["h100_sxm", "h200_sxm"], "batch": 8},
    "plan": {"model": "llama-3.1-8b", "gpus": ["h100_sxm"], "max_gpus": 4, "request_rate": 4, "num_prompts": 200,
             "ttft_p99": "1s", "tpot_p99": "50ms"},
    "train": {"model": "llama-3.1-8b", "gpus": "8xh100_sxm", "tp": 2, "global_batch": 64, "precision": "fp8_current"},
}  # fmt: skip


def _bounded(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config whose reading is bounded: layers, numbers, lists."""
    stack: list[Any] = [config]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if any(len(key) > TEXT_CHARS for key in value):
                raise KernelcastError(f"config: a key has at most {TEXT_CHARS} characters")
            layers = [value.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers", "depth")]
            if any(isinstance(number, int | float) and number > _LAYERS for number in layers):
                raise KernelcastError(f"config: a model has at most {_LAYERS:,} layers here")
            stack += value.values()
        elif isinstance(value, list):
            if len(value) > _LONGEST:
                raise KernelcastError(f"config: a list has at most {_LONGEST:,} entries here")
            stack += value
        elif isinstance(value, int | float) and abs(value) > _LARGEST:
            raise KernelcastError(f"config: a number is at most {_LARGEST:,} here, not {value:g}")
    return config


def _not_a_folder(name: str) -> str:
    if name == "config":  # the command line calls a config.json by its folder
        raise KernelcastError("name: a model by its config needs a name other than 'config'")
    return name


Config = Annotated[dict[str, Any], AfterValidator(_bounded)]
ConfigName = Annotated[
    str,
    StringConstraints(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"),
    AfterValidator(_not_a_folder),
]
_CONFIG: dict[str, Any] = {
    "config": (Config | None, Field(None, description="a Hugging Face config.json, in place of a model's name")),
    "name": (ConfigName, Field("my-model", description="what a model that is given by its config is called")),
}
Value = (
    Annotated[bool, Field(strict=True)] | Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True)]
    | Annotated[str, StringConstraints(strict=True, max_length=TEXT_CHARS)]
    | Annotated[list[Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]], Field(max_length=_LENGTHS)]
)  # fmt: skip


class QuestionBody(BaseModel):
    """Strict, and nothing beside the parameters."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, given: Any) -> Any:
        """Engines' names of parameters as ours."""
        return canonical_names(given, cls.model_fields) if isinstance(given, dict) else given

    def arguments(self) -> dict[str, Any]:
        """The parameters that differ from their defaults."""
        given = self.model_dump(exclude_unset=True, exclude_none=True)
        fields = type(self).model_fields
        return {name: _typed(value) for name, value in given.items() if value != fields[name].default}


def _typed(value: Any) -> Any:
    """4 rather than 4.0, as a person types it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _field(parameter: CommandParameter, command: str) -> tuple[Any, Any]:
    annotation, about = type_of(parameter, command), parameter.help
    if parameter.required or (parameter.name in _REQUIRED and command != "plan"):
        return annotation, Field(description=about)
    return annotation | None, Field(parameter.default, description=about)


def _body(command: str) -> type[QuestionBody]:
    parameters = [parameter for parameter in web_parameters(command) if parameter.name != "parameters"]
    fields = {parameter.name: _field(parameter, command) for parameter in parameters}
    if command == "kernel":
        fields["parameters"] = (
            dict[Annotated[str, StringConstraints(max_length=TEXT_CHARS)], Value],
            Field(default_factory=dict, max_length=_PARAMETERS, description="of the op: GET /api/v1/ops lists them"),
        )
    else:
        fields["model"] = (fields["model"][0] | None, Field(None, description="a name of GET /api/v1/models"))
        fields |= _CONFIG
    extra: Any = {"examples": [_EXAMPLES[command]]}
    create: Any = create_model  # whose fields are known when it runs
    body: type[QuestionBody] = create(
        f"{command.title()}Body", __base__=QuestionBody, __doc__=QUESTIONS[command].__doc__, **fields
    )
    body.model_config = {**body.model_config, "json_schema_extra": extra}
    body.model_rebuild(force=True)
    return body


BODIES: Mapping[str, type[QuestionBody]] = {command: _body(command) for command in QUESTIONS}


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
    types: dict[str, dict[str, Any]] = {
        "size": number,
        "real": number,
        "flag": {"type": "boolean"},
        "choice": {"type": "string", "enum": [*spec.options]},
        "lengths": {"type": "array", "items": number, "minItems": 1, "maxItems": _LENGTHS},
    }
    default = {} if spec.required or spec.default is None else {"default": spec.default}
    return {**types[spec.type], "description": spec.help.replace("``", ""), **default}
