"""Which body of an operation runs, and how a Pallas body is called."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

Implementation = Literal["auto", "xla", "pallas"]


# Every Pallas-Triton kernel warns when it is lowered, and names nothing that could replace it yet.
warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)


def on_gpu() -> bool:
    """Whether what is traced now runs on a GPU (also an abstract one, when only lowering)."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device.platform if device is not None else jax.default_backend()) == "gpu"


def resolve(implementation: Implementation) -> Literal["xla", "pallas"]:
    """Settles ``"auto"``.

    Args:
        implementation: ``"xla"`` is the jnp reference, ``"pallas"`` the GPU kernel (interpreted
            where there is no GPU), ``"auto"`` the kernel on a GPU and the reference elsewhere.

    Raises:
        ValueError: Unknown name.
    """
    if implementation not in ("auto", "xla", "pallas"):
        raise ValueError(f"implementation must be auto, xla or pallas, got {implementation!r}")
    if implementation == "auto":
        return "pallas" if on_gpu() else "xla"
    return implementation


def triton_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *,
    name: str,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """A Pallas-Triton call whose operands and results are whole arrays in device memory.

    Without a GPU it runs in the Pallas interpreter: right, and slow.

    Args:
        kernel: Body; takes a ref of each operand, then of each result.
        out_shape: Shapes of the results.
        name: Shown in profiles.
        grid: At most three dimensions, the first varies fastest.
        warps: Warps a program.
        stages: Depth of the compiler's software pipeline.
        aliases: Operand index to result index, for results written in place.
    """
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        name=name,
        grid=grid,
        input_output_aliases=dict(aliases or {}),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=not on_gpu(),
    )
