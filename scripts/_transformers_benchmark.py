"""Decode steps of transformers with random weights, in the same shapes as ours."""

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError

REPEATS = 3


def run(path: Path, batch: int, input_len: int, output_len: int, mode: str) -> dict[str, Any]:
    """Times a decode step: greedy, bfloat16, a prompt of its own cost taken off.

    Args:
        path: A config.json, or a folder that holds one.
        batch: Sequences at once.
        input_len: Tokens of a prompt.
        output_len: Tokens to generate.
        mode: ``eager``, or ``compiled`` with a static cache.

    Raises:
        UserError: torch or transformers is missing, or there is no GPU.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers
    except ImportError as missing:
        raise UserError(f"the comparison needs torch and transformers: {missing}") from None
    if not torch.cuda.is_available():
        raise UserError("the comparison needs an NVIDIA GPU that torch can use")
    path = path / "config.json" if path.is_dir() else path
    raw = read_json(path)
    config = transformers.AutoConfig.for_model(**raw)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = torch.randint(0, 1000, (batch, input_len), device="cuda")
    options = {"cache_implementation": "static"} if mode == "compiled" else {}

    def generate(new: int) -> float:
        torch.cuda.synchronize()
        began = perf_counter()
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        torch.cuda.synchronize()
        return perf_counter() - began

    generate(output_len)  # compiles
    short = median(generate(2) for _ in range(REPEATS))
    times = [generate(output_len) for _ in range(REPEATS)]
    steps = output_len - 2
    return {
        "mode": mode,
        "batch": batch,
        "input_len": input_len,
        "output_len": output_len,
        "weights": "random",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "token_ms": round(1e3 * (median(times) - short) / steps, 3),
        "spread_ms": round(1e3 * (max(times) - min(times)) / steps, 3),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
