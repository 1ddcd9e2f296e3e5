"""A training step of a transformer on many GPUs: its layout, and what a run costs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions import shared
from kernelcast.app.questions.parameters import argument, option
from kernelcast.app.questions.training_job import JobParameters, whole_numbers
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.models.architecture import Architecture
    from kernelcast.training.job import TrainingJob
    from kernelcast.training.layout import TrainingLayout
    from kernelcast.training.run import TrainingRun

# 512xH100, 512 H100, 512; H100:512, H100 x 512
_COUNTS = (
    re.compile(r"(?P<count>\d+)(?:\s*[x×*]\s*(?P<gpu>.+)|\s*(?P<name>[a-z].*))?", re.IGNORECASE),
    re.compile(r"(?P<gpu>[a-z].*?)\s*(?::|\s[x×*])\s*(?P<count>\d+)", re.IGNORECASE),
)
LONGEST = 4096  # tokens of a sequence by default
PER_STAGE = 4  # micro-batches of a rank by default, for each pipeline stage
_run = partial(option, panel="Run")


def _counted(text: str) -> tuple[str, int | None]:
    """Which GPU, "" where none is named; and how many, None where no number is. 4090 and 3060 Ti are GPUs."""
    match = next((match for pattern in _COUNTS if (match := pattern.fullmatch(text))), None)
    if match is None or _known(text):
        return text, None
    found = match.groupdict()
    return found["gpu"] or found.get("name") or "", int(found["count"])


def _known(name: str) -> bool:
    """Whether the whole text is the name of a GPU."""
    from kernelcast.hardware import gpu

    try:
        gpu(name)
    except KernelcastError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class TrainQuestion(shared.PredictorParameters, JobParameters):
    """A training step of a transformer; None: not given."""

    command: ClassVar[str] = "train"

    model: Annotated[
        Any,
        argument("MODEL", "a name of `kernelcast models`, or a config.json", type=str | None, values=shared.model_names,
                 annotation="str | Path | Architecture | None"),
    ] = None  # fmt: skip
    tokens: Annotated[float | None, _run(help="tokens of the whole training: days, dollars, energy")] = None
    prices: shared.PricesFile = None
    price: shared.Price = None
    price_kind: shared.PriceKind = "on_demand"
    checkpoint_every: Annotated[int | None, _run(help="steps between checkpoints", minimum=1)] = None
    checkpoint_s: Annotated[float, _run(help="seconds that each stops the training")] = 0.0
    mtbf: Annotated[float | None, _run(help="hours between failures of one GPU (Llama 3: 50700)")] = None
    restart_s: Annotated[float, _run(help="seconds from a failure to the next step")] = 600.0
    jitter: Annotated[float, _run(help="standard deviation of a GPU's time over its mean: the slowest counts")] = 0.0
    set: shared.Changes = None
    power_cap: shared.PowerCap = None

    def answer(self, on_progress: Callable[[int, int], None] | None = None) -> TrainingRun:
        """The step, and the run that it is of; with ``search``, of the fastest layout. ``on_progress``: of a search,
        takes layouts that are forecast, and all."""
        from kernelcast.training.job_memory import check_fits
        from kernelcast.training.transformer_step import forecast

        asked, unread = self._with_config()
        asked._check_run()
        if asked.search:
            return asked._searched(unread, on_progress)
        job, filled = asked.job()
        try:
            step = forecast(job, asked._step_conditions)
        except KernelcastError:  # a buffer that no GPU holds
            check_fits(job)
            raise
        return asked._whole(step, filled, unread)

    def _searched(self, unread: tuple[str, ...], on_progress: Callable[[int, int], None] | None) -> TrainingRun:
        """The fastest of all layouts with the sizes that are given."""
        from kernelcast.search.training import SearchSpace, search_layouts

        model, gpu, count = self._model(), *self._gpus()
        if self.global_batch is None or count is None:
            raise KernelcastError("`search` compares layouts of one batch on so many GPUs: give `global_batch`, and "
                                  "`gpus` as in 64xH100")  # fmt: skip
        self.refuse(("dp", "schedule", "stage_layers", "layers_per_virtual_stage", "sequence_parallel",
                     "distributed_optimizer"), "`search` finds the layout")  # fmt: skip
        sizes = ("tp", "pp", "cp", "ep", "expert_tp", "virtual_stages", "micro_batch", "zero")
        space = {name: (getattr(self, name),) for name in sizes if getattr(self, name) is not None}
        filled: dict[str, Any] = {}
        found = search_layouts(
            model, gpu, count, global_batch=self.global_batch, base=self._base(), conditions=self._step_conditions,
            progress=on_progress,
            space=SearchSpace(**space, recompute=(self._recompute(),) if self.recompute else ()),
            **self._settings(model, filled),
        )  # fmt: skip
        layout = found.best.job.layout
        filled |= {name: getattr(layout, name) for name in ("dp", *sizes[:6]) if name not in space}
        return replace(self._whole(found.best, filled, unread), search=found)

    def _with_config(self) -> tuple[TrainQuestion, tuple[str, ...]]:
        """With what a config file sets, where no parameter does."""
        if self.config is None:
            return self, ()
        from kernelcast.app.questions.parameters import command_parameters
        from kernelcast.app.questions.training_config import read_config

        known = {parameter.name for parameter in command_parameters(TrainQuestion)}
        found, unread = read_config(self.config, known)
        count = found.pop("gpus", None)
        if count and isinstance(self.gpus, str) and _counted(self.gpus)[1] is None:
            found["gpus"] = f"{count}x{self.gpus}"
        given = {name.strip("`") for name in self.given(*known)} - {"gpus" if "gpus" in found else ""}
        return replace(self, **{name: value for name, value in found.items() if name not in given}), unread

    def _check_run(self) -> None:
        if self.tokens is not None and not 0 < self.tokens < float("inf"):
            raise KernelcastError(f"`tokens` is a number above 0, not {self.tokens:g}")
        if self.tokens is None:
            self.refuse(("prices", "price"), "a cost is of a run of `tokens`, which are not given")
        if self.checkpoint_every is None:
            self.refuse(("checkpoint_s",), "`checkpoint_every` is not given")
        if self.jitter >= 1:
            raise KernelcastError(f"`jitter` is a share of a step's time, as in 0.01, not {self.jitter:g}")
        if self.mtbf is not None and self.checkpoint_every is None:
            raise KernelcastError("`mtbf` needs `checkpoint_every`: without checkpoints a failure loses the whole run")

    @property
    def _step_conditions(self) -> Any:
        from kernelcast.app.questions.trace import step_conditions

        return step_conditions(self.conditions)

    def job(self) -> tuple[TrainingJob, dict[str, Any]]:
        """The job, and the parameters that were filled in."""
        from kernelcast.training.job import TrainingJob

        model, gpu, count = self._model(), *self._gpus()
        filled: dict[str, Any] = {}
        layout = self._layout(count, model, filled)
        filled |= {} if self.micro_batch else {"micro_batch": self.value("micro_batch")}
        settings = self._settings(model, filled) | {"tp_overlap": bool(self.tp_overlap) and layout.tp > 1}
        return TrainingJob(model=model, gpu=gpu, layout=layout, micro_batch=self.value("micro_batch"),
                           recompute=self._recompute(), **settings), filled  # fmt: skip

    def _model(self) -> Architecture:
        if self.model is None:
            raise KernelcastError("which model? give MODEL, as in llama-3.1-8b")
        model = shared.resolve_model(self.model)
        if not model.generates:
            raise KernelcastError(f"{model.name} makes no tokens: `kernelcast trace --mode training` trains any model")
        if self.mtp and not model.mtp_layers:
            raise KernelcastError(f"{model.name} has no layers for multi-token prediction: leave out `mtp`")
        return model

    def _settings(self, model: Architecture, filled: dict[str, Any]) -> dict[str, Any]:
        """What no layout decides."""
        from kernelcast.stacks.training_stack import training_stack
        from kernelcast.training.job import Offload

        seq = self.seq or min(model.max_context or LONGEST, LONGEST)
        if model.learned_positions and seq > model.max_context:
            raise KernelcastError(f"`seq` {seq:,} is more than the {model.max_context:,} positions of {model.name}")
        filled |= {} if self.seq else {"seq": seq}
        filled |= {"mean_length": seq} if self.packed and self.mean_length is None else {}
        filled |= {
            name: self.value(name) for name in ("precision", "stack", "optimizer") if getattr(self, name) is None
        }
        return {
            "seq": seq, "stack": training_stack(self.value("stack")), "precision": self._precision(),
            "optimizer": self.value("optimizer"), "lora": self._lora(), "tp_overlap": bool(self.tp_overlap),
            "offload": Offload(self.offload_layers or 0, bool(self.offload_optimizer)),
            "routing": self.value("routing"), "packed": bool(self.packed) or self.mean_length is not None,
            "mean_length": self.mean_length or 0, "cuda_graphs": self._cuda_graphs(),
            "dispatcher": self.value("dispatcher"), "expert_overlap": bool(self.expert_overlap), "mtp": bool(self.mtp),
        }  # fmt: skip

    def _base(self) -> TrainingLayout:
        """Of a layout what no size decides."""
        from kernelcast.training.layout import TrainingLayout

        given: dict[str, Any] = {name: getattr(self, name) for name in ("cp_comm", "gpus_per_node", "between_nodes")
                                 if getattr(self, name) is not None}  # fmt: skip
        return TrainingLayout(overlap=self.overlap is not False, **given)

    def _gpus(self) -> tuple[Gpu, int | None]:
        """The GPU, and how many; None: as many as the layout says."""
        from kernelcast.hardware import Gpu

        if self.gpus is None:
            raise KernelcastError("which GPUs? give `gpus`, as in 512xH100")
        if isinstance(self.gpus, Gpu):
            return shared.resolve_gpu(self.gpus, self.set, self.power_cap), None
        text = str(self.gpus).strip()
        name, count = _counted(text)
        if not name:
            raise KernelcastError(f"`gpus` says how many of which, as in 8xH100, not {text}")
        if count is not None and not 1 <= count <= 1 << 20:
            raise KernelcastError(f"`gpus` is 1 to {1 << 20:,} GPUs, not {str(count)[:20]}")
        return shared.resolve_gpu(name, self.set, self.power_cap), count

    def _layout(self, count: int | None, model: Architecture, filled: dict[str, Any]) -> TrainingLayout:
        sizes = {name: self.value(name) for name in ("tp", "pp", "cp", "ep", "expert_tp")}
        ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
        count = ranks * (self.dp or 1) if count is None else count
        dp = self.dp or max(1, count // ranks)
        if dp * ranks != count:
            raise KernelcastError(
                f"`tp` {sizes['tp']} x `pp` {sizes['pp']} x `cp` {sizes['cp']}" + (f" x `dp` {dp}" if self.dp else "")
                + f" do not make {count} GPUs: {'give ' if self.dp else ''}"
                + ("sizes whose product is the number of GPUs" if self.dp else f"{count} is no multiple of {ranks}")
            )  # fmt: skip
        micro = self.value("micro_batch")
        passes = self.gradient_accumulation_steps
        if self.global_batch and passes and self.global_batch != dp * micro * passes:
            raise KernelcastError(
                f"`gradient_accumulation_steps` {passes} x `micro_batch` {micro} x dp {dp} is a `global_batch` of "
                f"{dp * micro * passes}, not {self.global_batch}: give one of the two"
            )
        batch = self.global_batch or dp * micro * (passes or (PER_STAGE * sizes["pp"] if sizes["pp"] > 1 else 1))
        if batch % (dp * micro):
            raise KernelcastError(
                f"`global_batch` {batch} must be a multiple of `micro_batch` {micro} x dp {dp} = {micro * dp}"
            )
        filled |= {} if self.global_batch or passes else {"global_batch": batch}
        filled |= {} if self.dp else {"dp": dp}
        zero = self._zero(dp * sizes["cp"])
        parallel = sizes["tp"] > 1 if self.sequence_parallel is None else self.sequence_parallel
        filled |= {"zero": zero} if self.zero is None and self.distributed_optimizer is None else {}
        more: dict[str, Any] = {} if self.stage_layers is None else {"stage_layers": whole_numbers(self.stage_layers)}
        return replace(
            self._base(), **sizes, dp=dp, zero=zero, sequence_parallel=parallel and sizes["tp"] > 1,
            micro_batches=batch // (dp * micro), **self._schedule(model), **more,
        )  # fmt: skip

    def _whole(self, step: Any, filled: dict[str, Any], unread: tuple[str, ...]) -> TrainingRun:
        from kernelcast.hardware.prices import read_prices
        from kernelcast.training.run import Failures, TrainingRun

        prices = read_prices(self.prices, self.price or (), self.price_kind) if self.tokens else {}
        failures = Failures(
            self.checkpoint_every or 0, self.checkpoint_s, self.mtbf or 0.0, self.restart_s, self.jitter
        )
        return TrainingRun(step, self.tokens, prices.get(step.job.gpu.known_as), failures, filled, unread)
