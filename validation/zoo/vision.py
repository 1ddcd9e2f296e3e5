"""Image, video and segmentation models: torchvision's own classes, and some of Hugging Face's."""

import torch
import torchvision.models as tv
from torch import nn
from torch.nn.functional import cross_entropy


def _classifier(model, batch, dtype, mode, size=(224, 224), classes=1000, last=False):
    """A model with random images; in training the cross entropy of random labels."""
    model, images = model.to(dtype), torch.randn(batch, 3, *size).to(dtype)
    if last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, (batch,))
    return model, images, lambda out: cross_entropy(out, labels)


def resnet50(batch, dtype, mode):
    return _classifier(tv.resnet50(), batch, dtype, mode)


def resnet50_channels_last(batch, dtype, mode):
    return _classifier(tv.resnet50(), batch, dtype, mode, last=True)


def wide_resnet101(batch, dtype, mode):
    return _classifier(tv.wide_resnet101_2(), batch, dtype, mode)


def resnext50(batch, dtype, mode):
    return _classifier(tv.resnext50_32x4d(), batch, dtype, mode)


def regnet_y_8gf(batch, dtype, mode):
    return _classifier(tv.regnet_y_8gf(), batch, dtype, mode, last=True)


def convnext_base(batch, dtype, mode):
    return _classifier(tv.convnext_base(), batch, dtype, mode)


def vgg16(batch, dtype, mode):
    return _classifier(tv.vgg16(), batch, dtype, mode)


def densenet121(batch, dtype, mode):
    return _classifier(tv.densenet121(), batch, dtype, mode)


def efficientnet_v2_m(batch, dtype, mode):
    return _classifier(tv.efficientnet_v2_m(), batch, dtype, mode, size=(384, 384))


def mobilenet_v3_large(batch, dtype, mode):
    return _classifier(tv.mobilenet_v3_large(), batch, dtype, mode)


def inception_v3(batch, dtype, mode):
    return _classifier(tv.inception_v3(aux_logits=False, init_weights=False), batch, dtype, mode, size=(299, 299))


def vit_l_16(batch, dtype, mode):
    return _classifier(tv.vit_l_16(), batch, dtype, mode)


def swin_b(batch, dtype, mode):
    return _classifier(tv.swin_b(), batch, dtype, mode)


class _Segmented(nn.Module):
    """torchvision's segmentation gives a dictionary; here the map itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images)["out"]


def deeplabv3_resnet50(batch, dtype, mode):
    model = _Segmented(tv.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, aux_loss=False))
    model, images = model.to(dtype), torch.randn(batch, 3, 512, 512).to(dtype)
    labels = torch.randint(0, 21, (batch, 512, 512))
    return model, images, lambda out: cross_entropy(out, labels)


def r3d_18(batch, dtype, mode):
    model, clips = tv.video.r3d_18().to(dtype), torch.randn(batch, 3, 16, 112, 112).to(dtype)
    labels = torch.randint(0, 400, (batch,))
    return model, clips, lambda out: cross_entropy(out, labels)


def clip_vit_l(batch, seq, dtype, mode):
    """Both towers: images of 224 pixels, texts of ``seq`` tokens, and the contrastive loss."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    config = CLIPConfig(vision_config=sizes | {"patch_size": 14}, text_config=text, projection_dim=768)
    model = CLIPModel._from_config(config, dtype=dtype)
    tokens = torch.randint(4, 49000, (batch, seq))
    pixels = torch.randn(batch, 3, 224, 224).to(dtype)
    return model, {"input_ids": tokens, "pixel_values": pixels, "return_loss": mode == "training"}


def segformer_b2(batch, dtype, mode):
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768, num_labels=150
    )
    model = SegformerForSemanticSegmentation._from_config(config, dtype=dtype)
    inputs = {"pixel_values": torch.randn(batch, 3, 512, 512).to(dtype)}
    if mode == "training":
        inputs["labels"] = torch.randint(0, 150, (batch, 512, 512))
    return model, inputs
