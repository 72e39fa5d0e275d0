"""Networks of libraries in the table of compatibility, narrow and with random weights: `(library, name, build)`.

`build` imports what it needs, so that an absent library becomes a row that says so. Layers of `torch.nn` are in
`torch_layers` and `unusual_modules`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from networks.registry.torch_layers import Build, entry, images, tokens
from networks.registry.unusual_modules import NETWORKS
from torch import Tensor, nn

__all__ = ["NETWORKS"]


def add(library: str, name: str, build: Build) -> None:
    NETWORKS.append((library, name, build))


def vision(package: str, make: Callable[[Any], nn.Module], size: int) -> Build:
    """A network that `make` takes from the `models` of a package, on images of this size."""

    def build() -> tuple[nn.Module, Tensor]:
        return make(import_module(f"{package}.models")), images(size)

    return build


_VISION: dict[str, Callable[[Any], nn.Module]] = {
    "ResNet": lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3),
    "MobileNetV2": lambda m: m.MobileNetV2(3, 0.1),
    "MobileNetV3": lambda m: m.mobilenet_v3_small(num_classes=3, width_mult=0.25, reduced_tail=True),
    "EfficientNet": lambda m: m.EfficientNet(
        [m.efficientnet.MBConvConfig(4, 3, 2, 8, 8, 1), m.efficientnet.FusedMBConvConfig(2, 3, 2, 8, 8, 1)], 0.2,
        num_classes=3, last_channel=16,
    ),
    "DenseNet": lambda m: m.DenseNet(4, (2, 2, 2), 8, 2, num_classes=3),
    "SqueezeNet": lambda m: m.SqueezeNet("1_1", 3),
    "ShuffleNetV2": lambda m: m.ShuffleNetV2([1, 2, 1], [8, 8, 16, 16, 32], 3),
    "MNASNet": lambda m: m.MNASNet(0.1, 3),
    "RegNet": lambda m: m.RegNet(m.regnet.BlockParams.from_init_params(4, 8, 8.0, 2.0, 8, se_ratio=0.25), 3),
    "ConvNeXt": lambda m: m.ConvNeXt(
        [m.convnext.CNBlockConfig(8, 16, 1), m.convnext.CNBlockConfig(16, None, 1)], num_classes=3
    ),
    "Swin transformer": lambda m: m.SwinTransformer([2, 2], 8, [2, 2], [1, 2], [4, 4], num_classes=3),
    "Swin transformer, version 2": lambda m: m.SwinTransformer(
        [2, 2], 8, [2, 2], [1, 2], [4, 4], num_classes=3, block=m.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=m.swin_transformer.PatchMergingV2,
    ),
    "VisionTransformer": lambda m: m.VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=3),
    "MaxViT": lambda m: m.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.1, num_classes=3),
}  # fmt: skip
for name, make in _VISION.items():
    add("torchvision", name, vision("torchvision", make, 32))


@entry("torchvision", "LRASPP (segmentation)")
def _():
    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            low = self.low(x).relu()
            return {"low": low, "high": self.high(low).relu()}

    class Tensors(nn.Module):
        def __init__(self) -> None:
            from torchvision.models.segmentation import LRASPP

            super().__init__()
            self.body = LRASPP(Backbone(), 4, 8, 3, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)["out"]

    return Tensors(), images(8)


_PATCHES = {"depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 3}
_ONE_EACH = {"depths": (1, 1, 1, 1), "num_classes": 3}
_TIMM: dict[str, Callable[[Any], nn.Module]] = {
    "vit_tiny_patch16_224": lambda m: m.create_model("vit_tiny_patch16_224", img_size=32, **_PATCHES),
    "deit3_small_patch16_224": lambda m: m.create_model("deit3_small_patch16_224", img_size=32, **_PATCHES),
    "eva02_tiny_patch14_224": lambda m: m.create_model("eva02_tiny_patch14_224", img_size=28, **_PATCHES),
    "beit_base_patch16_224": lambda m: m.create_model("beit_base_patch16_224", img_size=32, **_PATCHES),
    "xcit_nano_12_p16_224": lambda m: m.create_model("xcit_nano_12_p16_224", img_size=32, **_PATCHES),
    "MlpMixer": lambda m: m.MlpMixer(3, 32, patch_size=16, num_blocks=2, embed_dim=16),
    "resnet18": lambda m: m.create_model("resnet18", channels=(8, 8, 16, 16), num_classes=3),
    "ResNetV2, weight standardisation": lambda m: m.ResNetV2((1, 1, 1), (128, 128, 128), 3, stem_chs=32),
    "convnextv2_atto": lambda m: m.create_model("convnextv2_atto", dims=(8, 8, 16, 16), **_ONE_EACH),
    "swin_tiny_patch4_window7_224": lambda m: m.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2),
        num_classes=3,
    ),
    "edgenext_small": lambda m: m.EdgeNeXt(num_classes=3, dims=(8, 16, 16, 16), heads=(2,) * 4, depths=(2,) * 4),
    "PoolFormer": lambda m: m.MetaFormer(dims=(8, 8, 16, 16), **_ONE_EACH),
    "nf_resnet26": lambda m: m.create_model("nf_resnet26", channels=(16, 16, 32, 32), **_ONE_EACH),
}  # fmt: skip
for name, make in _TIMM.items():
    add("timm", name, vision("timm", make, 28 if "patch14" in name else 32))


_SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 16, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip
_OTHER_NAMES = {"vocab_size": 50, "num_labels": 3, "pad_token_id": 0}
_TEXT: dict[str, dict[str, Any]] = {
    "Bert": _SMALL,
    "Roberta": {**_SMALL, "max_position_embeddings": 32},
    "Albert": {**_SMALL, "embedding_size": 8},
    "Electra": {**_SMALL, "embedding_size": 16},
    "DistilBert": {**_OTHER_NAMES, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "DebertaV2": _SMALL,
    "ModernBert": {**_SMALL, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "GPT2": {**_OTHER_NAMES, "bos_token_id": 1, "eos_token_id": 2, "n_embd": 16, "n_layer": 2, "n_head": 2,
             "n_positions": 16},
    "GPTNeoX": _SMALL,
    "Llama": {**_SMALL, "num_key_value_heads": 1},
    "Qwen3": {**_SMALL, "num_key_value_heads": 1, "head_dim": 8},
    "Mixtral": {**_SMALL, "num_key_value_heads": 1, "num_local_experts": 3},
}  # fmt: skip


def text(kind: str, task: str = "SequenceClassification") -> Build:
    """A classifier, and a batch of padded sequences as the tokeniser gives it."""

    def build() -> tuple[nn.Module, Any]:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**_TEXT[kind])
        mask = torch.ones(3, 6, dtype=torch.long)
        mask[1, 4:] = 0
        return getattr(transformers, f"{kind}For{task}")(config), {"input_ids": tokens(6, 50), "attention_mask": mask}

    return build


for kind in _TEXT:
    add("transformers", f"{kind}ForSequenceClassification", text(kind))
add("transformers", "BertForTokenClassification", text("Bert", "TokenClassification"))


@entry("transformers", "T5ForTokenClassification")
def _():
    from transformers import T5Config, T5ForTokenClassification

    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, num_labels=3)  # pyright: ignore
    return T5ForTokenClassification(config), {"input_ids": tokens(6, 50)}


@entry("transformers", "ViTForImageClassification")
def _():
    from transformers import ViTConfig, ViTForImageClassification

    small = {k: v for k, v in _SMALL.items() if k in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = ViTConfig(**small, intermediate_size=32, image_size=16, patch_size=8, num_labels=3)  # pyright: ignore
    return ViTForImageClassification(config), {"pixel_values": images(16)}


@entry("transformers", "SegformerForSemanticSegmentation")
def _():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 8], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8, num_labels=3,  # pyright: ignore
    )  # pyright: ignore # fmt: skip
    return SegformerForSemanticSegmentation(config), {"pixel_values": images(16)}


@entry("transformers", "Wav2Vec2ForSequenceClassification")
def _():
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    small: dict[str, Any] = {
        k: v for k, v in _SMALL.items() if k not in ("max_position_embeddings", "vocab_size", "pad_token_id")
    }
    config = Wav2Vec2Config(
        **small, conv_dim=(8, 8), conv_kernel=(4, 4), conv_stride=(2, 2), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, classifier_proj_size=8,
    )  # pyright: ignore # fmt: skip
    return Wav2Vec2ForSequenceClassification(config), {"input_values": torch.randn(2, 64)}


def adapted(kind: str, **kwargs) -> Build:
    """A text classifier in which `peft` adapts queries and values."""

    def build() -> tuple[nn.Module, Any]:
        import peft

        model, x = text("Bert")()
        config = getattr(peft, f"{kind}Config")(target_modules=["query", "value"], **kwargs)
        return peft.get_peft_model(model, config), x  # pyright: ignore

    return build


_ADAPTERS: dict[str, Build] = {
    "LoRA": adapted("Lora", r=2, init_lora_weights=False),
    "DoRA": adapted("Lora", r=2, init_lora_weights=False, use_dora=True),
    "IA3": adapted("IA3", feedforward_modules=[]),
    "LoHa": adapted("LoHa", r=2, init_weights=False),
    "OFT": adapted("OFT", oft_block_size=4, r=0, init_weights=False),
    "VeRA": adapted("Vera", r=2),
}
for kind, build in _ADAPTERS.items():
    add("peft", f"Bert with {kind}", build)


class OnGraph(nn.Module):
    """A graph network whose edges are fixed; each datum is the features of the nodes of one copy of the graph."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(4, 2)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))

    def forward(self, x: Tensor) -> Tensor:
        num, nodes = x.shape[:2]
        shift = nodes * torch.arange(num).repeat_interleave(self.edges.shape[1])  # pyright: ignore
        edges = self.edges.repeat(1, num) + shift  # pyright: ignore
        h = x.flatten(0, 1)
        for layer in self.layers:
            h = torch.tanh(layer(h, edges))
        return self.head(h).unflatten(0, (num, nodes)).mean(1)


def graph(kind: str) -> Build:
    def build() -> tuple[nn.Module, Tensor]:
        import torch_geometric.nn as pyg  # pyright: ignore[reportMissingImports]

        layers = {
            "GCNConv": lambda i: pyg.GCNConv(i, 4), "SAGEConv": lambda i: pyg.SAGEConv(i, 4),
            "GATv2Conv": lambda i: pyg.GATv2Conv(i, 4), "GINConv": lambda i: pyg.GINConv(nn.Linear(i, 4)),
            "GraphConv, max": lambda i: pyg.GraphConv(i, 4, aggr="max"),
        }  # fmt: skip
        return OnGraph([layers[kind](3), layers[kind](4)]), torch.randn(3, 4, 3)

    return build


for kind in ("GCNConv", "SAGEConv", "GATv2Conv", "GINConv", "GraphConv, max"):
    add("torch_geometric", kind, graph(kind))
