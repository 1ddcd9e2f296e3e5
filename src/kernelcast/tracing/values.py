"""What small tensors hold while a model runs on meta tensors: masks, lengths, positions, that a program branches on.

A piece of memory that is known has a real one beside it, on the CPU. An op of which all inputs are known runs on those
as well; since views are looks at the same memory, they and what is written through them need no care of their own. What
is written into known memory but is not known itself makes it unknown.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

SMALL_ELEMENTS = 1 << 20  # of what is computed for real
_CPU = torch.device("cpu")
# Of the right size whatever their input holds.
_FILLED = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1, "empty": 0, "empty_like": 0, "new_empty": 0,
           "empty_strided": 0, "new_empty_strided": 0, "full_like": None, "new_full": None}  # fmt: skip
_OVERWRITES = {"copy_": 1, "fill_": 1, "zero_": None}  # all of their input, by which argument
# One random number is a coin that a program throws (a layer left out in training): it falls on the middle.
_MIDDLE = {"rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0, "bernoulli_": 0.5}


class Values:
    """Real memory by meta memory."""

    def __init__(self) -> None:
        self._real: dict[int, tuple[torch.UntypedStorage, Any]] = {}
        self.draws = False  # random whole numbers are drawn, and known

    def know(self, value: torch.Tensor, real: torch.Tensor) -> None:
        """``value`` holds what ``real`` does. Where its memory has other views, they hold it too."""
        if value.numel() > SMALL_ELEMENTS or value.numel() != real.numel():
            return
        memory = value.untyped_storage()
        if memory.nbytes() > 16 * SMALL_ELEMENTS:
            return
        room = torch.UntypedStorage(memory.nbytes())
        at = memory._cdata
        self._real[at] = (room, weakref.ref(memory, lambda _: self._real.pop(at, None)))
        found = self.of(value)
        if found is not None:
            found.copy_(real.detach().reshape(value.shape) if real.shape != value.shape else real.detach())

    def of(self, value: torch.Tensor) -> torch.Tensor | None:
        """What it holds, sharing memory with all other looks at it; None where that is unknown."""
        if value.device.type != "meta":
            return value
        if value.layout != torch.strided:
            return None
        found = self._real.get(value.untyped_storage()._cdata)
        if found is None or value.is_conj() or value.is_neg():
            return None
        return torch.empty(0, dtype=value.dtype, device=_CPU).set_(
            found[0], value.storage_offset(), value.shape, value.stride()
        )

    def forget(self, value: torch.Tensor) -> None:
        """What it holds is not known any more."""
        if value.device.type == "meta" and value.layout == torch.strided:
            self._real.pop(value.untyped_storage()._cdata, None)

    def all_known(self, tree: Any) -> bool:
        return all(self.of(leaf) is not None for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))

    def real(self, tree: Any) -> Any:
        """The same arguments on real tensors."""
        return tree_map(lambda leaf: self.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)

    def run(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """The op on real numbers; None where some of them are not known, are too many, or the op fails on them."""
        leaves = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        if any(leaf.numel() > SMALL_ELEMENTS for leaf in leaves) or not self.all_known(leaves):
            return None
        kept = {key: _CPU if key == "device" else value for key, value in self.real(options).items()}
        kept.pop("pin_memory", None)
        try:
            return func(*self.real(args), **kept)
        except Exception:  # what cannot be computed here is simply not known
            return None

    def follow(self, name: str, func: Any, args: Any, options: dict[str, Any], out: Any) -> None:
        """An op ran on meta tensors and gave ``out``: what it made is known, or what it wrote into no longer is."""
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        written = _written(func, args, options)
        drawn = self.draws and not any(leaf.is_floating_point() for leaf in outputs)
        if torch.Tag.nondeterministic_seeded in func.tags and not drawn:
            self._random(name, args, outputs, written)
        elif name in _FILLED:
            self._filled(name, args, outputs)
        elif name in _OVERWRITES and self._overwrite(name, args):
            return
        elif (not outputs and not written) or any(leaf.numel() > SMALL_ELEMENTS for leaf in outputs):
            self._lose(written)
        else:
            self._compute(func, args, options, outputs, written)

    def _compute(self, func: Any, args: Any, options: dict[str, Any], outputs: Any, written: Any) -> None:
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, options)))
        if not tensors and options.get("device") is None:
            return
        found = self.run(func, args, options)
        if found is None and not (written and not outputs and self.all_known((args, options))):
            self._lose(written)
            return
        reals = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        for value, real in zip(outputs, reals, strict=False):
            if self.of(value) is None:  # else it is a look at what is known already
                self.know(value, real)

    def _lose(self, written: list[torch.Tensor]) -> None:
        for value in written:
            self.forget(value)

    def _random(self, name: str, args: Any, outputs: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        self._lose(written)
        for value in outputs:
            if value.numel() != 1 or value.untyped_storage().nbytes() > value.element_size():
                continue
            if name in _MIDDLE:
                self.know(value, torch.full(value.shape, _MIDDLE[name], device=_CPU))
            elif name == "uniform_":
                low, high = (*args[1:3], 0.0, 1.0)[:2] if len(args) > 2 else (0.0, 1.0)
                self.know(value, torch.full(value.shape, (low + high) / 2, device=_CPU))

    def _filled(self, name: str, args: Any, outputs: list[torch.Tensor]) -> None:
        number = _FILLED[name]
        if number is None:
            number = args[2] if name == "new_full" else args[1]
        if outputs and outputs[0].numel() <= SMALL_ELEMENTS and not isinstance(number, torch.Tensor):
            self.know(outputs[0], torch.full(outputs[0].shape, number, device=_CPU))

    def _overwrite(self, name: str, args: Any) -> bool:
        """Whether the op writes known numbers over all of a tensor's memory, or over known memory."""
        target, place = args[0], _OVERWRITES[name]
        source = args[place] if place is not None else 0
        real = self.of(source) if isinstance(source, torch.Tensor) else source
        if real is None or target.device.type != "meta":
            self.forget(target)
            return False
        if self.of(target) is None:
            if target.numel() * target.element_size() < target.untyped_storage().nbytes():
                return False
            self.know(target, torch.zeros(target.shape, device=_CPU))
        here = self.of(target)
        if here is not None:
            here.copy_(real) if isinstance(real, torch.Tensor) else here.fill_(real)
        return True


def _written(func: Any, args: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op changes in place."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    named = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    order = [a.name for a in schema.arguments]
    found = [args[order.index(name)] if order.index(name) < len(args) else options.get(name) for name in named]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
