"""The lm-eval adapter on local tasks; runs where lm-eval is installed (the extra ``eval``).

It brings some 300 MB of other packages, so CI does not install it.
"""

import json
import math
from types import SimpleNamespace

import pytest

lm_eval = pytest.importorskip("lm_eval")
local_tasks = pytest.importorskip("lm_eval.tasks")

# lm-eval and what it imports warn on their own account.
pytestmark = pytest.mark.filterwarnings("ignore")

from checkpoints.lm_eval_model import PagedLm  # noqa: E402
from pw_jax.errors import UserError  # noqa: E402
from pw_jax.evaluation.scoring import score  # noqa: E402
from pw_jax.evaluation.tasks import Pair  # noqa: E402

DOCUMENTS = [
    {"question": "one and one is", "choices": ["two", "three or four", "a cat"], "gold": 0},
    {"question": "the sky is", "choices": ["green", "blue", "a very long road"], "gold": 1},
    {"question": "dogs can", "choices": ["fly", "sing", "bark"], "gold": 2},
]
TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
    "local_generation": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return PagedLm(str(tiny_folder(tmp_path_factory.mktemp("model"))), slots=2, max_length=64)


def tiny_folder(folder):
    """A random model with a tokenizer of single bytes."""
    from safetensors.numpy import save_file
    from tiny_moe import CONFIG, make_weights
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = CONFIG | {"vocab_size": 300}
    save_file(make_weights(config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def results(language_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("\n".join(json.dumps(one) for one in DOCUMENTS))
    for name, text in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs:\n  data_files: {folder / 'data.jsonl'}\n"
        head = f"task: {name}\n{source}test_split: train\n"
        (folder / f"{name}.yaml").write_text(head + text)
    manager = local_tasks.TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        language_model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )


def test_choices_are_ours(results, language_model):
    right = []
    for document in DOCUMENTS:
        pairs = [Pair(document["question"], f" {choice}") for choice in document["choices"]]
        encoded = [language_model._encoder.pair(pair) for pair in pairs]
        sums = [one.log_likelihood for one in score(language_model._held.forward, encoded)]
        right.append(max(range(3), key=sums.__getitem__) == document["gold"])
    assert results["results"]["local_choice"]["acc,none"] == pytest.approx(sum(right) / 3)


def test_rolling_likelihood_is_ours(results, language_model):
    total, size = 0.0, 0
    for document in DOCUMENTS:
        windows = language_model._encoder.rolling(document["question"])
        total += sum(one.log_likelihood for one in score(language_model._held.forward, windows))
        size += len(document["question"].encode())
    bits = results["results"]["local_rolling"]["bits_per_byte,none"]
    assert bits == pytest.approx(-total / size / math.log(2), rel=1e-6)


def test_generation_stops(results, language_model):
    samples = results["samples"]["local_generation"]
    texts = [sample["resps"][0][0] for sample in samples]
    assert len(texts) == 3
    assert all("\n" not in text and len(text.encode()) <= 12 for text in texts)

    stop = texts[0][-1]

    asked = SimpleNamespace(args=("one and one is", {"until": [stop], "max_gen_toks": 4}))
    assert language_model.generate_until([asked]) == [texts[0][: texts[0].index(stop)]]
    with pytest.raises(UserError, match="num_beams"):
        language_model.generate_until([SimpleNamespace(args=("x", {"num_beams": 4}))])
