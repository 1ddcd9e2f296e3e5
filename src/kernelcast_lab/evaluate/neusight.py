"""Whole models as NeuSight measured them.

Each case is traced, predicted kernel by kernel on its GPU, and compared with the measured time beside what NeuSight
itself predicted. Cases are fp32 in eager PyTorch; ``fused`` ones ran under torch.compile. Layers of a model are alike:
the difference of two traces, of few layers and of some more, is that of a layer.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast import Predictor
from kernelcast.forecast.conditions import DEFAULT
from kernelcast.forecast.learned import WEIGHTS, Learned, load
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import gpu
from kernelcast.tracing import trace
from kernelcast.tracing.fusion import fuse
from kernelcast.tracing.traced import Trace
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.scale import scale
from kernelcast.training.step import STEP, run_step
from kernelcast_lab.data.neusight import Mode, ModelCase
from kernelcast_lab.evaluate.scores import ErrorSummary

SHALLOW, DEEPER = 2, 4  # layers that are traced; every second one of Switch is sparse
_PLAN = re.compile(r"(dp|tp|pp)(\d+)(?:_(\d+))?")
_FEW = 4  # cases, too few for parts
_ONLY_TESTED = "a100_pcie"  # products and vector ops of this GPU are in NeuSight's test split alone
_FAMILIES = ("gemm", "memory")  # that the models are made of


@dataclass(frozen=True)
class Compared:
    """A case beside its prediction, in seconds."""

    case: ModelCase
    predicted_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)  # forward and backward, of one GPU

    @property
    def error(self) -> float:
        """In percent of the measured time; above 0: predicted too slow."""
        return (self.predicted_s / self.case.measured_s - 1) * 100

    @property
    def neusight_error(self) -> float:
        """NaN where NeuSight has no prediction."""
        theirs = self.case.neusight_s
        return float("nan") if theirs is None else (theirs / self.case.measured_s - 1) * 100


# What the project set out to reach: name, which cases, mean error in percent.
GROUPS: tuple[tuple[str, Callable[[ModelCase], bool], float], ...] = (
    ("NVIDIA, one GPU, unfused", lambda c: c.single and c.vendor == "nvidia" and not c.fused, 8.0),
    ("NVIDIA, one GPU, fused", lambda c: c.single and c.vendor == "nvidia" and c.fused, 12.0),
    ("NVIDIA, four GPUs", lambda c: c.vendor == "nvidia" and not c.single, 8.0),
    ("AMD, one GPU", lambda c: c.single and c.vendor == "amd", 11.0),
)


def compare(cases: Iterable[ModelCase], predictor: str | Predictor = "learned") -> list[Compared]:
    """Every case with its prediction, under the conditions that a step of one GPU and of several have by default."""
    known: dict[tuple[str, bool], Times] = {}
    results = []
    for case in cases:
        conditions = replace(STEP if case.single else DEFAULT, predictor=predictor)
        times = known.setdefault((case.gpu, case.single), Times(gpu(case.gpu), conditions))
        results.append(_alone(case, times) if case.single else _together(case, times))
    return results


def _alone(case: ModelCase, times: Times) -> Compared:
    """One GPU: the whole from what two layers more add to two."""
    runs = [traced(case.model, case.mode, case.batch, case.seq, layers) for layers in (SHALLOW, DEEPER)]
    few, more = (run_step(fuse(run) if case.fused else run, times.gpu, times=times) for run in runs)
    times_more = (depth(case.model) - SHALLOW) / (DEEPER - SHALLOW)

    def whole(few_s: float, more_s: float) -> float:
        return few_s + times_more * (more_s - few_s)

    phases = {phase: whole(few.phase_s(phase), more.phase_s(phase)) for phase in ("forward", "backward")}
    return Compared(case, whole(few.time_s, more.time_s), phases)


def layout_of(case: ModelCase) -> TrainingLayout:
    """dp4, tp4, pp4_1 (four stages, one micro-batch)."""
    result = _PLAN.fullmatch(case.parallelism)
    if not result:
        raise KernelcastError(f"parallelism {case.parallelism!r} is none of dp4, tp4 or pp4_1")
    group, ways, passes = result.groups()
    dp, tp, pp = (int(ways) if group == name else 1 for name in ("dp", "tp", "pp"))
    return TrainingLayout(dp=dp, tp=tp, pp=pp, micro_batches=int(passes or 1))


def _together(case: ModelCase, times: Times) -> Compared:
    """Several GPUs, which share the batch out."""
    plan = layout_of(case)
    run = traced_whole(case.model, case.batch // (plan.dp * plan.micro_batches), case.seq)
    return Compared(case, scale(run, times.gpu, plan, times=times).time_s)


def families_that_saw_tests(folder: Path = WEIGHTS) -> list[str]:
    """Families whose weights were fitted on rows of NeuSight's test split, which makes errors look smaller here."""
    result = {name: load(folder, name) for name in _FAMILIES}
    return [name for name, fit in result.items() if fit and _ONLY_TESTED in fit.encoder.vocabulary.get("gpu", ())]


def mean_error(result: Iterable[Compared], where: Callable[[ModelCase], bool] = lambda case: True) -> float:
    """Mean size of the error, in percent."""
    return _errors([entry for entry in result if where(entry.case)]).mean


def _errors(members: Sequence[Compared]) -> ErrorSummary:
    return ErrorSummary.of([entry.case.measured_s for entry in members], [entry.predicted_s for entry in members])


def case_lines(result: Iterable[Compared]) -> list[dict[str, Any]]:
    """One line a case."""
    return [
        {name: getattr(entry.case, name) for name in ("gpu", "model", "mode", "seq", "batch")}
        | {"how": "fused" if entry.case.fused else "" if entry.case.single else entry.case.parallelism}
        | {"measured_ms": entry.case.measured_s * 1e3, "predicted_ms": entry.predicted_s * 1e3}
        | {"error": entry.error, "neusight_error": entry.neusight_error}
        for entry in result
    ]


def group_lines(result: Sequence[Compared]) -> list[dict[str, Any]]:
    """Errors of the groups with a target, and of their parts."""
    lines = []
    for name, where, target in GROUPS:
        members = [entry for entry in result if where(entry.case)]
        if not members:
            continue
        lines.append(_group_line(name, "all", members) | {"target": target})
        for part in ("gpu", "model", "mode") if len(members) > _FEW else ():
            for value in sorted({getattr(entry.case, part) for entry in members}):
                lines.append(_group_line(name, value, [e for e in members if getattr(e.case, part) == value]))
    return lines


def _group_line(name: str, part: str, members: Sequence[Compared]) -> dict[str, Any]:
    theirs = [abs(entry.neusight_error) for entry in members if entry.case.neusight_s is not None]
    return {"group": name, "part": part, **asdict(_errors(members)), "neusight_mean": fmean(theirs) if theirs else None}


def figures(cases: Iterable[ModelCase], predictor: str | Predictor) -> dict[str, list[dict[str, Any]]]:
    """The cases, the groups with a target, and what makes their errors look smaller than they are."""
    result = compare(cases, predictor)
    folder = predictor.folder if isinstance(predictor, Learned) else WEIGHTS
    learned = isinstance(predictor, Learned) or predictor == "learned"
    notes = ["AMD: matrix products of its test split are fitted on; there are no others."]
    for name in families_that_saw_tests(folder) if learned else ():
        notes.append(f"Not clean: the weights of {name} were fitted on rows of NeuSight's test split; fit them again.")
    lines = {"cases": case_lines(result), "groups": group_lines(result)}
    return {**lines, "notes": [{"note": text} for text in notes]} if result else lines


# ---- The models that NeuSight measured, traced as its runs were: attention in parts as transformers of 2023 wrote
# it. The parts move whole matrices of scores, so that a scale, a mask or a clamp more or less is worth per cents.


# Shapes of NeuSight's own op tables and labels; the rest as the Hugging Face configurations of these names have it.
# fmt: off
CONFIGS: dict[str, dict[str, Any]] = {
    "bert_large": {  # huggingface.co/google-bert/bert-large-uncased
        "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512,
    },
    "gpt2_large": {  # huggingface.co/openai-community/gpt2-large
        "model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024,
    },
    "gpt3_xl": {  # GPT-2's code with 24 heads of 128, 3072 wide (the GPT-3 paper's XL is 2048 wide)
        "model_type": "gpt2", "n_embd": 3072, "n_layer": 24, "n_head": 24, "n_positions": 2048,
    },
    "gpt3_27": {  # GPT-3 2.7B (arXiv 2005.14165, table 2.1)
        "model_type": "gpt2", "n_embd": 2560, "n_layer": 32, "n_head": 32, "n_positions": 2048,
    },
    "opt_13": {  # huggingface.co/facebook/opt-1.3b
        "model_type": "opt", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "ffn_dim": 8192, "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 2048,
        "dropout": 0.1, "attention_dropout": 0.0,
    },
    # T5-3B's sizes (huggingface.co/google-t5/t5-3b) with four experts in every second layer: 5.3e9 weights. We do not
    # have NeuSight's file. Its roofline times (3.1e12 FLOPs of 512 tokens, in proportion to the batch), how measured
    # times grow with length (by attention of 32 heads of 128), and which GPUs it does not fit on agree with this, and
    # not with T5 v1.1's sizes.
    "switchxl4": {
        "model_type": "switch_transformers", "d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24,
        "num_decoder_layers": 24, "num_heads": 32, "num_experts": 4, "num_sparse_encoder_layers": 12,
        "num_sparse_decoder_layers": 12, "expert_capacity": 64, "vocab_size": 32128, "dropout_rate": 0.1,
    },
}
# fmt: on
_LOSS = ("_log_softmax", "nll_loss_forward")
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
_SPARSE_DEPTHS = ("num_sparse_encoder_layers", "num_sparse_decoder_layers")


def depth(model: str) -> int:
    """Layers of a model, of its encoder where it has one too."""
    if model not in CONFIGS:
        raise unknown("model of NeuSight", model, CONFIGS)
    return int(next(CONFIGS[model][name] for name in _DEPTHS if name in CONFIGS[model]))


def _config(model: str, layers: int) -> dict[str, Any]:
    """The model with so many layers, as many of them sparse as before."""
    given, whole = CONFIGS[model], depth(model)
    shallow = {name: layers for name in _DEPTHS if name in given}
    return {**given, **shallow, **{name: given[name] * layers // whole for name in _SPARSE_DEPTHS if name in given}}


@functools.cache
def traced(model: str, mode: Mode, batch: int, seq: int, layers: int) -> Trace:
    """One run as it was timed, of the model with so many layers: the forward pass, and in training the backward pass
    with gradients added up."""
    if mode == "inference":
        return _traced(model, mode, batch, seq, layers)
    return _timed(_traced(model, mode, batch, seq, layers, passes=2))


@functools.cache
def traced_whole(model: str, batch: int, seq: int) -> Trace:
    """A training pass of the whole model with its gradients, as a job of many GPUs needs it."""
    return _traced(model, "training", batch, seq, depth(model))


def _traced(model: str, mode: Mode, batch: int, seq: int, layers: int, passes: int = 1) -> Trace:
    ids = torch.ones(batch, seq, dtype=torch.int64, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.startswith("switch"):
        inputs["decoder_input_ids"] = ids
    loss = functools.partial(_loss, ids) if mode == "training" else None
    built = _build(model, mode, layers)
    return trace(built, inputs, mode, optimizer=None, loss=loss, accumulate=passes, name=model)


def _timed(result: Trace) -> Trace:
    """Of two passes the second, which adds to gradients that are there, without the loss that was not timed."""
    first = next(at for at, op in enumerate(result.ops) if op.phase == "backward")
    start = next(at for at in range(first, len(result.ops)) if result.ops[at].phase == "forward")
    ops = tuple(op for op in result.ops[start:] if not (op.phase == "forward" and op.name in _LOSS))
    calls = {phase: count // 2 for phase, count in result.module_calls.items()}
    return replace(
        result, ops=ops, gradients=(), module_calls=calls, tokens=result.tokens // 2, samples=result.samples // 2
    )


def _loss(ids: torch.Tensor, output: Any) -> torch.Tensor:
    logits = output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))


def _build(model: str, mode: Mode, layers: int) -> nn.Module:
    import transformers

    _register()
    config = transformers.AutoConfig.for_model(**_config(model, layers))
    auto_classes = {"bert": "PreTraining" if mode == "training" else "SequenceClassification",
             "switch_transformers": "Seq2SeqLM"}  # fmt: skip
    auto_class = getattr(transformers, f"AutoModelFor{auto_classes.get(config.model_type, 'CausalLM')}")
    with torch.device("meta"):
        built: nn.Module = auto_class.from_config(config, attn_implementation=f"parts_{config.model_type}")
    if config.model_type == "switch_transformers":
        _experts_with_fixed_shapes(built, config.expert_capacity, everywhere=mode == "training")
    return built


def _bert(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    scores = scores + torch.empty(query.shape[0], 1, 1, key.shape[2], device=query.device)  # a mask of zeros
    return _weighted(module, scores.softmax(-1), value, options)


def _gpt2(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / torch.full([], query.shape[-1] ** 0.5, device=query.device)
    causal = torch.empty(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    scores = torch.where(causal, scores, torch.full([], -1e38, device=query.device))
    return _weighted(module, scores.softmax(-1), value, options)


def _opt(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    batch, heads, length, size = query.shape
    query, key = query.view(-1, length, size), key.view(-1, key.shape[2], size)
    scores = torch.bmm(query, key.transpose(1, 2)).view(batch, heads, length, -1)
    scores = scores + torch.empty(batch, 1, length, scores.shape[-1], device=query.device)
    scores = torch.max(scores, torch.full([], -1e38, device=query.device))
    return _weighted(module, scores.softmax(-1), value, options)


def _switch(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """The bias comes as (queries, keys, heads), turned: every layer reads it across its order in memory."""
    bias = options["position_bias"]
    if not hasattr(bias, "masked"):  # the first layer adds the mask, the others take its sum
        bias.masked = bias + torch.empty(query.shape[0], 1, 1, key.shape[2], device=query.device)
    scores = torch.matmul(query, key.transpose(3, 2))
    scores += bias.masked
    return _weighted(module, scores.softmax(-1), value, options)


def _weighted(module: Any, shares: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> tuple[Any, None]:
    rate = options.get("dropout") or 0.0
    if rate:
        shares = nn.functional.dropout(shares, p=rate, training=module.training)
    return torch.matmul(shares, value).transpose(1, 2).contiguous(), None


_PARTS: dict[str, Callable[..., Any]] = {
    "bert": _bert, "gpt2": _gpt2, "opt": _opt, "switch_transformers": _switch,
}  # fmt: skip


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, parts in _PARTS.items():
        AttentionInterface.register(f"parts_{name}", parts)
        AttentionMaskInterface.register(f"parts_{name}", lambda *_, **__: None)  # each makes its own


def _experts_with_fixed_shapes(model: nn.Module, capacity: int, everywhere: bool) -> None:
    """Which expert a token goes to depends on numbers, but not here: every token of a run is the same, so that all of a
    layer are routed to the same expert, which takes as many of each sequence as its capacity. Dropout makes them differ
    in training, where each expert is taken to be full (``everywhere``)."""
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    for part in model.modules():
        if isinstance(part, SwitchTransformersSparseMLP):
            part.forward = functools.partial(_experts, part, capacity, everywhere)  # type: ignore[method-assign]


def _experts(part: Any, capacity: int, everywhere: bool, hidden: torch.Tensor) -> torch.Tensor:
    """transformers of 2023: the tokens of each expert taken out by a mask, and put back."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    _, _, weights = part.router(flat)
    experts = list(part.experts.values())
    result = flat.clone()
    for expert in experts if everywhere else experts[:1]:
        positions = torch.empty(min(capacity * hidden.shape[0], flat.shape[0]), dtype=torch.int64, device=flat.device)
        result = result.index_put((positions,), expert(flat[positions]))
    return (weights * result).view(hidden.shape)
