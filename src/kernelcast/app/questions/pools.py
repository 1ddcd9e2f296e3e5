"""Prompts read by some workers, answers written by others: a static point of both pools."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from kernelcast.app.questions.infer import InferQuestion
from kernelcast.app.questions.shared import chosen_conditions, chosen_gpu, chosen_model
from kernelcast.app.questions.words import flag_of, flags_under
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.inference.deployment import Deployment
    from kernelcast.inference.disaggregated import Disaggregated

_apart = flags_under("Prompts read elsewhere")


@dataclass(frozen=True, kw_only=True)
class PoolsQuestion(InferQuestion):
    """A batch, or workers that read prompts and others that decode: ``tp``, ``batch`` and the like are theirs."""

    prefill_workers: Annotated[int | None, _apart("--prefill-workers", help="workers that only read prompts")] = None
    decode_workers: Annotated[int | None, _apart("--decode-workers", help="workers that only decode (1)")] = None
    prefill_tp: Annotated[int | None, _apart("--prefill-tp", help="GPUs that cut every layer of one that reads")] = None
    prefill_pp: Annotated[int | None, _apart("--prefill-pp", help="its pipeline stages")] = None
    prefill_dp: Annotated[int | None, _apart("--prefill-dp", help="its attention-DP ranks")] = None
    prefill_ep: Annotated[int | None, _apart("--prefill-ep", help="parts that its experts are dealt out to")] = None
    prefill_batch: Annotated[int | None, _apart("--prefill-batch", help="prompts that it reads at a time (1)")] = None
    transfer_fabric: Annotated[
        str | None,
        _apart("--transfer-fabric", metavar="ID", help="that caches are handed over; default: what links nodes"),
    ] = None

    @property
    def apart(self) -> bool:
        """Whether prompts are read elsewhere."""
        given = [name for name in _own() if getattr(self, name) is not None]
        if given and self.prefill_workers is None:
            raise KernelcastError(
                f"{flag_of(PoolsQuestion, given[0])} needs --prefill-workers, as in --prefill-workers 2"
            )
        return bool(given)

    def answer_apart(self) -> Disaggregated:
        """Both pools, forecast."""
        from kernelcast.inference.disaggregated import PhaseWorkers, infer_disaggregated

        if not self.apart:
            raise KernelcastError("how many workers read prompts? give --prefill-workers, as in --prefill-workers 2")
        for name in ("requests", "images"):
            if getattr(self, name):
                raise KernelcastError(f"{flag_of(PoolsQuestion, name)} is of one batch: leave it out, or "
                                      f"--prefill-workers")  # fmt: skip
        model, chip = chosen_model(self.model), chosen_gpu(self.gpu, self.set, self.power_cap)
        decode = self._deployed(model, chip)
        work = self._workload(decode)
        pools = (
            PhaseWorkers(self._reading(decode), _or_one(self.prefill_batch), _or_one(self.prefill_workers)),
            PhaseWorkers(decode, len(work.inputs), _or_one(self.decode_workers)),
        )
        conditions = chosen_conditions(None, "model", self.predictor, self.calibration, self.weights)
        return infer_disaggregated(
            *pools, work.inputs[0], work.outputs[0], cached=self.cached or 0, chunk=self.chunk,
            speculation=work.speculation, transfer=self.transfer_fabric, conditions=conditions,
        )  # fmt: skip

    def _reading(self, decode: Deployment) -> Deployment:
        """A worker that reads; guesses are of those that decode."""
        cuts: dict[str, Any] = {name: _or_one(getattr(self, f"prefill_{name}")) for name in ("tp", "pp", "dp", "ep")}
        return replace(self, **cuts)._deployed(decode.model, decode.gpu)


def _or_one(value: int | None) -> int:
    return 1 if value is None else value


def _own() -> list[str]:
    inherited = {one.name for one in fields(InferQuestion)}
    return [one.name for one in fields(PoolsQuestion) if one.name not in inherited]
