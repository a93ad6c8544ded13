"""How the files of each model family spell our weight names, and matching the two.

Our dotted names are the Hugging Face ones, with the routed experts of a layer fused into
``gate_up_proj`` [E, 2F, D] (gate rows first) and ``down_proj`` [E, D, F]. A file may hold them
fused or expert by expert; everything else is the identity.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Literal

from checkpoints.tensor_files import Tensor
from pw_jax.errors import UserError

Part = Literal["all", "gate", "up"]
DTYPES = ("BF16", "F16", "F32")  # anything else is packed, quantised or not a weight
HEAD = "lm_head.weight"
_LISTED = 8  # names a message spells out before it starts to count


@dataclass(frozen=True)
class Rule:
    """One spelling: ``{block}`` stands for any prefix, ``{expert}`` for a number.

    Attributes:
        file: name in the file.
        target: our name.
        part: which rows of the target's matrix the tensor holds.
    """

    file: str
    target: str
    part: Part = "all"

    def match(self, name: str) -> "Piece | None":
        """What ``name`` holds, or None if it is not spelt this way."""
        found = _pattern(self.file).fullmatch(name)
        if found is None:
            return None
        expert = found.groupdict().get("expert")
        target = self.target.format(block=found["block"])
        return Piece(name, target, None if expert is None else int(expert), self.part)

    def spell(self, target: str, expert: int | None) -> str | None:
        """The file name for a part of ``target``, or None if the rule is about another one."""
        found = _pattern(self.target).fullmatch(target)
        return None if found is None else self.file.format(block=found["block"], expert=expert)


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    escaped = escaped.replace(r"\{block\}", "(?P<block>.+)")
    return re.compile(escaped.replace(r"\{expert\}", r"(?P<expert>\d+)"))


@dataclass(frozen=True)
class FamilyNames:
    """Names of one family.

    Attributes:
        experts: our name of a layer's experts, with ``{layer}``; None for a dense family.
        rules: spellings other than our own.
        embedding: our name of the token embedding, which is also the head of a tied model.
        ignored: endings of names that hold no weights.
        skipped: beginnings of names that belong to other parts than the text model.
        prefixes: beginnings in the file and ours; replaced before the rules are tried.
    """

    experts: str | None = None
    rules: tuple[Rule, ...] = ()
    embedding: str = "model.embed_tokens.weight"
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq")
    skipped: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()

    def piece(self, name: str) -> "Piece":
        """What the tensor ``name`` holds; the name itself if no rule is about it."""
        own = name
        for theirs, ours in self.prefixes:
            if name.startswith(theirs):
                own = ours + name.removeprefix(theirs)
        found = (rule.match(own) for rule in self.rules)
        piece = next((piece for piece in found if piece is not None), Piece(own, own))
        return replace(piece, source=name, own=own)

    def in_file(self, name: str, names: Iterable[str]) -> str:
        """Our ``name`` with the beginning that the ``names`` of a file have."""
        for theirs, ours in self.prefixes:
            if name.startswith(ours) and any(other.startswith(theirs) for other in names):
                return theirs + name.removeprefix(ours)
        return name


def separate_experts(
    ours: str = "{block}.mlp.experts",
    file: str = "{block}.mlp.experts",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Rule, ...]:
    """Rules for files that hold one tensor for each expert and projection.

    Args:
        ours: our prefix of the fused experts.
        file: the prefix in the file.
        projections: how the file calls gate, up and down.
    """
    gate, up, down = (f"{file}.{{expert}}.{projection}.weight" for projection in projections)
    return (
        Rule(gate, f"{ours}.gate_up_proj", "gate"),
        Rule(up, f"{ours}.gate_up_proj", "up"),
        Rule(down, f"{ours}.down_proj"),
    )


GEMMA4_NAMES = FamilyNames(
    experts="model.layers.{layer}.experts",
    rules=(
        *separate_experts("{block}.experts", "{block}.moe.experts"),
        *separate_experts("{block}.experts", "{block}.experts"),
        Rule("{block}.moe.experts.gate_up_proj", "{block}.experts.gate_up_proj"),
        Rule("{block}.moe.experts.down_proj", "{block}.experts.down_proj"),
    ),
    skipped=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
    prefixes=(("model.language_model.", "model."),),
)

FAMILY_NAMES: dict[str, FamilyNames] = {
    "deepseek_v2": FamilyNames(
        experts="model.layers.{layer}.mlp.experts", rules=separate_experts()
    ),
    "gemma3_text": FamilyNames(),
    "gemma4": GEMMA4_NAMES,
    "gemma4_text": GEMMA4_NAMES,
    "llama": FamilyNames(),
    "mixtral": FamilyNames(
        experts="model.layers.{layer}.mlp.experts",
        rules=(
            *separate_experts(
                file="{block}.block_sparse_moe.experts", projections=("w1", "w3", "w2")
            ),
            *separate_experts(),
            Rule("{block}.block_sparse_moe.gate.weight", "{block}.mlp.gate.weight"),
            Rule(
                "{block}.block_sparse_moe.experts.gate_up_proj", "{block}.mlp.experts.gate_up_proj"
            ),
            Rule("{block}.block_sparse_moe.experts.down_proj", "{block}.mlp.experts.down_proj"),
        ),
    ),
    "opt": FamilyNames(
        rules=(Rule("decoder.{block}", "model.decoder.{block}"),),  # the 30B files
        embedding="model.decoder.embed_tokens.weight",
    ),
    "qwen2_moe": FamilyNames(experts="model.layers.{layer}.mlp.experts", rules=separate_experts()),
}


@dataclass(frozen=True)
class Piece:
    """Where one tensor of a file goes.

    Attributes:
        source: name in the file.
        target: our name.
        expert: its index along the target's first axis; None if it fills that axis.
        part: all rows, or the gate (first) or up (second) half of them.
        own: the source with our beginning.
    """

    source: str
    target: str
    expert: int | None = None
    part: Part = "all"
    own: str = ""

    def shape(self, target: tuple[int, ...]) -> tuple[int, ...]:
        """The shape the tensor must have to fit a target of shape ``target``."""
        shape = target if self.expert is None else target[1:]
        return shape if self.part == "all" else (shape[0] // 2, *shape[1:])


@dataclass
class _Problems:
    """Everything wrong with a checkpoint's names, to be told at once."""

    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        self.found.setdefault(kind, []).append(text)

    def raise_if_any(self, where: str) -> None:
        if not self.found:
            return
        kinds = []
        for kind, texts in self.found.items():
            more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
            kinds.append(f"{kind} {', '.join(texts[:_LISTED])}{more}")
        raise UserError(f"{where}: the weights do not fit config.json: {'; '.join(kinds)}")


def match_names(
    where: str,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    family: FamilyNames,
    duplicates: Iterable[str] = (),
) -> dict[str, tuple[Piece, ...]]:
    """Matches every tensor of a checkpoint with the model's weights, each exactly once.

    ``lm_head.weight`` is let through where the model has a tied head (``expected`` lacks it):
    the reader then demands that it equals the embedding.

    Args:
        where: the folder, for the message.
        tensors: what the files hold.
        expected: the model's weights by our name, with their shapes.
        family: spellings.
        duplicates: what the reader already found to be in two places.

    Returns:
        For each of our names the tensors that make it up.

    Raises:
        UserError: naming all missing, unexpected, doubled and misshapen tensors at once.
    """
    problems = _Problems()
    for duplicate in duplicates:
        problems.add("given twice:", duplicate)
    pieces: dict[str, list[Piece]] = {}
    for name, tensor in sorted(tensors.items()):
        if name.endswith(family.ignored) or (name == HEAD and name not in expected):
            continue
        if name.startswith(family.skipped):
            continue
        piece = family.piece(name)
        shape = expected.get(piece.target)
        if shape is None or (piece.expert is not None and piece.expert >= shape[0]):
            problems.add("unexpected:", name)
            continue
        pieces.setdefault(piece.target, []).append(piece)
        if tensor.dtype not in DTYPES:
            problems.add("wrong dtype:", f"{name} ({tensor.dtype}, not {' or '.join(DTYPES)})")
        if tensor.shape != piece.shape(shape):
            wrong, right = list(tensor.shape), list(piece.shape(shape))
            problems.add("wrong shape:", f"{name} ({wrong}, not {right})")
    for target, shape in expected.items():
        missing = _check_cover(target, shape, pieces.get(target, []), family.rules, problems)
        for name in missing:
            problems.add("missing:", family.in_file(name, tensors))
    problems.raise_if_any(where)
    return {target: tuple(found) for target, found in pieces.items()}


def _check_cover(
    target: str,
    shape: tuple[int, ...],
    pieces: list[Piece],
    rules: tuple[Rule, ...],
    problems: _Problems,
) -> list[str]:
    """Notes what fills a place that another piece fills, and returns what ``target`` lacks."""
    whole = [piece for piece in pieces if piece.expert is None]
    if whole or not pieces:
        for piece in pieces:
            if piece is not whole[0]:
                problems.add("given twice:", f"{piece.source} (also {whole[0].source})")
        return [] if pieces else [target]
    seen: dict[tuple[int | None, Part], str] = {}
    for piece in pieces:
        place = (piece.expert, piece.part)
        if place in seen:
            problems.add("given twice:", f"{piece.source} (also {seen[place]})")
        seen[place] = piece.source
    parts: tuple[Part, ...] = ("all",) if pieces[0].part == "all" else ("gate", "up")
    missing = []
    for expert in range(shape[0]):
        for part in parts:
            if (expert, part) not in seen:
                spelt = (rule.spell(target, expert) for rule in rules if rule.part == part)
                names = [name for name in spelt if name is not None]
                # Of several spellings the one that the other tensors of the file have.
                likeness = [
                    len(commonprefix((name, pieces[0].own)))  # noqa: RUF071 (not paths)
                    for name in names
                ]
                missing.append(names[likeness.index(max(likeness))])
    return missing
