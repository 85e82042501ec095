"""Parameters and operations of the networks against published figures, and against formulas without the networks."""

import math
from functools import cache
from itertools import pairwise

import jax
import pytest

from tmojax.importers.jax_roofline import equation_flops, is_matmul
from tmojax.importers.jax_tracing import flatten
from tmojax.models import build_model


def gpt2(layers, d, vocabulary=50257, sequence=1024):
    return (vocabulary + sequence) * d + layers * (12 * d**2 + 13 * d) + 2 * d


def llama(layers, d, hidden, vocabulary=32000):
    return 2 * vocabulary * d + layers * (4 * d**2 + 3 * d * hidden + 2 * d) + d


def encoder_block(d, hidden):
    return 4 * d * d + 4 * d + 2 * d * hidden + hidden + d + 4 * d


def bert(layers, d):
    embedding = (30522 + 512 + 2) * d + 2 * d
    masked_words = d * d + d + 2 * d + 30522
    next_sentence = d * d + d + 2 * d + 2
    return embedding + layers * encoder_block(d, 4 * d) + masked_words + next_sentence


def vit(layers, d, hidden, patch):
    patches = 3 * patch**2 * d + d
    return patches + d + ((224 // patch) ** 2 + 1) * d + layers * encoder_block(d, hidden) + 2 * d + 1000 * d + 1000


def resnet(*stages):
    count, channels = 7 * 7 * 3 * 64 + 2 * 64, 64
    for stage, blocks in enumerate(stages):
        width = 64 * 2**stage
        for block in range(blocks):
            count += channels * width + 9 * width**2 + 4 * width**2 + 2 * (width + width + 4 * width)
            if block == 0:
                count += channels * 4 * width + 2 * 4 * width
            channels = 4 * width
    return count + channels * 1000 + 1000


def densenet(*stages):
    count, channels = 7 * 7 * 3 * 64 + 2 * 64, 64
    for stage, layers in enumerate(stages):
        for _ in range(layers):
            count += 2 * channels + channels * 128 + 2 * 128 + 9 * 128 * 32
            channels += 32
        if stage < 3:
            count += 2 * channels + channels * (channels // 2)
            channels //= 2
    return count + 2 * channels + channels * 1000 + 1000


def convnext(stages, d):
    count = 3 * 16 * d + d + 2 * d
    for stage, blocks in enumerate(stages):
        width = d * 2**stage
        if stage:
            count += 2 * width // 2 + 4 * (width // 2) * width + width
        count += blocks * (49 * width + width + 2 * width + 8 * width**2 + 5 * width + width)
    return count + 2 * width + 1000 * width + 1000


def conformer(layers, d, kernel=32, labels=1024):
    subsampling = 9 * d + d + 9 * d * d + d + 19 * d * d + d  # 80 filters become 39, then 19
    feed_forward = 8 * d * d + 5 * d
    attention = 4 * (d * d + d) + d * d + 2 * d
    convolution = 2 * d * d + 2 * d + kernel * d + d + 2 * d + d * d + d
    return subsampling + layers * (2 * feed_forward + attention + convolution + 5 * 2 * d) + d * labels + labels


def dlrm():
    def perceptron(*widths):
        return sum(a * b + b for a, b in pairwise(widths))

    return 16 * 33_762_577 + perceptron(13, 512, 256, 64, 16) + perceptron(16 + 27 * 26 // 2, 512, 256, 1)


# Published: 124 M, 355 M, 774 M and 1558 M for GPT-2, 6.7 B and 13.0 B for Llama. To the last digit: BERT with both
# heads in Transformers; vision models in torchvision; 540 M for the tables of DLRM alone. The paper's 10.3, 30.7 and
# 118.8 M for Conformers include the transducer, which is left out here.
COUNTS = {
    "gpt2": (gpt2(12, 768), 124_439_808),
    "gpt2-medium": (gpt2(24, 1024), 354_823_168),
    "gpt2-large": (gpt2(36, 1280), 774_030_080),
    "gpt2-xl": (gpt2(48, 1600), 1_557_611_200),
    "llama-7b": (llama(32, 4096, 11008), 6_738_415_616),
    "llama-13b": (llama(40, 5120, 13824), 13_015_864_320),
    "bert-base": (bert(12, 768), 110_106_428),
    "bert-large": (bert(24, 1024), 336_226_108),
    "vit-b16": (vit(12, 768, 3072, 16), 86_567_656),
    "vit-l16": (vit(24, 1024, 4096, 16), 304_326_632),
    "vit-h14": (vit(32, 1280, 5120, 14), 632_045_800),
    "resnet50": (resnet(3, 4, 6, 3), 25_557_032),
    "resnet101": (resnet(3, 4, 23, 3), 44_549_160),
    "resnet152": (resnet(3, 8, 36, 3), 60_192_808),
    "densenet121": (densenet(6, 12, 24, 16), 7_978_856),
    "densenet169": (densenet(6, 12, 32, 32), 14_149_480),
    "densenet201": (densenet(6, 12, 48, 32), 20_013_928),
    "convnext-tiny": (convnext((3, 3, 9, 3), 96), 28_589_128),
    "convnext-small": (convnext((3, 3, 27, 3), 96), 50_223_688),
    "convnext-base": (convnext((3, 3, 27, 3), 128), 88_591_464),
    "convnext-large": (convnext((3, 3, 27, 3), 192), 197_767_336),
    "conformer-s": (conformer(16, 144), 8_840_896),
    "conformer-m": (conformer(16, 256), 27_529_216),
    "conformer-l": (conformer(17, 512), 115_383_296),
    "dlrm": (dlrm(), 540_677_217),
}
QUICK = {"gpt2", "llama-7b", "bert-base", "vit-b16", "resnet50", "convnext-tiny", "dlrm"}


@cache
def built(name):
    return build_model(name, batch=2)


def selected(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", selected(COUNTS))
def test_models_have_their_published_numbers_of_parameters(name):
    model = built(name)
    formula, published = COUNTS[name]
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params)) == formula == published


@pytest.mark.parametrize(
    ("name", "published_millions"), [("conformer-s", 10.3), ("conformer-m", 30.7), ("conformer-l", 118.8)]
)
def test_a_conformer_lacks_what_a_transducer_has(name, published_millions):
    # One recurrent layer (320 wide, 640 from M on), label embeddings and a joint network: 1 to 4 M parameters.
    assert 1 < published_millions - COUNTS[name][0] / 1e6 < 4


# Multiplications and additions in pairs, in 10^9 for one image of 224 x 224, as torchvision publishes them.
PUBLISHED_GMACS = {
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "densenet121": 2.83,
    "densenet169": 3.36,
    "densenet201": 4.29,
    "convnext-tiny": 4.46,
    "convnext-small": 8.68,
    "convnext-base": 15.36,
    "convnext-large": 34.36,
    "vit-b16": 17.56,
    "vit-l16": 61.55,
}


def forward_matmul_flops(model):
    graph = flatten(jax.make_jaxpr(model.loss)(model.params, model.batch))
    return sum(equation_flops(e, graph) for e in graph.equations if is_matmul(e.primitive))


@pytest.mark.parametrize("name", selected(PUBLISHED_GMACS))
def test_forward_operations_are_the_published_ones(name):
    # 0.5 %: the published figures have three digits.
    flops = forward_matmul_flops(built(name))
    assert flops / 2 / 2 / 1e9 == pytest.approx(PUBLISHED_GMACS[name], rel=0.005)


def test_forward_operations_of_bert():
    layers, d = 24, 1024
    tokens, masked = 512, 77
    block = 2 * tokens * 12 * d * d + 2 * 2 * tokens**2 * d
    heads = 2 * masked * (d * d + d * 30522) + 2 * (d * d + 2 * d)
    assert forward_matmul_flops(built("bert-large")) == 2 * (layers * block + heads)


def test_forward_operations_of_dlrm():
    bottom = 13 * 512 + 512 * 256 + 256 * 64 + 64 * 16
    top = 367 * 512 + 512 * 256 + 256
    assert forward_matmul_flops(build_model("dlrm", batch=5)) == 5 * 2 * (bottom + 27 * 27 * 16 + top)
