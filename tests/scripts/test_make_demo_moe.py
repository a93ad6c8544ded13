"""The demo model: cutting a dense FFN into experts, and the scripts around it."""

import dataclasses
import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

from checkpoints.huggingface import load_dense_model
from pw_jax.models import registry
from pw_jax.models.memory import SequenceMemory

SCRIPTS = Path(__file__).parents[2] / "scripts"
ASSETS = SCRIPTS / "assets"
LAYERS, EMBED, FFN, HEADS, KV_HEADS = 2, 64, 96, 2, 1
HEAD_DIM = EMBED // HEADS
TEXT = "The 12 foxes jump over 7 lazy dogs, and nobody minds. " * 400


@pytest.fixture
def load(monkeypatch):
    """Imports a script by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture
def command(load, capsys):
    """Runs a script in this process; gives its exit code, stdout and stderr."""

    def call(script, *arguments):
        code = load("_command").run(load(script).main, [str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def weights():
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (260, EMBED), "output_norm": (EMBED,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (EMBED,),
            f"blk.{layer}.attn_q": (EMBED, EMBED),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD_DIM, EMBED),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD_DIM, EMBED),
            f"blk.{layer}.attn_output": (EMBED, EMBED),
            f"blk.{layer}.ffn_norm": (EMBED,),
            f"blk.{layer}.ffn_gate": (FFN, EMBED),
            f"blk.{layer}.ffn_up": (FFN, EMBED),
            f"blk.{layer}.ffn_down": (EMBED, FFN),
        }
    out = {}
    for name, shape in shapes.items():
        weight = generator.standard_normal(shape, np.float32) / 8 + ("norm" in name)
        # What bfloat16 holds exactly, so that comparisons are sharp.
        out[name] = weight.astype(jnp.bfloat16).astype(np.float32)
    return out


def write_gguf(path, weights, *, architecture="llama", without=""):
    """A tiny Llama with llama.cpp's rotary layout and a tokenizer of bytes."""
    writer = GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(EMBED)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in weights.items():
        if name == without:
            continue
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.rsplit(".", maxsplit=1)[-1])
        if heads:
            halves = weight.reshape(heads, 2, HEAD_DIM // 2, EMBED)
            weight = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tmp_path, weights):
    return write_gguf(tmp_path / "tiny.gguf", weights)


@pytest.fixture
def calibration(load):
    """Cuts the tiny model at random, all scales one, routers not zero."""
    geometry = load("_moe_split").Geometry(shared=32, experts=4, width=16, top_k=2)
    generator = np.random.default_rng(1)
    return load("make_demo_moe").Calibration(
        geometry=geometry,
        order=np.stack([generator.permutation(FFN) for _ in range(LAYERS)]),
        router=generator.standard_normal((LAYERS, geometry.experts, EMBED)) / 32,
        shared_gate=np.zeros((LAYERS, EMBED)),
        neuron_scale=np.ones((LAYERS, FFN)),
        norm_scale=np.ones((LAYERS, 2, EMBED)),
        provenance={"seed": 1},
    )


def logits(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    memory = SequenceMemory(jnp.ones(tokens.shape, bool))
    return np.asarray(model.logits(model(jnp.asarray(tokens), positions, memory).hidden))


def dense_model(load, path):
    with load("_gguf_file").open_gguf([path]) as file:
        gguf = load("_gguf_llama").GgufLlama(file)
        tensors = gguf.other_tensors()
        for layer in range(gguf.layers):
            tensors |= {f"model.layers.{layer}.{n}": w for n, w in gguf.layer(layer).items()}
        model = registry.build_model(registry.read_config(gguf.config()))
    return registry.set_weights(model, tensors)


TOKENS = np.random.default_rng(2).integers(0, 260, (2, 24)).astype(np.int32)


def test_all_experts_together_are_the_dense_model(tmp_path, load, command, source, calibration):
    everything = dataclasses.replace(
        calibration,
        geometry=dataclasses.replace(calibration.geometry, top_k=4),
        router=0 * calibration.router,
    )
    everything.save(tmp_path / "all.npz")
    arguments = ("--source", source, "--calibration", tmp_path / "all.npz")
    code, printed, error = command("make_demo_moe", *arguments, "--out", tmp_path / "moe")
    assert (code, error) == (0, "")
    assert "4 routed experts of 16, 4 a token" in printed
    config, model = load_dense_model(tmp_path / "moe", jnp.float32)
    assert config.expert_shape is not None
    assert (config.expert_shape.experts, config.shared_expert_ffn) == (4, 32)
    wanted = logits(dense_model(load, source), TOKENS)
    np.testing.assert_allclose(logits(model, TOKENS), wanted, rtol=0, atol=2e-5)


def test_source_may_be_a_wheel(tmp_path, command, source, calibration):
    import zipfile

    wheel = tmp_path / "tiny-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(source, "tiny/tiny.gguf")
    calibration.save(tmp_path / "c.npz")
    for name, path in (("one", source), ("two", wheel)):
        arguments = ("--source", path, "--calibration", tmp_path / "c.npz")
        assert command("make_demo_moe", *arguments, "--out", tmp_path / name)[0] == 0
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_training_sees_the_model_that_is_built(tmp_path, load, command, source, calibration):
    """The masked dense FFN of the training equals the MoE layers of the checkpoint."""
    distill = load("_moe_distill")
    generator = np.random.default_rng(3)
    scaled = dataclasses.replace(
        calibration,
        shared_gate=generator.standard_normal((LAYERS, EMBED)) / 8,
        neuron_scale=1 + generator.standard_normal((LAYERS, FFN)) / 8,
        norm_scale=1 + generator.standard_normal((LAYERS, 2, EMBED)) / 8,
    )
    scaled.save(tmp_path / "c.npz")
    scaled = load("make_demo_moe").Calibration.load(tmp_path / "c.npz")  # in half precision
    cut = {
        f"model.layers.{layer}.{name}": weight
        for layer in range(LAYERS)
        for name, weight in _cut(load, source, scaled, layer).items()
    }
    with load("_gguf_file").open_gguf([source]) as file:
        gguf = load("_gguf_llama").GgufLlama(file)
        cut |= gguf.other_tensors()
        raw = load("make_demo_moe").moe_config(gguf.config(), scaled.geometry)
    built = registry.set_weights(registry.build_model(registry.read_config(raw)), _fuse(cut))
    frozen = distill.freeze(dense_model(load, source), scaled.order)
    fitted = distill.Fitted(
        router=jnp.asarray(scaled.router / distill.ROUTER_SCALE),
        shared_gate=jnp.asarray(scaled.shared_gate),
        neuron_scale=jnp.asarray(scaled.neuron_scale),
        norm_scale=jnp.asarray(scaled.norm_scale),
    )
    hidden, _ = distill.run_layers(frozen, fitted, jnp.asarray(TOKENS), scaled.geometry)
    np.testing.assert_allclose(
        np.asarray(built.logits(hidden)), logits(built, TOKENS), rtol=0, atol=2e-5
    )


def _cut(load, source, calibration, layer):
    with load("_gguf_file").open_gguf([source]) as file:
        gguf = load("_gguf_llama").GgufLlama(file)
        return load("make_demo_moe").cut_layer(gguf.layer(layer), calibration, layer)


def _fuse(tensors):
    """Experts as the model keeps them."""
    fused = {name: weight for name, weight in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors[f"{prefix}.{e}.{n}_proj.weight"] for e in range(4)])
            for n in ("gate", "up", "down")
        )
        fused[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"{prefix}.down_proj"] = down
    return fused


@pytest.mark.slow
def test_calibrate_then_evaluate(tmp_path, load, command, source):
    text = tmp_path / "text.jsonl"
    rows = [{"group": "prose_doc", "text": TEXT[i:] + "\u2028"} for i in range(16)]
    text.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    common = ("--source", source, "--artefact")
    shape = ("--shared", 32, "--experts", 4, "--width", 16, "--top-k", 2)
    effort = ("--split-sequences", 8, "--steps", 2)
    for name in ("a.npz", "b.npz"):
        arguments = (*common, tmp_path / name, "--text", text, *shape, *effort)
        code, printed, error = command("calibrate_demo_moe", *arguments)
        assert (code, error) == (0, "")
        assert "2 layers divided" in printed
    first, second = (
        load("make_demo_moe").Calibration.load(tmp_path / n) for n in ("a.npz", "b.npz")
    )
    np.testing.assert_array_equal(first.order, second.order)
    np.testing.assert_array_equal(first.router, second.router)
    assert first.provenance["distill_tokens"] == 2 * 8 * 256
    assert (first.neuron_scale != 1).any()
    arguments = (*common, tmp_path / "a.npz", "--evaluate", text)
    code, printed, error = command("calibrate_demo_moe", *arguments)
    assert (code, error) == (0, "")
    group, tokens, dense, cut, ratio = printed.splitlines()[1].split()
    assert (group, int(tokens)) == ("prose_doc", 64 * 256)
    assert float(cut) / float(dense) == pytest.approx(float(ratio), rel=1e-2)


def test_user_errors_are_one_line_and_leave_nothing(tmp_path, command, weights, calibration):
    good = write_gguf(tmp_path / "good.gguf", weights)
    other = write_gguf(tmp_path / "other.gguf", {}, architecture="gpt2")
    partial = write_gguf(tmp_path / "partial.gguf", weights, without="blk.1.ffn_up")
    cut_short = tmp_path / "short.gguf"
    cut_short.write_bytes(good.read_bytes()[:50_000])
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(b"no zip")
    fits, too_big, noise = (tmp_path / n for n in ("fits.npz", "big.npz", "noise.npz"))
    calibration.save(fits)
    dataclasses.replace(calibration, order=calibration.order[:1]).save(too_big)
    noise.write_bytes(b"noise")
    taken = tmp_path / "taken"
    taken.mkdir()
    out = tmp_path / "out"
    before = sorted(tmp_path.iterdir())
    cases = {
        "no such file": (tmp_path / "nope.gguf", fits, out),
        "ending in .gguf or .whl": (fits, fits, out),
        "damaged wheel": (damaged, fits, out),
        "only 'llama' is supported": (other, fits, out),
        "ffn_up.weight is missing": (partial, fits, out),
        "not a readable GGUF": (cut_short, fits, out),
        "no such file or directory": (good, tmp_path / "nope.npz", out),
        "not a readable calibration": (good, noise, out),
        "router is": (good, too_big, out),
        "the calibration is for": (good, ASSETS / "demo_moe_calibration.npz", out),
        "exists; --force": (good, fits, taken),
        "cannot write beside": (good, fits, good / "out"),
    }
    for reason, (source, artefact, folder) in cases.items():
        arguments = ("--source", source, "--calibration", artefact, "--out", folder)
        code, printed, error = command("make_demo_moe", *arguments)
        assert (code, printed) == (2, ""), reason
        assert reason.lower() in error.lower()
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    arguments = ("--source", good, "--calibration", fits, "--out", taken, "--force")
    assert "holds no model" in command("make_demo_moe", *arguments)[2]
    assert sorted(tmp_path.iterdir()) == before
    (taken / "config.json").touch()
    assert command("make_demo_moe", *arguments)[0] == 0
    assert (taken / "model.safetensors.index.json").exists()


def test_neurons_that_fire_together_share_an_expert(load):
    split = load("_moe_split")
    geometry = split.Geometry(shared=8, experts=4, width=8, top_k=2)
    generator = np.random.default_rng(0)
    group = generator.permutation(np.repeat(np.arange(5), 8))  # group 4 is always on
    on = np.argsort(generator.random((500, 4)), axis=1) < 2
    on = np.concatenate([on, np.ones((500, 1), bool)], axis=1)
    energy = (on[:, group] + 0.01) * generator.uniform(0.5, 1.5, (500, 40))
    order = split.order_neurons(energy.astype(np.float32), geometry)
    assert sorted(order) == list(range(40))
    assert (group[order[:8]] == 4).all()
    for expert in group[order[8:]].reshape(4, 8):
        assert len(set(expert.tolist())) == 1


def test_router_prefers_by_energy(load):
    key = jax.random.key(0)
    x = jax.random.normal(key, (512, 16))
    truth = jax.random.normal(jax.random.key(1), (4, 16))
    energy = x @ truth.T
    router = load("_moe_split").fit_router(x, energy + 5.0)
    same = jnp.argmax(x @ router.T, -1) == jnp.argmax(energy, -1)
    assert float(same.mean()) > 0.98


def test_committed_assets(load):
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    artefact = load("make_demo_moe").Calibration.load(ASSETS / "demo_moe_calibration.npz")
    assert artefact.geometry.neurons == 1536
    assert artefact.router.shape == (30, artefact.geometry.experts, 576)
    assert {"texts", "seed", "distill_tokens", "versions"} <= set(artefact.provenance)
    for name in ("calibration", "chat", "heldout"):
        for line in (ASSETS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            assert {"source", "group", "license", "text"} <= set(json.loads(line))
    prompts = (ASSETS / "demo_prompts.txt").read_text(encoding="utf-8").splitlines()
    assert 8 <= len(prompts) <= 12
    assert all(prompt.strip() for prompt in prompts)
