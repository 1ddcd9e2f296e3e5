"""A training step of a transformer, and the run that it is of, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelcast.app.report.json import attributes, breakdown_fields, interval_fields, support_fields
from kernelcast.app.report.text import (
    breakdown_table,
    digits,
    evidence_lines,
    gib_text,
    interval_text,
    joules_text,
    percent,
    plain_table,
    plural,
    show,
    sizes_text,
    support_lines,
    time_text,
    times_table,
    title,
)
from kernelcast.schedule import Memory
from kernelcast.search.training import LayoutSearch
from kernelcast.stacks.training_flags import ALIASES, MEGATRON
from kernelcast.training.job import TrainingJob
from kernelcast.training.run import TrainingRun
from kernelcast.training.training_forecast import TrainingForecast

# What each part of a step is
PARTS = {
    "compute": "kernels of the forward and backward pass",
    "recompute": "the forward pass that runs again, its communication too",
    "tensor parallel": "its communication that no kernel hides",
    "context parallel": "exchanges of keys and values that attention waits for",
    "expert parallel": "dispatch to experts and combine",
    "data parallel": "gathers and reductions that are not hidden",
    "pipeline": "longer than with free links between stages",
    "bubble": "waiting for other stages",
    "optimizer": "its kernels",
    "offload": "transfers to the host that are not hidden",
    "host": "waiting for the host to launch, and what it does between steps",
}
_LISTED, _SHOWN = 20, 8  # layouts of a search in JSON, as text
_SIZES = ("dp", "tp", "pp", "cp", "ep", "expert_tp", "zero", "sequence_parallel", "micro_batches", "schedule",
          "virtual_stages", "overlap", "gpus_per_node", "between_nodes")  # fmt: skip


def fields(run: TrainingRun) -> dict[str, Any]:
    """The contract's keys: time with its interval, rates, where the time goes, memory, the run."""
    step, job = run.step, run.step.job
    memory = step.memory
    return {
        **attributes(job, "gpus", "seq", "micro_batch", "global_batch", "optimizer", "packed", model="model.name",
                     gpu="gpu.label", stack="stack.id", precision="precision.id", recompute="recompute.mode",
                     tokens_per_step="tokens"),
        "layout": attributes(job.layout, *_SIZES) | {"part_layers": list(job.part_layers)},
        "lora": attributes(job.lora, "rank", "targets", "base") if job.lora else None,
        **interval_fields("time_s", step.interval),
        **attributes(step, "tokens_per_s", "tokens_per_s_per_gpu", "model_flops", "model_tflops_per_gpu", "mfu", "hfu",
                     "parts_s"),
        "breakdown": breakdown_fields(step.shares),
        **interval_fields("step_energy_j", run.step_energy),
        "memory_bytes": memory.peak_bytes,
        "memory": memory.fullest.fields("used_bytes", "available_bytes", "gpu_bytes", "missing_bytes"),
        "stages": [stage.fields("used_bytes") for stage in memory.stages],
        "fits": bool(memory.fits),
        "run": _run_fields(run),
        "search": _search_fields(run.search),
        **support_fields(step.supports),
        "evidence": step.rests_on.to_dict(),
        "answered_as": dict(run.answered_as),
        "unread": list(run.unread),
        "predictor": step.times.predictor,
    }  # fmt: skip


def _run_fields(run: TrainingRun) -> dict[str, Any] | None:
    if run.tokens is None:
        return None if run.goodput == 1 else {"goodput": run.goodput}
    return {
        "tokens": run.tokens, "goodput": run.goodput, **interval_fields("hours", run.hours),
        **interval_fields("usd", run.usd), **interval_fields("energy_j", run.energy),
        "usd_per_gpu_hour": run.price.usd_per_hour if run.price else None,
        "price_date": run.price.date if run.price else None,
    }  # fmt: skip


def _search_fields(search: LayoutSearch | None) -> dict[str, Any] | None:
    if search is None:
        return None
    listed = [
        {"layout": attributes(each.job.layout, *_SIZES), "micro_batch": each.job.micro_batch,
         "recompute": each.job.recompute.mode, "recompute_modules": list(each.job.recompute.modules),
         **interval_fields("time_s", each.interval), "memory_bytes": each.memory.peak_bytes, "support": each.support}
        for each in search.ranked[:_LISTED]
    ]  # fmt: skip
    return attributes(search, "tried", "too_large", "slower", "lead") | {"close": len(search.close), "ranked": listed}


def print_run(run: TrainingRun) -> None:
    """The step first, where its time goes, memory, the run, and the evidence."""
    step, job = run.step, run.step.job
    name = job.stack.name.partition(":")[0]
    how = ", ".join([f"  {name}", job.precision.id, *_extras(run)])
    show(title(job.model.name, "  training", f"{job.gpus:,} x {job.gpu.name}" if job.gpus > 1 else job.gpu.name, how))
    show(f"{job.layout.label}; {plural(job.global_batch, 'sequence')} of {job.seq:,} tokens a step, "
         f"{job.micro_batch} in a micro-batch", "")  # fmt: skip
    if run.search:
        show(*_search(run.search))
    show(times_table(_figures(run)), "", _parts(run), "", _kernels(run), "", _memory(run), "")
    show(*_memory_lines(run), *_run_lines(run))
    show(*support_lines(step.supports, step.times.predictor),
         *evidence_lines(step.rests_on), *_notes(run))  # fmt: skip


def _search(search: LayoutSearch) -> list[Any]:
    """The fastest layout of each dp, tp, pp, cp and ep, and how sure their order is."""
    sizes = ("dp", "tp", "pp", "cp", "ep")
    fastest: dict[tuple[int, ...], TrainingForecast] = {}
    for each in search.ranked:
        fastest.setdefault(tuple(getattr(each.job.layout, name) for name in sizes), each)
    rows = [
        (time_text(each.time_s), *map(str, key), str(each.job.layout.virtual_stages), str(each.job.micro_batch),
         each.job.recompute.mode, digits(each.memory.peak_bytes / 2**30, 3))
        for key, each in list(fastest.items())[:_SHOWN]
    ]  # fmt: skip
    heads = ("step", *sizes, "virtual", "micro-batch", "recompute", "GiB")
    counts = f"{search.tried:,} layouts, {search.too_large:,} do not fit, {search.slower:,} cannot be faster"
    lines = [f"searched   {counts}; {plural(len(search.close), 'other')} may be as fast, by the forecast's interval"]
    if surer := search.surer:
        lines.append(f"surer      {surer.job.layout.label}: {time_text(surer.time_s)}, with better evidence")
    if search.best.job.stack.id == "megatron" and search.best.job.layout.zero < 3:
        lines.append(f"Megatron   {' '.join(megatron_arguments(search.best.job))}")
    return [plain_table(*heads, right=(*heads[:8], "GiB"), rows=rows), "", *lines, ""]


def megatron_arguments(job: TrainingJob) -> list[str]:
    """The job's layout as Megatron-LM takes it."""
    layout, again = job.layout, job.recompute
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "expert_tp": layout.expert_tp,
             "micro_batch": job.micro_batch, "global_batch": job.global_batch, "seq": job.seq}  # fmt: skip
    if layout.virtual_stages > 1:
        sizes["virtual_stages"] = layout.virtual_stages
    found = [f"--{MEGATRON.get(name, ALIASES[name][0]).replace('_', '-')} {size}" for name, size in sizes.items()
             if size > 1 or name.endswith("batch")]  # fmt: skip
    switches = {"--use-distributed-optimizer": layout.zero == 1, "--sequence-parallel": layout.sequence_parallel,
                "--overlap-grad-reduce": layout.overlap and layout.zero > 0, "--tp-comm-overlap": job.tp_overlap,
                f"--recompute-granularity {again.mode}": again.mode != "none",
                f"--recompute-method {again.method} --recompute-num-layers {again.layers or 1}": again.mode == "full",
                f"--recompute-modules {' '.join(again.modules)}": again.mode == "selective"}  # fmt: skip
    return found + [name for name, on in switches.items() if on]


def _extras(run: TrainingRun) -> list[str]:
    job = run.step.job
    again = job.recompute
    words = [f"recompute {again.mode}" + (f" ({', '.join(again.modules)})" if again.mode == "selective" else "")
             ] if again.mode != "none" else []  # fmt: skip
    words += [f"{'QLoRA' if job.lora.base == 'int4' else 'LoRA'} of rank {job.lora.rank}"] if job.lora else []
    return [
        *words,
        *([job.optimizer] if job.optimizer != "adamw" else []),
        *([f"{job.cuda_graphs} CUDA graphs"] if job.cuda_graphs else []),
    ]


def _figures(run: TrainingRun) -> list[tuple[str, str, str, str]]:
    step, job = run.step, run.step.job
    again = f", HFU {percent(step.hfu)}" if job.recompute.mode != "none" else ""
    low, high = (job.tokens / end / job.gpus for end in (step.high_s, step.low_s))
    return [
        ("step", time_text(step.time_s), interval_text(step.low_s, step.high_s), f"{job.tokens:,} tokens"),
        ("tokens/s a GPU", digits(step.tokens_per_s_per_gpu), f"{digits(low, 3)} to {digits(high, 3)}",
         f"{digits(step.tokens_per_s)} tokens/s in all"),
        ("TFLOP/s a GPU", digits(step.model_tflops_per_gpu), "", f"of the model; MFU {percent(step.mfu)}{again}"),
    ]  # fmt: skip


def _parts(run: TrainingRun) -> Any:
    """Where the time goes; adds up to the step."""
    step = run.step
    rows = [
        (name, time_text(time_s), percent(time_s / step.time_s), PARTS.get(name, ""))
        for name, time_s in step.parts_s.items()
        if time_s > 5e-4 * step.time_s
    ]
    return plain_table("part of the step", "time", "share", "", right=("time", "share"), rows=rows)


def _kernels(run: TrainingRun) -> Any:
    """Kernels of the slowest stage by part, hidden communication too."""
    shares = run.step.shares
    totals_s = {
        phase: sum(s.time_s for s in shares if s.phase == phase) for phase in dict.fromkeys(s.phase for s in shares)
    }
    return breakdown_table(shares, totals_s, (5, 3))


def _memory(run: TrainingRun) -> Any:
    """Parts of the fullest stage, of the first and of the last."""
    memory = run.step.memory
    stages = {memory.stages.index(memory.fullest), 0, len(memory.stages) - 1}
    shown: list[tuple[int, Memory]] = [(at, memory.stages[at]) for at in sorted(stages)]
    heads = [f"stage {at}" if len(memory.stages) > 1 else "GiB" for at, _ in shown]
    names = [name for name in memory.parts if any(stage.parts.get(name, 0) >= 2**20 for _, stage in shown)]
    rows = [
        (name.replace("_", " "), *(digits(stage.parts.get(name, 0.0) / 2**30, 3) for _, stage in shown))
        for name in names
    ]
    rows.append(("peak", *(digits(float(stage.used_bytes) / 2**30, 3) for _, stage in shown)))
    return plain_table("memory, GiB a GPU", *heads, right=heads, rows=rows)


def _memory_lines(run: TrainingRun) -> list[str]:
    memory, gpu = run.step.memory, run.step.job.gpu
    room, peak = gib_text(float(memory.fullest.available_bytes)), gib_text(memory.peak_bytes)
    if memory.fits:
        return [f"memory     fits: {peak} of {room} that {gpu.id} has beside what the framework reserves"]
    most = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    return [
        f"memory     does not fit: {peak}, {gib_text(memory.missing_bytes)} more than the {room} of {gpu.id}; most of "
        f"it {sizes_text(most)}: more --tp, --pp or --zero, --recompute, or a smaller --micro-batch need less"
    ]


def _run_lines(run: TrainingRun) -> Iterator[str]:
    step, job = run.step, run.step.job
    if energy := run.step_energy:
        watts = energy.value / step.time_s / job.gpus
        yield f"energy     {joules_text(energy.value)} a step, {watts:,.0f} W a GPU while it runs"
    if run.goodput < 1:
        every = f"; a checkpoint every {plural(run.failures.every, 'step')}" if run.failures.every else ""
        yield f"goodput    {percent(run.goodput)} of the time goes into steps that are kept{every}"
    if run.tokens is None or run.hours is None:
        return
    days, hours = run.hours * (1 / 24), run.hours
    yield (f"run        {run.tokens:g} tokens take {digits(days.value, 3)} days ({digits(days.low, 3)} to "
           f"{digits(days.high, 3)}), {digits(hours.value * job.gpus, 3)} GPU-hours")  # fmt: skip
    if run.usd and run.price:
        low, high, price = digits(run.usd.low, 3), digits(run.usd.high, 3), run.price
        yield (f"cost       {digits(run.usd.value, 3)} USD ({low} to {high}) at {price.usd_per_hour:g} USD a GPU-hour"
               + (f" of {price.date}" if price.date else ""))  # fmt: skip
    else:
        yield f"cost       no price of {job.gpu.id}: give one with --price {job.gpu.id}=USD"
    if run.energy:
        low, high = joules_text(run.energy.low), joules_text(run.energy.high)
        yield f"           {joules_text(run.energy.value)} ({low} to {high}) of the GPUs"


def _notes(run: TrainingRun) -> list[str]:
    filled = ", ".join(f"{name} {value}" for name, value in run.answered_as.items())
    lines = [f"taken as   {filled}: not given"] if filled else []
    return lines + ([f"not read   {', '.join(run.unread)}: settings that may change the step"] if run.unread else [])
