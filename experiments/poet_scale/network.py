"""The training graph of POET's README command: ResNet-18 for CIFAR-10, batch 1, forward, loss and backward, 133 nodes.

Layers, shapes, FLOP counts and the constants of the board are those of POET's published code
(github.com/ShishirPatil/poet: poet/architectures/resnet.py, power_computation.py, chipsets.py, platform `a72`);
`python poet/solve.py --model resnet18_cifar --platform a72 --ram-budget 3000000 --runtime-budget 7.6`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tmojax.ilp.checkmate_graph import StageGraph
from tmojax.ilp.poet_model import Energy, Paging

BYTES_PER_VALUE = 4
FLOP_PER_JOULE = 16283e5 / (13.53 * 0.6 * 5)
FLOP_PER_S = 2e9
MEMORY_POWER_W = 0.15
IN_LATENCY_S, IN_BYTES_PER_S = 5.09561e-6, 45.5e6
OUT_LATENCY_S, OUT_BYTES_PER_S = 18.5314e-6, 24.5e6


@dataclass(frozen=True, eq=False)
class Network:
    """names, flop, output_bytes [T]; edges: (producer, user), as the published code lists them (one twice)."""

    names: tuple[str, ...]
    flop: np.ndarray
    output_bytes: np.ndarray
    edges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def node_s(self) -> np.ndarray:
        return self.flop / FLOP_PER_S

    @property
    def node_joule(self) -> np.ndarray:
        return self.flop / FLOP_PER_JOULE

    @property
    def in_s(self) -> np.ndarray:
        return IN_LATENCY_S + self.output_bytes / IN_BYTES_PER_S

    @property
    def out_s(self) -> np.ndarray:
        return OUT_LATENCY_S + self.output_bytes / OUT_BYTES_PER_S


def resnet18_cifar() -> Network:
    """The graph in the order in which the layers are defined, gradients last."""
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    flop: list[float] = []
    edges: list[tuple[int, int]] = []

    def add(name: str, shape: tuple[int, ...], flops: float, *inputs: int) -> int:
        names.append(name)
        shapes.append(shape)
        flop.append(float(flops))
        edges.extend((source, len(names) - 1) for source in inputs)
        return len(names) - 1

    def conv(name: str, source: int, channels: int, stride: int) -> int:
        _, height, width = shapes[source]
        shape = (channels, height // stride, width // stride)
        return add(name, shape, 2 * 9 * np.prod(shapes[source]) * channels + np.prod(shape), source)

    def same(name: str, per_value: int, *sources: int) -> int:
        return add(name, shapes[sources[0]], per_value * np.prod(shapes[sources[0]]), *sources)

    x = add("input", (3, 32, 32), 0)
    x = conv("stem.conv", x, 16, 1)
    x = same("stem.bn", 2, x)
    for number, (channels, stride) in enumerate(((16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1))):
        here, source = f"block{number}", x
        y = same(f"{here}.bn1", 2, conv(f"{here}.conv1", source, channels, stride))
        y = conv(f"{here}.conv2", same(f"{here}.relu1", 1, y), channels, 1)
        y = same(f"{here}.relu2", 1, same(f"{here}.bn2", 2, y))
        z = same(f"{here}.bn3", 2, conv(f"{here}.conv3", source, channels, stride))
        x = same(f"{here}.relu3", 1, same(f"{here}.skip", 1, y, z))
    x = add("pool", (64, 1, 1), 2 * 64 * 64, x)
    x = same("flatten", 1, x)
    x = add("linear", (10,), 2 * 65 * 10 + 10, x)
    last = add("loss", (10,), 10 * 10, x)
    forward = last
    for layer in reversed(range(forward)):
        last = add(f"d_{names[layer]}", shapes[layer + 1], 2 * flop[layer], layer, layer + 1, last)
    sizes = np.array([int(np.prod(shape)) * BYTES_PER_VALUE for shape in shapes], np.int64)
    return Network(tuple(names), np.array(flop), sizes, tuple(edges))


def graph_of(network: Network) -> StageGraph:
    """One node and one value for every layer and gradient; nothing is held."""
    size = network.size
    reads: list[list[int]] = [[] for _ in range(size)]
    for source, user in network.edges:
        if source not in reads[user]:
            reads[user].append(source)
    nothing, own = np.zeros(size, np.int64), tuple((node,) for node in range(size))
    return StageGraph(
        network.node_s, np.ones(size, bool), tuple(map(tuple, reads)), own, nothing, nothing, nothing,
        network.output_bytes, np.arange(size), np.arange(size), own,
    )  # fmt: skip


def energy_of(network: Network) -> Energy:
    return Energy(network.node_joule, MEMORY_POWER_W * network.in_s, MEMORY_POWER_W * network.out_s)


def paging_of(network: Network) -> Paging:
    return Paging(OUT_BYTES_PER_S, IN_BYTES_PER_S, out_copy_s=OUT_LATENCY_S, in_copy_s=IN_LATENCY_S)
