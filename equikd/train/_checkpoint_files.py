"""What lies in the directory of one checkpoint, read without orbax: its document, its files, its neighbours.

A checkpoint has a number as its name, and a document, `checkpoint.json`, that says what every leaf is, also of those
that lie in a constant directory, beside the steps (`_constant.py`). Whoever only wants to know what a checkpoint holds,
or whether it is whole, needs no more than this file.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equikd.errors import CheckpointError, listing, message
from equikd.train._directory import file_sizes

FORMAT = 1  # all arrays of a checkpoint lie in its own directory
WITH_CONSTANT = 2  # some of them beside it
ARRAYS, DOCUMENT = "arrays", "checkpoint.json"
CONSTANT, CONSTANT_DOCUMENT = "constant", "constant.json"
UNFINISHED = ".orbax-checkpoint-tmp"  # orbax too takes such a directory for an unfinished checkpoint


def steps_in(directory: Path) -> tuple[int, ...]:
    """The numbers of whole checkpoints. What has a number is whole; the document tells it from somebody else's."""
    if not directory.is_dir():
        return ()
    names = (entry.name for entry in os.scandir(directory) if re.fullmatch(r"0|[1-9]\d*", entry.name))
    return tuple(sorted(int(name) for name in names if (directory / name / DOCUMENT).is_file()))


def read_document(path: Path) -> dict[str, Any]:
    """What checkpoint.json says of one checkpoint, without reading its arrays or importing orbax.

    Args:
        path: the directory of the checkpoint, `.../checkpoints/200`.

    Returns:
        `facts`; `leaves`, `{path: entry}`; `files`, `{path below the directory: bytes}`; `constant`, the name of the
        constant directory that holds the leaves whose entry says `constant`, if there are any.

    Raises:
        CheckpointError: there is none, it is broken, or of another format.
    """
    document_path = path / DOCUMENT
    try:
        document = json.loads(document_path.read_text("utf-8"))
        version = document["format"]
    except FileNotFoundError:
        what, expected = f"there is no checkpoint {path.name}", f"one of: {listing(steps_in(path.parent)) or 'none'}"
        raise CheckpointError(message(what, where=str(path.parent), expected=expected)) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise broken(path, document_path, error) from error
    if version not in (FORMAT, WITH_CONSTANT):
        what, fix = f"checkpoint {path.name} has an unknown format", "read it with the version of equikd that wrote it"
        expected = f"{FORMAT} or {WITH_CONSTANT}"
        raise CheckpointError(message(what, where=str(document_path), got=repr(version), expected=expected, fix=fix))
    if not _is_document(document):
        raise broken(path, document_path, ValueError(f"this is no {DOCUMENT} as equikd writes it"))
    return document


def check_files(path: Path, document: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose files are missing or cut short, its constant ones too; none of the arrays is read.

    Raises:
        CheckpointError: naming them.
    """
    try:
        _check_sizes(path, document.get("files", {}))
    except Exception as error:  # whatever the file system raises, and odd values in the document
        raise broken(path, path / ARRAYS, error) from error
    folder = constant_of(path, document)
    if folder is not None:
        try:
            check_constant(folder, constant_leaves(document))
        except Exception as error:
            raise broken_constant(path, folder, error) from error


def _check_sizes(folder: Path, files: Mapping[str, int]) -> None:
    damaged = files.items() - file_sizes(folder).items()
    if damaged:
        raise OSError(f"missing or cut short: {listing(sorted(name for name, _ in damaged), 4)}")


def is_whole(path: Path) -> bool:
    """Whether nothing is seen to be missing of a checkpoint; its arrays are not read."""
    try:
        check_files(path, read_document(path))
    except CheckpointError:
        return False
    return True


def constant_of(path: Path, document: Mapping[str, Any]) -> Path | None:
    """The constant directory that a checkpoint needs; None: it needs none."""
    name = document.get("constant")
    return None if name is None else path.parent / CONSTANT / name


def constant_leaves(document: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the leaves that lie in the constant directory, as its own document has them."""
    entries = {name: dict(entry) for name, entry in document["leaves"].items()}
    return {name: entry for name, entry in entries.items() if entry.pop("constant", False)}


def check_constant(folder: Path, leaves: Mapping[str, Any]) -> None:
    """Refuse a constant directory that is not whole, or holds other leaves than these.

    Raises:
        Exception: whatever is wrong with it, for people.
    """
    if not (folder / CONSTANT_DOCUMENT).is_file():
        raise FileNotFoundError(f"{CONSTANT}/{folder.name} is gone, which holds the arrays that no step changes")
    try:
        document = json.loads((folder / CONSTANT_DOCUMENT).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONSTANT}/{folder.name}: {CONSTANT_DOCUMENT} is no JSON: {error}") from error
    if document["format"] != WITH_CONSTANT or document["leaves"] != leaves:
        raise ValueError(f"{CONSTANT}/{folder.name}: {CONSTANT_DOCUMENT} says something else than the step")
    _check_sizes(folder, document["files"])


def broken(path: Path, file: Path, error: BaseException) -> CheckpointError:
    """The error for a checkpoint that cannot be read."""
    what = f"checkpoint {path.name} cannot be read"
    return CheckpointError(message(what, where=str(file), got=spell_error(error), fix="restore an older step"))


def broken_constant(path: Path, folder: Path, error: BaseException) -> CheckpointError:
    """The error for a checkpoint whose constant directory cannot be read."""
    what = f"checkpoint {path.name} cannot be read: the arrays that no step changes are missing or damaged"
    fix = f"put {CONSTANT}/{folder.name} back from a copy of the run, or restore a step that needs another one"
    return CheckpointError(message(what, where=str(folder), got=spell_error(error), fix=fix))


def spell_error(error: BaseException | None) -> str:
    """Type and text of an error, cut."""
    return f"{type(error).__name__}: {str(error)[:500]}"


def _is_document(plain: dict[str, Any]) -> bool:
    """Whether what checkpoint.json holds has the form that a save gives it."""
    facts, leaves = plain.get("facts"), plain.get("leaves")
    is_entry = lambda e: isinstance(e, dict) and isinstance(e.get("dtype"), str) and isinstance(e.get("shape"), list)
    if not (isinstance(facts, dict) and isinstance(leaves, dict) and all(map(is_entry, leaves.values()))):
        return False
    constant = plain.get("constant")  # the name of a directory, and never a way out of the run
    if constant is None:
        return not any("constant" in entry for entry in leaves.values())
    return isinstance(constant, str) and re.fullmatch(r"[0-9a-f]{16}", constant) is not None
