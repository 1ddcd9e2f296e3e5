"""Speech and audio."""

import torch
import transformers
from torch import nn


def whisper_medium(batch, seq, dtype, mode):
    """30 s of mel features in, ``seq`` tokens out."""
    config = transformers.WhisperConfig(
        vocab_size=51865, d_model=1024, encoder_layers=24, decoder_layers=24, encoder_attention_heads=16,
        decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration._from_config(config, dtype=dtype)
    tokens = torch.randint(4, 50000, (batch, seq))
    inputs = {"input_features": torch.randn(batch, 80, 3000).to(dtype), "use_cache": False}
    return model, inputs | ({"labels": tokens} if mode == "training" else {"decoder_input_ids": tokens})


def _speech(config, made, batch, seq, dtype):
    """The encoder alone on ``seq`` samples; the mean of its output to train on."""
    model = made._from_config(config, dtype=dtype)
    return model, {"input_values": torch.randn(batch, seq).to(dtype)}, lambda out: out.last_hidden_state.float().mean()


def wav2vec2_large(batch, seq, dtype, mode):
    config = transformers.Wav2Vec2Config(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, layerdrop=0.0,
        feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True, apply_spec_augment=False,
    )  # fmt: skip
    return _speech(config, transformers.Wav2Vec2Model, batch, seq, dtype)


def hubert_base(batch, seq, dtype, mode):
    config = transformers.HubertConfig(layerdrop=0.0, apply_spec_augment=False)
    return _speech(config, transformers.HubertModel, batch, seq, dtype)


class _Vocoder(nn.Module):
    """HiFi-GAN's generator (V1): transposed convolutions and dilated residual blocks over mel frames."""

    def __init__(self, width=512):
        super().__init__()
        self.first = nn.Conv1d(80, width, 7, padding=3)
        self.up, self.blocks = nn.ModuleList(), nn.ModuleList()
        for at, (rate, size) in enumerate(((8, 16), (8, 16), (2, 4), (2, 4))):
            channels = width >> (at + 1)
            self.up.append(nn.ConvTranspose1d(2 * channels, channels, size, rate, padding=(size - rate) // 2))
            self.blocks.append(nn.ModuleList(self._block(channels, kernel) for kernel in (3, 7, 11)))
        self.last = nn.Conv1d(width >> 4, 1, 7, padding=3)

    @staticmethod
    def _block(channels, kernel):
        return nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, padding=(kernel - 1) * step // 2, dilation=step)
            for step in (1, 1, 3, 1, 5, 1)
        )

    def forward(self, mels):
        x = self.first(mels)
        for up, blocks in zip(self.up, self.blocks, strict=True):
            x = up(nn.functional.leaky_relu(x, 0.1))
            x = sum(self._residual(x, block) for block in blocks) / len(blocks)
        return torch.tanh(self.last(nn.functional.leaky_relu(x)))

    @staticmethod
    def _residual(x, block):
        for first, second in zip(block[::2], block[1::2], strict=True):
            x = x + second(nn.functional.leaky_relu(first(nn.functional.leaky_relu(x, 0.1)), 0.1))
        return x


def hifigan(batch, seq, dtype, mode):
    """``seq`` mel frames to 256 samples each."""
    return _Vocoder().to(dtype), torch.randn(batch, 80, seq).to(dtype)
