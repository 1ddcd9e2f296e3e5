"""Values of small tensors while a model runs on meta tensors: masks, lengths, positions, that a program branches on.

A meta storage with known values has a real storage beside it, on the CPU. An op of which all inputs are known runs on
those as well; views share the storage, so that they and what is written through them need nothing more. Unknown values
written into a known storage make it unknown. A large tensor that is constant is known by that number.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

SMALL_ELEMENTS = 1 << 20  # of tensors that are computed for real
_CPU = torch.device("cpu")
# Of the right size whatever their input holds.
_FILLED = {"zeros": 0, "ones": 1, "full": None, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1,
           "empty": 0, "empty_like": 0, "new_empty": 0, "empty_strided": 0, "new_empty_strided": 0, "full_like": None,
           "new_full": None}  # fmt: skip
_OVERWRITES = {"copy_": 1, "fill_": 1, "zero_": None}  # overwrite their whole input, with this argument
# A single random number controls the program (layer dropout in training): it is taken as the midpoint.
_MIDDLE = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0, "bernoulli_": 0.5}
# Ops whose result is constant where their input is, beside pointwise ones.
_SAME = {"all", "any", "amax", "amin", "_to_copy"}
_KEEPS = {"clone", "repeat", "index", "index_select", "gather", "flip", "roll", "upsample_nearest1d",
          "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"}  # fmt: skip
_ORDINARY = 5  # an ordinary token, where the vocabulary is not known
_ROUTES = {"max", "argmax", "topk"}  # of a router: which experts a token goes to


@dataclass(frozen=True)
class _Known:
    storage: torch.UntypedStorage | None  # the values
    number: torch.Tensor | None  # or this one, everywhere
    alive: Any
    assumed: bool  # of a meta input: good for branches, but not for sizes


class KnownValues:
    """Real storages by meta storages."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self.draws = False  # random whole numbers are drawn, and known
        self.even_routing = False  # experts were assumed to get equal shares of the tokens

    # ---- what is known ----

    def know(self, value: torch.Tensor, real: torch.Tensor, assumed: bool = False) -> None:
        """``value`` has the values of ``real``, and so have other views of its storage."""
        memory = value.untyped_storage()
        if value.numel() > SMALL_ELEMENTS or memory.nbytes() > 16 * SMALL_ELEMENTS or value.numel() != real.numel():
            return
        self._keep(value, torch.UntypedStorage(memory.nbytes()), None, assumed)
        view = self.of(value)
        if view is not None:
            view.copy_(real.detach().reshape(value.shape))

    def know_everywhere(self, value: torch.Tensor, number: Any, assumed: bool = False) -> None:
        """``value`` is this number everywhere."""
        scalar = torch.full((), number, dtype=value.dtype, device=_CPU)
        if value.numel() <= SMALL_ELEMENTS:
            self.know(value, scalar.expand(value.shape), assumed)
        else:
            self._keep(value, None, scalar, assumed)

    def assume(self, value: torch.Tensor) -> None:
        """A meta input: ordinary tokens, and masks that are set."""
        self.know_everywhere(value, True if value.dtype == torch.bool else _ORDINARY, assumed=True)

    def _keep(self, value: torch.Tensor, storage: Any, number: Any, assumed: bool) -> None:
        memory = value.untyped_storage()
        at = memory._cdata
        self._known[at] = _Known(storage, number, weakref.ref(memory, lambda _: self._known.pop(at, None)), assumed)

    def _entry(self, value: torch.Tensor) -> _Known | None:
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            return None
        return self._known.get(value.untyped_storage()._cdata)

    def of(self, value: torch.Tensor) -> torch.Tensor | None:
        """Its values, sharing storage with all other views; None where they are unknown."""
        if value.device.type != "meta":
            return value
        entry = self._entry(value)
        if entry is None or entry.storage is None:
            return None
        return torch.empty(0, dtype=value.dtype, device=_CPU).set_(
            entry.storage, value.storage_offset(), value.shape, value.stride()
        )

    def sizes(self, value: torch.Tensor) -> torch.Tensor | None:
        """Its values, where they may determine the size of a tensor."""
        entry = None if value.device.type != "meta" else self._entry(value)
        return None if entry is not None and entry.assumed else self.of(value)

    def forget(self, value: torch.Tensor) -> None:
        """Mark its values as unknown."""
        if value.device.type == "meta" and value.layout == torch.strided:
            self._known.pop(value.untyped_storage()._cdata, None)

    def _all_known(self, leaves: list[torch.Tensor]) -> bool:
        return all(self.of(leaf) is not None for leaf in leaves)

    def _assumed(self, leaves: list[torch.Tensor]) -> bool:
        return any((entry := self._entry(leaf)) is not None and entry.assumed for leaf in leaves)

    # ---- ops ----

    def run(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """The op on real numbers; None where some of them are not known, are too many, or the op fails on them."""
        leaves = tensors_of((args, options))
        if any(leaf.numel() > SMALL_ELEMENTS for leaf in leaves) or not self._all_known(leaves):
            return None
        real_args, kept = tree_map(lambda x: self.of(x) if isinstance(x, torch.Tensor) else x, (args, options))
        if "device" in kept:
            kept["device"] = _CPU
        kept.pop("pin_memory", None)
        try:
            return func(*real_args, **kept)
        except Exception:  # values that cannot be computed are unknown
            return None

    def follow(self, name: str, func: Any, args: Any, options: dict[str, Any], out: Any, routes: bool) -> None:
        """After an op on meta tensors that returned ``out``: its values are known, or what it wrote into no longer is.
        ``routes``: it is of a module that routes tokens to experts."""
        outputs, written = tensors_of(out), _written(func, args, options)
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn = self.draws and not any(leaf.is_floating_point() for leaf in outputs)
            self._compute(func, args, options, outputs, written) if drawn else self._random(
                name, args, outputs, written
            )
        elif name in _FILLED:
            self._filled(name, args, outputs)
        elif name in _OVERWRITES:
            self._overwrite(name, args)
        elif outputs or written:
            self._compute(func, args, options, outputs, written)
            if routes and name in _ROUTES:
                self._route_evenly(args[0], outputs)

    def _compute(self, func: Any, args: Any, options: dict[str, Any], outputs: Any, written: Any) -> None:
        given = tensors_of((args, options))
        if not given and options.get("device") is None:
            return
        if any(leaf.numel() > SMALL_ELEMENTS for leaf in (*outputs, *given)):
            self._everywhere(func, args, options, outputs, written)
            return
        assumed = self._assumed(given)
        if not self._all_known(given):
            self._lose(written)
            return
        results = self.run(func, args, options)
        if results is None and not (written and not outputs):
            self._lose(written)
            return
        for value, real in zip(outputs, tensors_of(results), strict=False):
            if self.of(value) is None:  # else it is a view of known values
                self.know(value, real, assumed)

    def _everywhere(self, func: Any, args: Any, options: dict[str, Any], outputs: Any, written: Any) -> None:
        """The op on one number each, where its inputs are constant."""
        name = func._schema.name.partition("::")[2]
        fresh = [leaf for leaf in outputs if self._entry(leaf) is None]
        given = tensors_of((args, options))[: 1 if name in _KEEPS else None]
        scalars = {id(leaf): self._number(leaf) for leaf in given}
        same = torch.Tag.pointwise in func.tags or name in _SAME or name in _KEEPS
        if written or not fresh or not same or any(scalar is None for scalar in scalars.values()):
            self._lose(written)
            return
        real = self._of_one(name, func, tree_map(lambda x: scalars.get(id(x), x), args), options.get("dtype"))
        if real is not None:
            self.know_everywhere(fresh[0], real.item(), self._assumed(given))

    @staticmethod
    def _of_one(name: str, func: Any, args: Any, dtype: Any) -> torch.Tensor | None:
        """The op on one number each."""
        if name in _KEEPS or name in ("amax", "amin"):
            first: torch.Tensor = args[0]
            return first
        try:
            if name in ("all", "any"):
                return args[0].bool()
            if name == "_to_copy":
                return args[0] if dtype is None else args[0].to(dtype)
            return func(*args)
        except Exception:  # as above
            return None

    def _number(self, value: torch.Tensor) -> torch.Tensor | None:
        entry = self._entry(value) if value.device.type == "meta" else None
        if entry is not None and entry.number is not None:
            return entry.number
        real = self.of(value)
        return real.reshape(()) if real is not None and real.numel() == 1 else None

    def _lose(self, written: list[torch.Tensor]) -> None:
        for value in written:
            self.forget(value)

    def _random(self, name: str, args: Any, outputs: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        self._lose(written)
        for value in outputs:
            if value.numel() != 1 or value.untyped_storage().nbytes() > value.element_size():
                continue
            if name in _MIDDLE:
                self.know_everywhere(value, _MIDDLE[name])
            elif name == "uniform_":
                low, high = args[1:3] if len(args) > 2 else (0.0, 1.0)
                self.know_everywhere(value, (low + high) / 2)

    def _filled(self, name: str, args: Any, outputs: list[torch.Tensor]) -> None:
        number: Any = _FILLED[name]
        if number is None:
            number = args[2] if name == "new_full" else args[1]
        if isinstance(number, torch.Tensor):
            known = self.of(number)
            number = None if known is None else known.item()
        if outputs and number is not None and outputs[0].dtype.is_complex is False:
            self.know_everywhere(outputs[0], number)

    def _overwrite(self, name: str, args: Any) -> None:
        """Known numbers over all of a tensor's storage, or over known values."""
        target, position = args[0], _OVERWRITES[name]
        source = args[position] if position is not None else 0
        real = self.of(source) if isinstance(source, torch.Tensor) else source
        if real is None or target.device.type != "meta":
            self.forget(target)
            return
        if self.of(target) is None:
            self.forget(target)
            if target.numel() * target.element_size() < target.untyped_storage().nbytes():
                return
            self.know(target, torch.zeros((), device=_CPU).expand(target.shape))
        here = self.of(target)
        if here is not None:
            here.copy_(real) if isinstance(real, torch.Tensor) else here.fill_(real)

    def _route_evenly(self, scores: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        """Tokens to experts round robin: which ones they choose is data, and routers are trained for balance."""
        for value in outputs:
            if value.dtype != torch.int64 or self.of(value) is not None or scores.dim() < 2:
                continue
            experts = scores.shape[-1]
            self.know(value, torch.arange(value.numel(), device=_CPU).remainder(experts).reshape(value.shape))
            self.even_routing = True


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors among an op's arguments, in lists and dictionaries; faster than tree_flatten."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree if item is not None for leaf in tensors_of(item)]
    return [leaf for item in tree.values() for leaf in tensors_of(item)] if isinstance(tree, dict) else []


def _written(func: Any, args: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op changes in place."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    order = [a.name for a in schema.arguments]
    named = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    written = [args[order.index(name)] if order.index(name) < len(args) else options.get(name) for name in named]
    return tensors_of(written)
