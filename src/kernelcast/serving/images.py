"""Prompts with images: the tower reads them first, and what it makes of them are tokens of the prompt."""

from __future__ import annotations

from dataclasses import replace

from kernelcast.networks.architecture import Architecture, towers_of
from kernelcast.networks.forward import Deployment
from kernelcast.networks.precision import Precision
from kernelcast.parallel import Layout
from kernelcast.serving.workload import Images, Workload


def with_images(workload: Workload, place: Deployment, images: int, side: int) -> Workload:
    """The workload with so many images of so many pixels a side before each prompt. Towers run in 16 bits, whole on
    each GPU that cuts the layers: images are dealt out to them (vLLM's --mm-encoder-tp-mode data)."""
    towers = towers_of(place.model, side)
    assert place.model.vision is not None  # else there are no towers
    added = images * place.model.vision.tokens(side)
    each = -(-len(workload.inputs) * images // place.layout.tp)
    read = tuple(Images(_alone(place, tower), count * each, patches) for tower, count, patches in towers)
    return replace(workload, inputs=tuple(tokens + added for tokens in workload.inputs), images=read)


def _alone(place: Deployment, tower: Architecture) -> Deployment:
    """A tower has no experts to deal out."""
    layout = Layout(dp=place.layout.dp)
    return replace(place, model=tower, precision=Precision(), layout=layout, redundant=0, overlap=False)
