"""The bundled model configs, as tests look into them."""

from __future__ import annotations

import functools
from typing import Any

from kernelcast.models import model
from kernelcast.models.catalogue import bundled
from kernelcast.models.layers import SelfAttention


@functools.cache
def config_of(stem: str) -> dict[str, Any]:
    return bundled(stem)


def attentions_of(name: str) -> list[SelfAttention]:
    layers = [layer.attention for layer in model(name).expand()]
    return [a for a in layers if isinstance(a, SelfAttention)]
