"""What a compiled program communicates, read from its HLO text.

    lowered = jax.jit(step).lower(*arguments)
    for one in read_collectives(lowered):
        print(one.kind, one.shapes, one.runs, one.wire_bytes)

Needs no device but the host: compile for CPU devices (``jax_num_cpu_devices``), from
``jax.ShapeDtypeStruct`` if the weights are large.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.stages import Compiled, Lowered

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_ITEM_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
_OPERATION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.+?) ({'|'.join(KINDS)})(-start)?\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$")
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_STABLE = re.compile(
    r'"?stablehlo\.(all_gather|all_reduce|reduce_scatter|all_to_all|collective_permute)"?\('
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program, as one device sees it.

    Attributes:
        kind: One of `KINDS`; the halves of an asynchronous pair are one.
        shapes: Of its results; several if the compiler has combined some.
        dtypes: Of its results, as the program wrote them (``bf16``, ``f32``): the CPU backend
            widens some, which is undone where the lowered program was at hand.
        group: Devices that take part together.
        runs: How often it runs in one call of the program: trip counts of loops around it.
        runs_known: False if a loop around it has no known trip count, and counts once.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    group: int
    runs: int = 1
    runs_known: bool = True

    @property
    def elements(self) -> int:
        """Elements of the results of one run."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def result_bytes(self) -> int:
        """Bytes of the results of one run."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * item_bytes(dtype) for shape, dtype in pairs)

    @property
    def wire_elements(self) -> float:
        """Elements that a device sends in all runs, by a ring."""
        return self.runs * self.elements * ring_factor(self.kind, self.group)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in all runs, by a ring."""
        return self.runs * self.result_bytes * ring_factor(self.kind, self.group)


def ring_factor(kind: str, group: int) -> float:
    """What a device sends in a ring for each element of its result.

    An all-gather's result is the gathered array, a reduce-scatter's one share of it.
    """
    share = (group - 1) / group
    match kind:
        case "all-gather" | "all-to-all" | "ragged-all-to-all":
            return share
        case "all-reduce":
            return 2 * share
        case "reduce-scatter":
            return group - 1.0
    return 1.0 if group > 1 else 0.0


def read_collectives(
    program: Lowered | Compiled | str, compiled: Compiled | None = None
) -> tuple[Collective, ...]:
    """The collectives of a program for one device.

    All branches of a conditional count, as if each were taken.

    Args:
        program: A lowered program, which is compiled here, and whose own dtypes are reported; or a
            compiled one or its HLO text, whose dtypes are the backend's.
        compiled: What a lowered program was compiled to, if that is at hand.

    Returns:
        In the order of the text.
    """
    if not isinstance(program, Lowered):
        text = program if isinstance(program, str) else program.as_text()
        return _parse(text or "")
    found = _parse((compiled or program.compile()).as_text() or "")
    return _narrow(found, program.as_text())


def total_wire_elements(collectives: Iterable[Collective]) -> float:
    """Elements that a device sends."""
    return sum(one.wire_elements for one in collectives)


def total_wire_bytes(collectives: Iterable[Collective]) -> float:
    """Bytes that a device sends."""
    return sum(one.wire_bytes for one in collectives)


def widths(collectives: Iterable[Collective]) -> set[int]:
    """Length of the last axis of every array that is communicated."""
    return {shape[-1] for one in collectives for shape in one.shapes if shape}


def item_bytes(dtype: str) -> int:
    """Bytes of one element of an HLO type."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    if dtype.startswith("f8"):
        return 1
    bits = re.fullmatch(r"[su](\d+)", dtype)
    if bits is None:
        raise ValueError(f"HLO type {dtype!r} is not known here")
    return max(1, int(bits.group(1)) // 8)


def _parse(text: str) -> tuple[Collective, ...]:
    """All collectives of HLO text, in every computation that the entry reaches."""
    computations, entry = _computations(text)
    partitions = _partitions(text)
    runs: Counter[str] = Counter()
    unknown: set[str] = set()

    def visit(name: str, times: int, known: bool) -> None:
        runs[name] += times
        if not known:
            unknown.add(name)
        for line in computations.get(name, ()):
            if re.search(r"\basync-(done|update)\(", line):
                continue  # names the same computation as its start
            trips, sure = 1, known
            if " while(" in line:
                found = _TRIPS.search(line)
                trips, sure = (int(found.group(1)), known) if found else (1, False)
            for called in _CALLED.findall(line):
                for callee in re.findall(r"[\w.\-]+", called):
                    visit(callee, times * trips, sure)

    if entry is not None:
        visit(entry, 1, True)
    found = []
    for name, lines in computations.items():
        for line in lines:
            operation = _OPERATION.match(line)
            if operation and runs[name]:
                kind, arrays = operation.group(2), _results(operation)
                found.append(
                    Collective(
                        kind,
                        tuple(shape for _, shape in arrays),
                        tuple(dtype for dtype, _ in arrays),
                        _group(operation.group(4), partitions),
                        runs[name],
                        name not in unknown,
                    )
                )
    return tuple(found)


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    """Lines of each computation, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry = current = None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = head.group(2)
            computations[current] = []
            entry = current if head.group(1) else entry
        elif current is not None:
            computations[current].append(line)
    return computations, entry


def _results(operation: re.Match[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each result; the start of a pair lists its operands before them."""
    kind, is_start = operation.group(2), operation.group(3)
    arrays = [
        (dtype, tuple(int(length) for length in lengths.split(",") if length))
        for dtype, lengths in _ARRAY.findall(operation.group(1))
    ]
    if not is_start or kind == "all-reduce":
        return arrays
    if kind == "all-gather":
        return arrays[len(arrays) // 2 :]
    return arrays[1:2]


def _partitions(text: str) -> int:
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    return math.prod(int(count) for count in counts)


def _group(attributes: str, partitions: int) -> int:
    """Devices of a group, from any of the three spellings of replica groups."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if mesh:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", mesh.group(2)))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes)
    if iota:
        return int(iota.group(1))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return len(listed.group(1).split(","))
    return partitions


def _narrow(collectives: tuple[Collective, ...], stable: str) -> tuple[Collective, ...]:
    """Gives results the dtypes that the program wrote, where those are unambiguous."""
    written: dict[tuple[str, int], set[str]] = {}
    for match in _STABLE.finditer(stable):
        kind = match.group(1).replace("_", "-")
        result = re.search(r"-> \(?((?:tensor<[^>]*>(?:, )?)+)", stable[match.end() :])
        for tensor in re.findall(r"tensor<([^>]*)>", result.group(1)) if result else ():
            *shape, dtype = tensor.split("x")
            dtype = re.sub(r"^u?i(?=\d)", lambda m: "u" if m.group() == "ui" else "s", dtype)
            key = (kind, int(np.prod([int(length) for length in shape], dtype=np.int64)))
            written.setdefault(key, set()).add(dtype)

    def narrowed(one: Collective) -> Collective:
        dtypes: list[str] = []
        for dtype, shape in zip(one.dtypes, one.shapes, strict=True):
            own = written.get((one.kind, math.prod(shape)), set())
            alone = next(iter(own)) if len(own) == 1 else dtype
            dtypes.append(alone if dtype == "f32" and alone in ("bf16", "f16") else dtype)
        return dataclasses.replace(one, dtypes=tuple(dtypes))

    return tuple(narrowed(one) for one in collectives)


def as_json(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """For reports."""
    return [
        dataclasses.asdict(one) | {"wire_elements": one.wire_elements, "wire_bytes": one.wire_bytes}
        for one in collectives
    ]
