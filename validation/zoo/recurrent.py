"""Recurrence by cuDNN."""

import torch
from torch import nn
from torch.nn import functional


class _LanguageModel(nn.Module):
    def __init__(self, vocab=33278, width=1500, layers=2):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(vocab, width), nn.Dropout(0.65)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.65)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.head(self.drop(self.lstm(self.drop(self.embedding(tokens)))[0]))


def lstm_language_model(batch, seq, dtype, mode):
    tokens = torch.randint(0, 33278, (batch, seq))
    return (
        _LanguageModel().to(dtype),
        tokens,
        lambda out: functional.cross_entropy(out.flatten(0, 1).float(), tokens.flatten()),
    )


class _Tagger(nn.Module):
    """Four bidirectional GRU layers over frames, as DeepSpeech 2."""

    def __init__(self, width=1024):
        super().__init__()
        self.gru = nn.GRU(320, width, 4, bidirectional=True)
        self.head = nn.Linear(2 * width, 64)

    def forward(self, frames):
        return self.head(self.gru(frames)[0])


def gru_tagger(batch, seq, dtype, mode):
    return _Tagger().to(dtype), torch.randn(seq, batch, 320).to(dtype), lambda out: out.float().square().mean()
