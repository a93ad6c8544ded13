"""From calibrated errors to the conditional sensitivity that the planner weighs."""

import numpy as np
from jaxtyping import Float, Int


def conditional_damage(
    error: Float[np.ndarray, "L E 2 W"],
    calibration_mass: Float[np.ndarray, "L E"],
    tokens_seen: Int[np.ndarray, "L E"],
    shrink_tokens: float,
) -> Float[np.ndarray, "L E 2 W"]:
    """Sensitivity of a block per unit of routing mass, shrunk towards the mean of its layer.

    A Fisher-weighted error is a sum over the calibration's tokens, so it already holds how often
    the expert was chosen. The planner multiplies by routing again; without the division here,
    routing would count twice. An expert that calibration never reached has an error of zero,
    which would read as "free to crush", so each expert is drawn towards its layer's mean with the
    weight of `shrink_tokens` tokens.

    Args:
        error: Fisher-weighted squared error of each block at each width, summed over tokens.
        calibration_mass: Router weight summed over calibration tokens.
        tokens_seen: Calibration tokens routed to each expert.
        shrink_tokens: Tokens that the layer's mean counts for.

    Returns:
        Conditional sensitivity, float64, same shape as `error`.
    """
    mass = np.asarray(calibration_mass, dtype=np.float64)[..., None, None]
    seen = np.asarray(tokens_seen, dtype=np.float64)[..., None, None]
    error = np.asarray(error, dtype=np.float64)
    for name, values in (("error", error), ("calibration_mass", mass), ("tokens_seen", seen)):
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(f"{name} must be finite and not negative")
    layer_mass = mass.sum(axis=1, keepdims=True)
    if (layer_mass == 0).any():
        layer = int(np.flatnonzero(layer_mass == 0)[0])
        raise ValueError(f"calibration reached no expert of MoE layer {layer}: give it more text")
    layer_mean = error.sum(axis=1, keepdims=True) / layer_mass
    own = np.divide(error, mass, out=np.zeros_like(error), where=mass > 0)
    # No mass, no evidence: such an expert counts as unseen, and takes the layer's mean whole.
    seen = np.where(mass > 0, seen, 0.0)
    weight = np.divide(seen, seen + shrink_tokens, out=np.zeros_like(seen), where=seen > 0)
    return weight * own + (1.0 - weight) * layer_mean
