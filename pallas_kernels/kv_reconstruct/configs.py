"""Tuned sizes and rates of latent attention: data, measured on an H200."""

from dataclasses import dataclass

from pallas_kernels.paged_attention.configs import DecodeConfig


@dataclass(frozen=True)
class ScoreConfig:
    """Sizes of a kernel of scores.

    Attributes:
        tokens: Tokens a program.
        words: Words of the rank a step.
        warps: Warps a program.
        stages: Depth of the software pipeline.
        rows: Most query heads a program, where heads share a latent.
    """

    tokens: int
    words: int
    warps: int
    stages: int
    rows: int = 64


@dataclass(frozen=True)
class WeightedConfig(DecodeConfig):
    """Sizes of the kernel that weighs latents.

    Attributes:
        words: Words of the rank a program.
        rows: Most query heads a program.
    """

    words: int = 64
    rows: int = 64


@dataclass(frozen=True)
class Kernels:
    """Sizes of all kernels."""

    absorbed: ScoreConfig
    rebuilt: ScoreConfig
    weighted: WeightedConfig


KERNELS = Kernels(
    absorbed=ScoreConfig(tokens=64, words=64, warps=4, stages=3),
    rebuilt=ScoreConfig(tokens=128, words=32, warps=4, stages=3),
    weighted=WeightedConfig(tile=64, warps=4, stages=3, programs=1024, split_tokens=256),
)


@dataclass(frozen=True)
class Rates:
    """What the counts are divided by, in units of a microsecond.

    Attributes:
        bytes: Bytes of memory read or written.
        operations: Operations of large bfloat16 products by XLA.
        kernel_operations: Operations of bfloat16 products in our kernels.
        launch: Microseconds a kernel at least.
    """

    bytes: float
    operations: float
    kernel_operations: float
    launch: float


RATES = Rates(bytes=3.5e6, operations=600e6, kernel_operations=200e6, launch=2.0)
