"""A service under a load, from the first request to the last: the likely run, and both ends of what it may be."""

from __future__ import annotations

from collections.abc import Callable

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.networks.forward import Deployment
from kernelcast.predict import DEFAULT, Conditions
from kernelcast.serving.engine.fleet import Fleet, Pool, Service, Tables
from kernelcast.serving.engine.result import Goals, Served, Simulation, metrics
from kernelcast.serving.load import Load
from kernelcast.times import Times

_NONE = Goals()
Told = Callable[[str, int], None]  # which run, and how many requests of it are done


def tables_for(conditions: Conditions = DEFAULT) -> Tables:
    """Step times under these conditions, to share among simulations."""
    known: list[tuple[Gpu, Times]] = []  # a GPU is no key of a dictionary

    def times(place: Deployment) -> Times:
        found = next((times for gpu, times in known if gpu is place.gpu or gpu == place.gpu), None)
        if found is None:
            found = Times(place.gpu, conditions)
            known.append((place.gpu, found))
        return found

    return Tables(times)


def simulate(service: Service, load: Load, conditions: Conditions = DEFAULT, *, goals: Goals = _NONE, seed: int = 0,
             intervals: bool = True, tables: Tables | None = None, told: Told | None = None) -> Simulation:  # fmt: skip
    """How ``service`` answers ``load``. ``intervals``: run it twice more, at both ends of what every step may take.
    An interrupt ends the run under way; what is done is kept, and the result says that it is not complete."""
    check(service, load)
    tables = tables or tables_for(conditions)
    fleet = Fleet(service, load, tables, "likely", seed)
    complete = _run(fleet, "likely", told)
    served = Served.of(fleet.requests, load)
    ends = {}
    for variant in ("low", "high") if intervals and complete else ():
        other = Fleet(service, load, tables, variant, seed)
        complete = complete and _run(other, variant, told)
        if not complete:
            break
        ends[variant] = metrics(Served.of(other.requests, load), other.notes, None, goals)
    found = metrics(served, fleet.notes, None, goals)
    low, high = _ordered(found, ends) if len(ends) == 2 else ({}, {})
    return Simulation(service, load, served, fleet.notes, goals, found, low, high,
                      fleet.deciding[0].times.rests_on, fleet.deciding[0].times.predictor, complete)  # fmt: skip


def _run(fleet: Fleet, variant: str, told: Told | None) -> bool:
    try:
        fleet.run((lambda done: told(variant, done)) if told else None)
    except KeyboardInterrupt:
        return False
    return True


def _ordered(likely: dict[str, float], ends: dict[str, dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """The smaller and the larger of each metric: faster steps mean shorter latencies and more throughput."""
    keys = [key for key in likely if key in ends["low"] and key in ends["high"]]
    values = {key: (likely[key], ends["low"][key], ends["high"][key]) for key in keys}
    return {key: min(found) for key, found in values.items()}, {key: max(found) for key, found in values.items()}


def check(service: Service, load: Load) -> None:
    """Refuse what no engine of the service would take, and say which limit it breaks."""
    for pool in filter(None, (service.pool, service.prefill)):
        _check_pool(pool, load)


def _check_pool(pool: Pool, load: Load) -> None:
    model, settings = pool.deployment.model, pool.settings
    if model.kind == "encoder":
        raise KernelcastError(f"{model.name} is an encoder: it writes no tokens and is served without a queue of them")
    if load.longest > model.max_context:
        raise KernelcastError(
            f"a request of {load.longest:,} tokens exceeds the context of {model.name}, {model.max_context:,}"
        )
    held = settings.kv_tokens // pool.deployment.layout.pp
    if load.longest > held:
        raise KernelcastError(
            f"a request of {load.longest:,} tokens exceeds the KV cache of {held:,} tokens that "
            f"{pool.deployment.layout.gpus} x {pool.deployment.gpu.id} leave to {model.name}; take more GPUs (--tp), a "
            f"smaller format, or an fp8 KV cache (--kv-dtype fp8)"
        )
    longest = int(load.inputs.max())
    if not settings.chunked_prefill and longest > settings.max_num_batched_tokens:
        raise KernelcastError(
            f"a prompt of {longest:,} tokens exceeds the {settings.max_num_batched_tokens:,} of a step, and "
            f"{pool.deployment.stack.name} does not cut prompts by default: raise --max-num-batched-tokens, or give "
            f"--enable-chunked-prefill"
        )
