"""Diffusion: a UNet as Stable Diffusion's, a diffusion transformer, an image decoder; written here in plain PyTorch."""

import math

import torch
from torch import nn
from torch.nn import functional


class _Residual(nn.Module):
    def __init__(self, before, after, embedded=0):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, after), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(embedded, after) if embedded else None
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, time=None):
        y = self.conv1(functional.silu(self.norm1(x)))
        if self.time is not None:
            y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(y)))


class _Attention(nn.Module):
    def __init__(self, width, heads, context=None):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(context or width, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), self.k(context), self.v(context))
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Spatial(nn.Module):
    """A transformer block over pixels: to themselves, to the text, and a gated MLP."""

    def __init__(self, width, heads, context):
        super().__init__()
        self.norm, self.into, self.back = (
            nn.GroupNorm(32, width),
            nn.Conv2d(width, width, 1),
            nn.Conv2d(width, width, 1),
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.text = _Attention(width, heads), _Attention(width, heads, context)
        self.gate, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x, text):
        y = self.into(self.norm(x)).flatten(2).transpose(1, 2)
        y = y + self.own(self.norms[0](y))
        y = y + self.text(self.norms[1](y), text)
        up, gate = self.gate(self.norms[2](y)).chunk(2, -1)
        y = y + self.down(up * functional.gelu(gate))
        return x + self.back(y.transpose(1, 2).reshape(x.shape))


class _Level(nn.Module):
    def __init__(self, before, after, time, context):
        super().__init__()
        self.residual = _Residual(before, after, time)
        self.spatial = _Spatial(after, 8, context) if context else None

    def forward(self, x, time, text):
        x = self.residual(x, time)
        return x if self.spatial is None else self.spatial(x, text)


class _UNet(nn.Module):
    """Stable Diffusion 1's: 320 to 1280 channels, two residual blocks a level, attention at the upper three."""

    def __init__(self, channels=(320, 640, 1280, 1280), context=768, time=1280):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(320, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(4, channels[0], 3, padding=1)
        self.down, self.shrink, kept, width = nn.ModuleList(), nn.ModuleList(), [channels[0]], channels[0]
        for at, c in enumerate(channels):
            for _ in range(2):
                self.down.append(_Level(width, c, time, context if at < 3 else None))
                width = c
                kept.append(width)
            if at < 3:
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                kept.append(width)
        self.middle = nn.ModuleList((_Level(width, width, time, context), _Level(width, width, time, None)))
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for at, c in reversed(list(enumerate(channels))):
            for _ in range(3):
                self.up.append(_Level(width + kept.pop(), c, time, context if at < 3 else None))
                width = c
            if at:
                self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x, at, text):
        steps = torch.exp(-math.log(10000) / 160 * torch.arange(160, device=x.device, dtype=torch.float32))
        angles = at.float()[:, None] * steps
        time = self.time(torch.cat((angles.cos(), angles.sin()), -1).to(x.dtype))
        x = self.first(x)
        kept = [x]
        for at_level in range(4):
            for block in self.down[2 * at_level : 2 * at_level + 2]:
                x = block(x, time, text)
                kept.append(x)
            if at_level < 3:
                x = self.shrink[at_level](x)
                kept.append(x)
        for block in self.middle:
            x = block(x, time, text)
        for at_level in range(4):
            for block in self.up[3 * at_level : 3 * at_level + 3]:
                x = block(torch.cat((x, kept.pop()), 1), time, text)
            if at_level < 3:
                x = self.grow[at_level](functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.last(functional.silu(self.norm(x)))


def sd_unet(batch, dtype, mode):
    """Latents of 64 x 64, 77 tokens of text."""
    noise = torch.randn(batch, 4, 64, 64).to(dtype)
    inputs = (torch.randn(batch, 4, 64, 64).to(dtype), torch.randint(0, 1000, (batch,)),
              torch.randn(batch, 77, 768).to(dtype))  # fmt: skip
    return _UNet().to(dtype), inputs, lambda out: functional.mse_loss(out.float(), noise.float())


class _VaeDecoder(nn.Module):
    def __init__(self, channels=(512, 512, 256, 128)):
        super().__init__()
        self.first, width = nn.Conv2d(4, channels[0], 3, padding=1), channels[0]
        self.middle = nn.ModuleList((_Residual(width, width), _Residual(width, width)))
        self.levels = nn.ModuleList()
        for at, c in enumerate(channels):
            blocks = [_Residual(width if n == 0 else c, c) for n in range(3)]
            grow = [nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(c, c, 3, padding=1)] if at < 3 else []
            self.levels.append(nn.Sequential(*blocks, *grow))
            width = c
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        for block in self.middle:
            x = block(x)
        for level in self.levels:
            x = level(x)
        return self.last(functional.silu(self.norm(x)))


def vae_decoder(batch, dtype, mode):
    """Latents of 64 x 64 to images of 512 x 512."""
    return _VaeDecoder().to(dtype), torch.randn(batch, 4, 64, 64).to(dtype), lambda out: out.float().square().mean()


class _DitBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = _Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = (m[:, None] for m in self.modulation(c).chunk(6, -1))
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class _Dit(nn.Module):
    def __init__(self, width=1152, depth=28, heads=16, patch=2):
        super().__init__()
        self.patches = nn.Conv2d(4, width, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros(1, 256, width))
        self.classes = nn.Embedding(1001, width)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_DitBlock(width, heads) for _ in range(depth))
        self.norm, self.last = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, patch * patch * 8)

    def forward(self, x, at, label):
        steps = torch.exp(-math.log(10000) / 128 * torch.arange(128, device=x.device, dtype=torch.float32))
        angles = at.float()[:, None] * steps
        c = self.time(torch.cat((angles.cos(), angles.sin()), -1).to(x.dtype)) + self.classes(label)
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, c)
        return self.last(self.norm(x))


def dit_xl_2(batch, dtype, mode):
    """Latents of 32 x 32 in patches of 2 x 2."""
    inputs = (torch.randn(batch, 4, 32, 32).to(dtype), torch.randint(0, 1000, (batch,)),
              torch.randint(0, 1000, (batch,)))  # fmt: skip
    return _Dit().to(dtype), inputs, lambda out: out.float().square().mean()
