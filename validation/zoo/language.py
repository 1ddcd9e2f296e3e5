"""Language models that are not plain decoders: encoders, encoder-decoders, mixtures of experts, state spaces."""

import torch
import transformers


def _ids(batch, seq, vocab):
    return torch.randint(4, vocab, (batch, seq))


def _labels(inputs, mode):
    return inputs | {"labels": inputs["input_ids"]} if mode == "training" else inputs


def t5_large(batch, seq, dtype, mode):
    """``seq`` tokens in, a quarter as many out."""
    config = transformers.T5Config(
        vocab_size=32128, d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration._from_config(config, dtype=dtype)
    out = _ids(batch, seq // 4, 32000)
    inputs = {"input_ids": _ids(batch, seq, 32000), "use_cache": False}
    return model, inputs | ({"labels": out} if mode == "training" else {"decoder_input_ids": out})


def bart_large(batch, seq, dtype, mode):
    config = transformers.BartConfig(vocab_size=50265)
    model = transformers.BartForConditionalGeneration._from_config(config, dtype=dtype)
    out = _ids(batch, seq // 4, 50000)
    inputs = {"input_ids": _ids(batch, seq, 50000), "use_cache": False}
    return model, inputs | ({"labels": out} if mode == "training" else {"decoder_input_ids": out})


def deberta_v3_base(batch, seq, dtype, mode):
    config = transformers.DebertaV2Config(
        vocab_size=128100, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], max_position_embeddings=512, type_vocab_size=0, position_biased_input=False,
    )  # fmt: skip
    model = transformers.DebertaV2ForMaskedLM._from_config(config, dtype=dtype)
    return model, _labels({"input_ids": _ids(batch, seq, 128000)}, mode)


def roberta_base_autocast(batch, seq, mode):
    """fp32 weights; the forward pass under autocast to bf16."""
    config = transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)

    class Autocast(transformers.RobertaForMaskedLM):
        def forward(self, *args, **kwargs):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return super().forward(*args, **kwargs)

    return Autocast(config), _labels({"input_ids": _ids(batch, seq, 50000)}, mode)


def gemma2_2b(batch, seq, dtype, mode):
    """Soft-capped attention, which no fused kernel of PyTorch has."""
    config = transformers.Gemma2Config(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM._from_config(config, dtype=dtype)
    return model, _labels({"input_ids": _ids(batch, seq, 250000), "use_cache": False}, mode)


def mixtral_4_layers(batch, seq, dtype, mode):
    config = transformers.MixtralConfig(num_hidden_layers=4)
    model = transformers.MixtralForCausalLM._from_config(config, dtype=dtype)
    return model, _labels({"input_ids": _ids(batch, seq, 32000), "use_cache": False}, mode)


def mamba_130m(batch, seq, dtype, mode):
    """Without mamba-ssm's kernels: transformers' own loop over time."""
    config = transformers.MambaConfig(vocab_size=50280, hidden_size=768, num_hidden_layers=24, use_cache=False)
    model = transformers.MambaForCausalLM._from_config(config, dtype=dtype)
    return model, _labels({"input_ids": _ids(batch, seq, 50000)}, mode)
