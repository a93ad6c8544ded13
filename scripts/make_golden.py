"""Makes the golden files that tests compare with: tiny models and what transformers says of them.

Needs torch and transformers; imports nothing of JAX or of this project, so that a reference stays a
reference. Run it again only when a family is added or a file's layout changes:

    python scripts/make_golden.py tiny [--out tests/golden] [--only llama ...]
    python scripts/make_golden.py real --model .cache/demo_moe
    python scripts/make_golden.py real --model .cache/gemma3_270m --long

A reference file holds: tokens int32 [B, T] (right-padded), lengths int32 [B], logits float32 at
all real positions, one text after another [sum of lengths, V], generated int32 [B, new tokens]
(greedy, one prompt at a time), overrides (JSON: fields that differ from the config.json beside it)
and versions.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.torch import load_file

LENGTHS = (29, 17, 6)
NEW_TOKENS = 64
PADDING = 3
SMALLEST_MARGIN = 1e-3  # of a greedy choice: smaller ones would test luck, not the model
TOP_LOGITS, LONG_TOP_LOGITS = 64, 8
LONG_TEXT = pathlib.Path(__file__).parent / "assets" / "heldout.jsonl"
LONGEST = 768  # tokens: beyond the sliding window of Gemma 3

PROMPTS = (
    "The lighthouse keeper wrote down the weather every evening. On the third of March the wind "
    "turned to the north and the sea was rough, so the boat with the letters did not come. He "
    "counted the candles that were left, closed the heavy door and went up the stairs again.",
    "To sort a list of numbers, compare each pair of neighbours and swap them if they are in the "
    "wrong order. After the first pass the largest number has moved to the end. Repeat this for "
    "the rest of the list until a pass makes no swap, and the list is sorted.",
    "Plants make their food from light, water and carbon dioxide. The green pigment in the leaves, "
    "called chlorophyll, takes up red and blue light. The energy splits water into hydrogen and "
    "oxygen; the oxygen leaves the plant through small openings in the leaf.",
)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A tiny model: its configuration, and variants that read the same weights otherwise."""

    config: transformers.PretrainedConfig
    seed: int
    variants: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


def tiny_models() -> dict[str, Tiny]:
    """Every feature of each family switched on, at sizes that can be committed."""
    small: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "pad_token_id": PADDING,
    }
    llama = transformers.LlamaConfig(
        **small,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=16,  # not hidden_size / heads
        rms_norm_eps=1e-5,
        eos_token_id=[2, 5],
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,  # so that short texts meet all three rules
        },
    )
    tied = transformers.LlamaConfig(
        **small,
        intermediate_size=64,
        num_hidden_layers=2,
        rms_norm_eps=1e-6,
        eos_token_id=2,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    )
    qwen2_moe = transformers.Qwen2MoeConfig(
        **small,
        intermediate_size=48,
        num_hidden_layers=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=4,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    mixtral = transformers.MixtralConfig(
        **small,
        intermediate_size=32,
        num_hidden_layers=2,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        eos_token_id=[2, 5],
    )
    opt = transformers.OPTConfig(
        **{key: value for key, value in small.items() if key != "num_key_value_heads"},
        ffn_dim=64,
        num_hidden_layers=2,
        eos_token_id=2,
    )
    gemma3_text = transformers.Gemma3TextConfig(
        **small,
        intermediate_size=40,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=5,
        head_dim=16,
        query_pre_attn_scalar=24,  # not head_dim
        final_logit_softcapping=8.0,
        attention_bias=True,
        eos_token_id=[2, 5],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    )
    gemma4_shared: dict[str, Any] = {
        **small,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 5,
        "head_dim": 8,
        "global_head_dim": 16,  # so that 2 of 8 pairs rotate
        "num_global_key_value_heads": 1,  # only where keys are values
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 96,
        "final_logit_softcapping": 8.0,
        "eos_token_id": [2, 5],
    }
    gemma4_text = transformers.Gemma4TextConfig(
        **gemma4_shared,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        attention_k_eq_v=True,
    )
    gemma4 = transformers.Gemma4Config(  # dense, its full layers have v_proj
        text_config=transformers.Gemma4TextConfig(**gemma4_shared),
        vision_config=transformers.Gemma4VisionConfig(  # its weights are to be skipped
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            patch_size=2,
            position_embedding_size=4,
        ),
        audio_config=None,
    )
    deepseek_shared: dict[str, Any] = {
        **small,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "eos_token_id": 2,
        "rms_norm_eps": 0.01,  # not that of the latents
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "mscale": 0.9,
        "mscale_all_dim": 0.6,
    }
    deepseek_v2 = transformers.DeepseekV2Config(
        **deepseek_shared,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        q_lora_rank=12,
        v_head_dim=10,
        attention_bias=True,
        mlp_bias=True,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=yarn,
    )
    deepseek_v2_lite = transformers.DeepseekV2Config(
        **deepseek_shared,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        q_lora_rank=None,
        v_head_dim=8,
        rope_parameters=yarn,
    )
    greedy = {"topk_method": "greedy", "routed_scaling_factor": 1.0}
    plain_rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    sliding = {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }
    return {
        "deepseek_v2": Tiny(deepseek_v2, seed=18, variants={"greedy": greedy}),
        "deepseek_v2_lite": Tiny(deepseek_v2_lite, seed=19, variants={"plain_rope": plain_rope}),
        "gemma3_text": Tiny(gemma3_text, seed=20),
        "gemma4": Tiny(gemma4, seed=18),
        "gemma4_text": Tiny(gemma4_text, seed=18),
        "llama": Tiny(llama, seed=11),
        "llama_tied": Tiny(tied, seed=12),
        "mixtral": Tiny(mixtral, seed=14, variants={"sliding": {"sliding_window": 5}}),
        "opt": Tiny(opt, seed=15),
        "qwen2_moe": Tiny(
            qwen2_moe, seed=13, variants={"norm_topk": {"norm_topk_prob": True}, "sliding": sliding}
        ),
    }


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Random weights that keep activations alive and spread logits over about ten units."""
    generator = torch.Generator().manual_seed(seed)
    routers = ("gate.weight", "router.proj.weight")
    with torch.no_grad():
        scalars = [item for item in model.named_buffers() if item[0].endswith("layer_scalar")]
        for name, weight in (*model.named_parameters(), *scalars):
            draw = torch.randn(weight.shape, generator=generator)
            if ("norm" in name or "scal" in name) and not name.endswith(".bias"):
                weight.copy_(1 + 0.2 * draw)
            elif weight.ndim == 1:
                weight.copy_(0.3 * draw)
            elif "embed" in name:
                weight.copy_(0.5 * draw)
            else:
                gain = 3.0 if "lm_head" in name else 2.0 if name.endswith(routers) else 1.2
                weight.copy_(draw * gain * weight.shape[-1] ** -0.5)


def versions() -> str:
    """What made a file, as JSON."""
    return json.dumps(
        {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": sys.version.split()[0],
        }
    )


def reference(model: Any, tokens: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """Logits of the padded batch at real positions, and greedy tokens of each prompt alone."""
    mask = np.arange(tokens.shape[1])[None] < lengths[:, None]
    with torch.no_grad():
        logits = model(
            input_ids=torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(mask).long()
        ).logits
    generated = []
    model.generation_config.eos_token_id = None
    for row, length in zip(tokens, lengths, strict=True):
        prompt = torch.from_numpy(row[None, :length]).long()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2, dim=-1).values
        margin = float((best[:, 0] - best[:, 1]).min())
        if margin < SMALLEST_MARGIN:
            raise SystemExit(f"a greedy choice has a margin of {margin:.1e}; take another seed")
        generated.append(out.sequences[0, length:].numpy())
    return {
        "tokens": tokens,
        "lengths": lengths,
        "logits": logits.numpy()[mask],
        "generated": np.stack(generated).astype(np.int32),
    }


def load(directory: pathlib.Path, **overrides: Any) -> Any:
    """Loads a checkpoint in float32 with the plainest attention and experts."""
    config = transformers.AutoConfig.from_pretrained(directory, **overrides)
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


def make_tiny(name: str, out: pathlib.Path) -> None:
    """Writes one tiny checkpoint and its reference files."""
    tiny = tiny_models()[name]
    rng = np.random.default_rng(tiny.seed)
    lengths = np.array(LENGTHS, np.int32)
    vocab_size = tiny.config.get_text_config().vocab_size
    tokens = rng.integers(6, vocab_size, (len(LENGTHS), max(LENGTHS))).astype(np.int32)
    tokens[np.arange(tokens.shape[1])[None] >= lengths[:, None]] = PADDING
    model = transformers.AutoModelForCausalLM.from_config(tiny.config).float()
    draw_weights(model, tiny.seed)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        for file in ("config.json", "model.safetensors"):
            (out / file).write_bytes((pathlib.Path(scratch) / file).read_bytes())
    for variant, overrides in {"": {}, **tiny.variants}.items():
        arrays = reference(load(out, **overrides), tokens, lengths)
        file = out / ("reference.npz" if not variant else f"reference_{variant}.npz")
        np.savez_compressed(file, **arrays, overrides=json.dumps(overrides), versions=versions())
        spread = arrays["logits"].std()
        print(f"{file}: {file.stat().st_size / 1000:.0f} kB, logits spread {spread:.1f}")
    print(f"{out}: tensor names", *sorted(load_file(out / "model.safetensors")), sep="\n  ")


def digest(directory: pathlib.Path) -> str:
    """SHA-256 over the weight files in the order of their names."""
    found = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def make_real(directory: pathlib.Path, out: pathlib.Path, is_long: bool) -> None:
    """Writes the largest logits of a real model on the prompts, or on a long text.

    The file holds tokens int32 [B, T] (right-padded), lengths int32 [B], top_ids int32 and
    top_logits float32 [sum of lengths, N], the largest first, the weights' digest, and versions.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = load(directory)
    prompts, top_logits = PROMPTS, TOP_LOGITS
    if is_long:  # fewer logits of each token
        lines = LONG_TEXT.read_text(encoding="utf-8").split("\n")
        prompts = ("\n\n".join(json.loads(line)["text"] for line in lines if line),)
        top_logits = LONG_TOP_LOGITS
    texts = [np.array(tokenizer(prompt)["input_ids"][:LONGEST], np.int32) for prompt in prompts]
    lengths = np.array([len(tokens) for tokens in texts], np.int32)
    if lengths.min() < 48:
        raise SystemExit(f"texts are too short: {lengths.tolist()} tokens")
    tokens = np.zeros((len(texts), lengths.max()), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    mask = np.arange(tokens.shape[1])[None] < lengths[:, None]
    with torch.no_grad():
        logits = model(
            input_ids=torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(mask).long()
        ).logits[torch.from_numpy(mask)]
    top = logits.topk(top_logits, dim=-1)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "reference.npz"
    np.savez_compressed(
        file,
        tokens=tokens,
        lengths=lengths,
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
        weights_sha256=digest(directory),
        versions=versions(),
    )
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB, lengths {lengths.tolist()}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tiny = commands.add_parser("tiny", help="tiny random models of every family")
    tiny.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tests/golden"))
    tiny.add_argument("--only", nargs="+", choices=sorted(tiny_models()), help="default: all")
    real = commands.add_parser("real", help="logits of a real model on real text")
    real.add_argument("--model", type=pathlib.Path, required=True)
    real.add_argument("--out", type=pathlib.Path, help="default: tests/golden/NAME OF THE MODEL")
    real.add_argument("--long", action="store_true", help="one long text instead of three short")
    arguments = parser.parse_args()
    if arguments.command == "real":
        out = arguments.out or pathlib.Path("tests/golden") / arguments.model.name
        make_real(arguments.model, out, arguments.long)
        return
    for name in arguments.only or sorted(tiny_models()):
        make_tiny(name, arguments.out / name)


if __name__ == "__main__":
    main()
