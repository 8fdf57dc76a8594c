"""What no step changes, on disk once: frozen arrays lie beside the checkpoints that need them.

    checkpoints/
      constant/
        5e0c1f3a9b7d2468/    the first digits of a digest of all that it holds
          arrays/            an orbax checkpoint, as in a step
          constant.json      format, leaves, files
      100/                   its checkpoint.json says "constant": "5e0c1f3a9b7d2468", and what all leaves are
      200/

Two small matrices that are trained beside a frozen model are then all that a checkpoint writes. A directory is
published by one rename, before the first step that refers to it, and removed when no step does any more. Since its name
stands for its contents, runs that go on with another `trainable=` or from other weights never mix theirs up, a resume
finds its own again, and what is read as a whole is checked against the name. Whoever copies one checkpoint elsewhere
copies `constant/` beside it. Less than `LEAST` bytes are not worth a directory: then all leaves lie in the step.

What it costs: at the first save of a session the arrays are copied to the host as all others, and the thread takes a
digest of them (about 1 GB/s); at later saves nothing.
"""

import hashlib
import json
import os
import re
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from equikd.errors import CheckpointError
from equikd.train._checkpoint_files import CONSTANT, CONSTANT_DOCUMENT, UNFINISHED, read_document, steps_in
from equikd.train._leaves import Entry

LEAST = 2**20  # bytes in all
_NAME = re.compile(r"[0-9a-f]{16}")
_LEFTOVER = re.compile(_NAME.pattern + r"(\.removed)?" + re.escape(UNFINISHED))


class Constant(NamedTuple):
    """A constant directory: its name, and the entry of each leaf in it."""

    name: str
    entries: dict[str, Entry]


class Remembered:
    """The constant directory of arrays that were written before, known by their identity.

    A JAX array never changes, so the same objects are the same values; anything else is looked at again.
    """

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        self._leaves = {path: weakref.ref(leaf) for path, leaf in leaves.items() if isinstance(leaf, jax.Array)}
        self.written: Constant | None = None

    def find(self, directory: Path, leaves: Mapping[str, Any]) -> Constant | None:
        """The directory that holds these very arrays, where it is there."""
        if self.written is None or self._leaves.keys() != leaves.keys():
            return None
        if any(self._leaves[path]() is not leaf for path, leaf in leaves.items()):
            return None
        there = (directory / CONSTANT / self.written.name / CONSTANT_DOCUMENT).is_file()
        return self.written if there else None


def parted(state: Any, changed: Any) -> tuple[Any, Any]:
    """The arrays of a train state that belong into each checkpoint, and those that are the same in all of them.

    Args:
        state: a train state, arrays alone.
        changed: the same tree of bools: whether steps change the array.

    Returns:
        Both as trees with None elsewhere; where it is not worth it, all belongs into each checkpoint. So does the
        run's PRNG key, which a resume with another seed replaces.
    """
    changing, constant = eqx.partition(state, eqx.tree_at(lambda one: one.key, changed, True))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(constant))
    return (state, None) if size < LEAST else (changing, constant)


def digest_of(arrays: Mapping[str, np.ndarray], entries: Mapping[str, Entry]) -> str:
    """The name of the directory that holds these arrays.

    Args:
        arrays: on the host, PRNG keys as their raw integers.
        entries: as `storable` gives them, in the same order.

    Example:
        >>> digest_of({"w": np.zeros(2, np.float32)}, {"w": {"dtype": "float32", "shape": [2]}})
        'cf686d17854f94f0'
    """
    digest = hashlib.sha256()
    for path, entry in entries.items():
        digest.update(json.dumps([path, entry], sort_keys=True).encode())
        digest.update(np.ascontiguousarray(arrays[path]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def remove(path: Path) -> None:
    """Takes the name away first: a directory whose removal is interrupted must not count."""
    doomed = path.with_name(f"{path.name}.removed{UNFINISHED}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def tidy(directory: Path, leftover: re.Pattern[str] = _LEFTOVER) -> None:
    """Removes what killed runs left half-way.

    Args:
        directory: that of the constant directories, or of what else has such names.
        leftover: names of what is left.
    """
    for path in list(directory.iterdir()) if directory.is_dir() else ():
        if leftover.fullmatch(path.name):
            shutil.rmtree(path)


def sweep(directory: Path) -> None:
    """Removes constant directories that no step needs.

    Args:
        directory: that of the steps.
    """
    folder = directory / CONSTANT
    if not folder.is_dir():
        return
    present = {entry.name for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)}
    try:
        needed = {read_document(directory / str(step)).get("constant") for step in steps_in(directory)}
    except CheckpointError:  # whatever that step needs, it stays
        return
    for name in present - needed:
        remove(folder / name)
    if not any(folder.iterdir()):
        folder.rmdir()
