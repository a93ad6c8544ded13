"""Public product of tokens with their experts, whose weights are any-precision pages."""

from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.implementation import Implementation, resolve
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn import kernel, reference
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages


def paged_expert_ffn(
    x: Float[Array, "M D"],
    expert_ids: Int32[Array, "M k"],
    expert_weights: Float32[Array, "M k"],
    pool: UInt32[Array, "pages words"],
    gate_up: ModulePages,
    down: ModulePages,
    *,
    gate_up_layout: MatrixLayout,
    down_layout: MatrixLayout,
    activation: Activation,
    implementation: Implementation = "auto",
) -> Float32[Array, "M D"]:
    """Computes ``sum_k weight * down(activation(gate(x)) * up(x))`` over each token's experts.

    Widths and pages are data: a planner may change them between two calls of one compiled step.

    Args:
        x: Tokens.
        expert_ids: Chosen experts; an id of E means no expert (padding).
        expert_weights: Router weights of the choices.
        pool: The page pool.
        gate_up: Pages of one layer's gate and up projections, gate rows first.
        down: Pages of its down projections.
        gate_up_layout: Layout of a gate_up matrix ``[2F, D]``.
        down_layout: Layout of a down matrix ``[D, F]``.
        activation: Applied to the gate.
        implementation: See :mod:`pallas_kernels.implementation`.

    Returns:
        float32 sums.
    """
    chosen = resolve(implementation)
    body = kernel.paged_expert_ffn if chosen == "pallas" else reference.paged_expert_ffn
    return body(
        x,
        expert_ids,
        expert_weights,
        pool,
        gate_up,
        down,
        gate_up_layout,
        down_layout,
        activation,
    )
