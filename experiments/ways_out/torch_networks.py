"""Small PyTorch networks that runs by a plan are tested with, each with its loss and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Case = tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]


class MLP(nn.Module):
    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads, causal)
        self.ln2, self.fc, self.out = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln1(x)))
        return x + self.dropout(self.out(F.gelu(self.fc(self.ln2(x)))))


class GPT(nn.Module):
    """Learned positions, tied embedding, attention by the fused kernel."""

    def __init__(self, dropout: float, words: int = 64, width: int = 32, layers: int = 2, length: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(x + self.bn2(self.conv2(y)), inplace=True)


class ResNet(nn.Module):
    """Batch norm in training mode, and activation functions in place."""

    def __init__(self, channels: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


class ViT(nn.Module):
    """Patches by a convolution, encoder blocks, mean over patches."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal=False) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x).mean(1))


class Stack(nn.Module):
    """The parameters of several blocks, each kind in one tensor, as a scan over layers has them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        shapes = {
            "qkv": (3 * width, width),
            "proj": (width, width),
            "fc": (4 * width, width),
            "out": (width, 4 * width),
        }
        self.scale = nn.Parameter(torch.ones(layers, 2, width))
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(0.1 * torch.randn(layers, *shape)) for name, shape in shapes.items()}
        )


class StackedBlock(nn.Module):
    """One block of a stack; it has no parameters of its own."""

    def __init__(self, stack: Stack, layer: int, heads: int) -> None:
        super().__init__()
        self.parts, self.layer, self.heads = (stack,), layer, heads  # in a tuple: the network registers the stack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (stack,) = self.parts
        rows, length, width = x.shape
        weight = {name: stacked[self.layer] for name, stacked in stack.weights.items()}
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in F.linear(F.layer_norm(x, (width,), stack.scale[self.layer, 0]), weight["qkv"]).split(width, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        x = x + F.linear(mixed, weight["proj"])
        inner = F.gelu(F.linear(F.layer_norm(x, (width,), stack.scale[self.layer, 1]), weight["fc"]))
        return x + F.linear(inner, weight["out"])


class Scanned(nn.Module):
    """A transformer whose layers share their parameter tensors. PyTorch has no scan in eager mode; a loop runs them."""

    def __init__(self, words: int = 64, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.wte, self.stack = nn.Embedding(words, width), Stack(layers, width)
        self.blocks = nn.ModuleList(StackedBlock(self.stack, layer, 4) for layer in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.wte(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _squares(module: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(module(batch["x"]), batch["y"])


def _words(module: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(module(batch["x"]).flatten(0, 1), batch["y"].flatten())


def _classes(module: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


def network(name: str) -> Case:
    """(module, loss, batch) by name, always the same."""
    torch.manual_seed(0)
    if name == "mlp":
        return MLP(), _squares, batch_of(name, 0)
    if name in ("gpt2", "gpt2-dropout"):
        return GPT(dropout=0.1 if name == "gpt2-dropout" else 0.0), _words, batch_of(name, 0)
    if name in ("resnet", "vit"):
        return ResNet() if name == "resnet" else ViT(), _classes, batch_of(name, 0)
    if name == "scanned":
        return Scanned(), _words, batch_of(name, 0)
    raise KeyError(name)


def batch_of(name: str, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    if name == "mlp":
        return {key: torch.randn(256, 32, generator=random) for key in "xy"}
    if name in ("resnet", "vit"):
        x = torch.randn(4, 3, 16, 16, generator=random)
        return {"x": x, "y": torch.randint(0, 10, (4,), generator=random)}
    return {key: torch.randint(0, 64, (4, 16), generator=random) for key in "xy"}


NETWORKS = ("mlp", "gpt2", "gpt2-dropout", "resnet", "vit", "scanned")
