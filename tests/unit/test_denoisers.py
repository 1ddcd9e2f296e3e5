"""Models that are traced by name and that `infer` does not read: denoisers of diffusion pipelines and speech models."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kernelcast.errors import KernelcastError
from kernelcast.models.catalogue import config, traced_names, traced_table

torch = pytest.importorskip("torch")
from kernelcast.tracing.build import TraceRequest, build  # noqa: E402
from kernelcast.tracing.denoisers import _sizes  # noqa: E402

MODELS = traced_table()["models"]
DENOISERS = [name for name, entry in MODELS.items() if "_class_name" in entry["config"]]
needs_diffusers = pytest.mark.skipif(not importlib.util.find_spec("diffusers"), reason="diffusers is not installed")


@pytest.mark.parametrize("name", sorted(MODELS.keys() - DENOISERS))
def test_a_speech_model_has_the_parameters_of_its_checkpoint(name: str) -> None:
    built = build(TraceRequest(name))
    assert sum(x.numel() for x in built.model.parameters()) == MODELS[name]["parameters"]
    mels = MODELS[name]["config"]["num_mel_bins"]
    assert list(built.inputs["input_features"].shape) == [1, mels, 3000]  # 30 s, a frame each 10 ms
    assert list(built.inputs["decoder_input_ids"].shape) == [1, 448]


@needs_diffusers
@pytest.mark.parametrize("name", DENOISERS)
def test_a_denoiser_has_the_parameters_of_its_checkpoint(name: str) -> None:
    built = build(TraceRequest(name))
    assert sum(x.numel() for x in built.model.parameters()) == MODELS[name]["parameters"]
    assert ("guidance" in built.inputs) == (name == "flux.1-dev")


@needs_diffusers
def test_a_denoiser_is_forecast(run: Any) -> None:
    code, out, _ = run("trace", "sd1.5", "--gpu", "l40s", "--batch", "2", "--image-size", "768")
    assert code == 0 and "sample 2x4x96x96" in out and "859,520,964 parameters" in out
    code, _, err = run("trace", "sdxl", "--gpu", "l40s", "--image-size", "1000")
    assert code == 2 and "--image-size must be a multiple of 16 pixels, not 1000" in err
    code, _, err = run("trace", "sdxl", "--gpu", "l40s", "--cache")
    assert code == 2 and "UNet2DConditionModel has none" in err


def test_sizes_of_latents() -> None:
    # 1024 pixels: 128 latents a side, 64 x 64 patches of 2 x 2; 480 x 832 pixels of 81 frames: 60 x 104 of 21
    flux, wan = (traced_table()["denoisers"][f"{name}Model"] for name in ("FluxTransformer2D", "WanTransformer3D"))
    found = _sizes({}, flux, TraceRequest("flux.1-dev", 2))
    assert (found["batch"], found["height"], found["patches"], found["text"]) == (2, 128, 4096, 512)
    found = _sizes({}, wan, TraceRequest("wan2.1", 1, 77))
    assert (found["frames"], found["height"], found["width"], found["text"]) == (21, 60, 104, 77)
    assert _sizes({"sample_size": 64}, flux, TraceRequest("x"))["height"] == 64


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("sdxl", "needs diffusers: pip install"),
        ({"_class_name": "AutoencoderKL"}, "is of diffusers' class AutoencoderKL: give it and its inputs by FILE.py"),
    ],
)
def test_what_cannot_be_built_is_said(what: Any, said: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(what, dict):
        (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
        what = str(tmp_path / "config.json")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "diffusers" else find(name))
    with pytest.raises(KernelcastError, match=said):
        build(TraceRequest(what))


def test_every_name_means_one_model() -> None:
    for stem, spellings in traced_names().items():
        for name in spellings:
            assert config(name)[0] == stem, name
