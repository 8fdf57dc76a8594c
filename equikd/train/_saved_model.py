"""A model in a directory of its own: its classes are imported to load it, no constructor is run, no template needed.

    digits-model/
      model.json             the structure: classes by name, fields, static values (`_structure.py`)
      arrays-3f2a91c0.npz    the arrays by path: "layers[0].weight", ...

`np.load` opens the arrays, in any tool; dtypes that numpy does not have (bfloat16) stand there as unsigned integers of
the same bits, and `model.json` says which. Nothing is pickled.

A save writes the arrays under a new name, then replaces `model.json`, which points at them, in one step, then removes
the arrays that nothing points at. Whatever fails or is killed on the way, the directory holds the older model or the
newer one, whole.
"""

import contextlib
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from equikd._compat import is_weak, weaken
from equikd.config._validate import host
from equikd.config._values import is_config, is_node
from equikd.errors import CheckpointError, listing, message
from equikd.train._directory import write_atomically
from equikd.train._leaves import Entry, cut, differences, entry_of, from_host, is_array, named, spell, to_host
from equikd.train._structure import Reader, Writer

FORMAT = 1
DOCUMENT = "model.json"
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError)
_DAMAGED = (*_BROKEN, NotImplementedError, zipfile.BadZipFile, zlib.error)
_SCALARS = (bool, int, float, complex)
T = TypeVar("T")


def save_model(path: str | os.PathLike[str], model: Any) -> None:
    """Saves a model: arrays, structure and static fields.

    Args:
        path: a directory; made if it is missing, replaced if it holds a saved model.
        model: an `eqx.Module`, or any tree of modules, containers, scalars, functions and arrays; with a state, save
            `(model, state)`. A part that cannot be named (a lambda, a local class) is saved as its arrays only: the
            model can then be loaded with `like=` alone, and `load_model` lists the parts. A class of a script or
            notebook is found by that script or notebook; others need `like=`.

    Raises:
        CheckpointError: `path` is something else, which is left as it is; an array was donated; a leaf is a tracer.
        OSError: the files cannot be written. An older model at `path` stays.

    Example:
        >>> import equinox as eqx, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(f"{folder}/model", eqx.nn.Linear(2, 3, key=jax.random.key(0)))
        ...     load_model(f"{folder}/model").weight.shape
        (3, 2)
    """
    path = Path(path)
    _check_place(path)
    writer = Writer()
    structure = writer.write(model)
    leaves = named(model)
    arrays = writer.arrays | {name: leaf for name, leaf in leaves.items() if is_array(leaf)}
    copies, entries = to_host(arrays)
    stored = {}
    for number, (name, array) in enumerate(copies.items()):
        entries[name] = entries.get(name) or entry_of(array)
        entries[name] |= _kind(arrays[name])
        if not name or not name.isprintable() or "\\" in name:
            entries[name]["name"] = f"#{number}"
        stored[entries[name].get("name", name)] = array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array
    document = {
        "equikd_model": FORMAT,
        "arrays": f"arrays-{secrets.token_hex(4)}.npz",
        "leaves": [name for name, leaf in leaves.items() if is_array(leaf)],
        "scalars": {name: Writer().write(leaf) for name, leaf in leaves.items() if type(leaf) in _SCALARS},
        "blocked": writer.blocked,
        "entries": entries,
        "structure": structure,
    }
    _write(path, document, stored)


def _kind(leaf: Any) -> dict[str, Any]:
    """What besides dtype and shape makes an array what it is."""
    if isinstance(leaf, jax.Array):
        return {"weak": True} if is_weak(leaf) else {}
    return {"numpy": "array" if isinstance(leaf, np.ndarray) else "scalar"}


def _check_place(path: Path) -> None:
    """Refuses to write into what is not a saved model, an empty directory, or the leftovers of a killed save."""
    if not path.exists():
        return
    if path.is_dir() and (_is_model(path) or all(_is_leftover(entry.name) for entry in path.iterdir())):
        return
    raise CheckpointError(
        message(
            f"{path.name}: holds something else than a saved model, which is left as it is",
            where=str(path),
            got=contents(path),
            fix="save to a path that does not exist yet",
        )
    )


def contents(path: Path) -> str:
    """What stands at a path."""
    if not path.is_dir():
        return "a file" if path.exists() else "nothing"
    names = sorted(entry.name for entry in path.iterdir())
    return f"a directory with {listing(names, 6)}" if names else "an empty directory"


def _is_model(path: Path) -> bool:
    try:
        return "equikd_model" in json.loads((path / DOCUMENT).read_text("utf-8"))
    except _BROKEN:
        return False


def _is_leftover(name: str) -> bool:
    return name == f".{DOCUMENT}.tmp" or (name.startswith("arrays-") and name.endswith(".npz"))


def _write(path: Path, document: dict[str, Any], stored: dict[str, np.ndarray]) -> None:
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    arrays = path / document["arrays"]
    try:
        with arrays.open("xb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, array in stored.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        write_atomically(path / DOCUMENT, _text(document).encode())
    except BaseException:
        with contextlib.suppress(OSError):
            arrays.unlink(missing_ok=True)
            if made:
                path.rmdir()
        raise
    for entry in path.iterdir():
        if _is_leftover(entry.name) and entry.name != arrays.name:
            entry.unlink(missing_ok=True)


def _text(document: dict[str, Any]) -> str:
    """JSON in which each entry has a line, and the structure is indented."""
    entries = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in document["entries"].items())
    texts = {key: json.dumps(value, allow_nan=False, indent=1) for key, value in document.items()}
    texts["entries"] = f"{{\n  {entries}\n }}"
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {text}" for key, text in texts.items()) + "\n}\n"


@overload
def load_model(path: str | os.PathLike[str], like: None = None) -> Any: ...
@overload
def load_model(path: str | os.PathLike[str], like: T) -> T: ...
def load_model(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Loads what `save_model` wrote.

    Without `like`, classes and functions are imported under the names in the file: treat a model from somebody else as
    code that you run. With `like`, nothing is imported; the file gives the values alone.

    Args:
        path: the directory.
        like: a model of the same structure, whose arrays may be `jax.ShapeDtypeStruct`s (`eqx.filter_eval_shape`). Its
            arrays and Python numbers are replaced by those of the file, by path; everything else (static fields,
            functions) is its own. A leaf that is a numpy array in `like` is one in the result.

    Returns:
        The model: JAX arrays on the default device (numpy arrays where there were some), in the dtypes that were saved.

    Raises:
        CheckpointError: no saved model at `path`, an unknown format, broken files; without `like`, parts that cannot be
            rebuilt; with it, leaves missing, extra or of another shape or dtype; all at once.
    """
    path = Path(path)
    document = _read_document(path)
    try:
        if like is not None:
            return _fill(path, document, like)
        return _rebuild(path, document)
    except CheckpointError:
        raise
    except _DAMAGED as error:
        raise broken_model(path, error) from error


def broken_model(path: Path, error: BaseException) -> CheckpointError:
    """The error for a saved model that is damaged."""
    got = f"{type(error).__name__}: {str(error)[:500]}"
    return CheckpointError(message(f"{path.name}: the saved model is broken", where=str(path), got=got))


class Held(NamedTuple):
    """What a saved model holds, as far as its document and the list of its arrays tell.

    Attributes:
        structure: its plain form, as `_structure.Writer` wrote it.
        entries: name -> dtype and shape, of all arrays among its leaves.
        file: where the arrays lie; another save replaces it by another one.
        read: the arrays of some names: numpy arrays, PRNG keys as JAX arrays.
    """

    structure: Any
    entries: dict[str, Entry]
    file: Path
    read: Callable[[Collection[str]], dict[str, Any]]


def held_in(path: Path) -> Held:
    """What the saved model at a path holds; no array is read, and nothing imported.

    Raises:
        CheckpointError: there is no saved model, it is damaged, or of another format.
    """
    document = _read_document(path)
    try:
        entries: dict[str, Entry] = {name: document["entries"][name] for name in document["leaves"]}
        file = path / document["arrays"]
        with zipfile.ZipFile(file) as archive:
            there = set(archive.namelist())
        gone = [name for name, entry in entries.items() if f"{entry.get('name', name)}.npy" not in there]
        if gone:
            raise ValueError(f"arrays are missing: {listing(gone, 4)}")
        if not all(isinstance(entry["dtype"], str) and isinstance(entry["shape"], list) for entry in entries.values()):
            raise ValueError(f"this is no {DOCUMENT} as save_model writes it")
    except _DAMAGED as error:
        raise broken_model(path, error) from error

    def read(names: Collection[str]) -> dict[str, Any]:
        try:  # as numpy arrays, which hold dtypes that JAX does not hold without x64
            plain = {name: {key: e for key, e in entries[name].items() if key != "weak"} for name in names}
            return _read_arrays(path, document, {name: entry | {"numpy": "array"} for name, entry in plain.items()})
        except _DAMAGED as error:
            raise broken_model(path, error) from error

    return Held(document["structure"], entries, file, read)


def _read_document(path: Path) -> dict[str, Any]:
    fix = "give the directory that save_model wrote"
    if not (path / DOCUMENT).is_file():
        what = f"{path.name}: there is no saved model"
        raise CheckpointError(message(what, where=str(path), got=contents(path), fix=fix))
    try:
        document = json.loads((path / DOCUMENT).read_text("utf-8"))
        version = document["equikd_model"]
    except _BROKEN as error:
        got = f"a {DOCUMENT} that cannot be read: {type(error).__name__}: {error}"
        what = f"{path.name}: this is no saved model"
        raise CheckpointError(message(what, where=str(path), got=got, fix=fix)) from error
    if version != FORMAT:
        fix = "load it with the version of equikd that wrote it"
        what = f"{path.name}: the saved model has an unknown format"
        raise CheckpointError(message(what, where=str(path), got=repr(version), expected=str(FORMAT), fix=fix))
    return document


def _rebuild(path: Path, document: dict[str, Any]) -> Any:
    reader = Reader(_read_arrays(path, document, document["entries"]))
    model = reader.read(document["structure"])
    if reader.problems:
        what = f"{path.name}: {len(reader.problems)} parts of the model cannot be rebuilt from their names"
        fix = "build a model of the same structure and give it: load_model(path, like=model)"
        raise CheckpointError(cut(what, reader.problems, where=str(path), fix=fix))
    return model


def _fill(path: Path, document: dict[str, Any], like: Any) -> Any:
    entries: dict[str, Entry] = {name: document["entries"][name] for name in document["leaves"]}
    scalars = {name: Reader({}).read(plain) for name, plain in document["scalars"].items()}
    template = named(like)
    wanted = {name: _entry(leaf) for name, leaf in template.items() if _has_value(leaf)}
    saved = entries | {name: _entry(value) for name, value in scalars.items()}
    lines = differences(saved, wanted, "file")
    if lines:
        what = f"{path.name}: the model does not fit like=: {len(lines)} leaves differ"
        raise CheckpointError(cut(what, lines, where=str(path), fix="give a model built with the same arguments"))
    loaded = scalars | _read_arrays(path, document, {name: _as(template[name], entries[name]) for name in entries})
    leaves = [loaded.get(name, leaf) for name, leaf in template.items()]
    return _with_python_configs(jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves))


def _with_python_configs(model: Any) -> Any:
    """Configs in a model with Python numbers, as users see them; their leaves are arrays."""
    is_plain = lambda part: is_config(part) or is_node(part)
    return jax.tree_util.tree_map(lambda part: host(part) if is_plain(part) else part, model, is_leaf=is_plain)


def _has_value(leaf: Any) -> bool:
    """Whether a template's leaf takes its value from the file."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) or type(leaf) in _SCALARS


def _entry(leaf: Any) -> Entry:
    return entry_of(leaf) if hasattr(leaf, "dtype") else {"dtype": f"Python {type(leaf).__name__}", "shape": ""}


def _as(leaf: Any, entry: Entry) -> Entry:
    """The entry, for an array of the kind that the template has."""
    entry = {key: value for key, value in entry.items() if key != "numpy"}
    return entry | (_kind(leaf) if isinstance(leaf, np.ndarray | np.generic) else {})


def _read_arrays(path: Path, document: dict[str, Any], entries: dict[str, Entry]) -> dict[str, Any]:
    with zipfile.ZipFile(path / document["arrays"]) as archive:
        return {name: _read_array(archive, name, entry) for name, entry in entries.items()}


def _read_array(archive: zipfile.ZipFile, name: str, entry: Entry) -> Any:
    with archive.open(f"{entry.get('name', name)}.npy") as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
    if "key" in entry:
        return from_host(array, entry)
    if str(array.dtype) != entry["dtype"]:
        array = array.view(entry["dtype"])
    if entry.get("numpy"):
        return array if entry["numpy"] == "array" else array[()]
    made = jnp.asarray(array)
    if str(made.dtype) != entry["dtype"]:
        raise CheckpointError(
            message(
                f"{name}: JAX does not hold {spell(entry)} as it is set up",
                got=str(made.dtype),
                fix="jax.config.update('jax_enable_x64', True), as it was when the model was saved",
            )
        )
    return weaken(made) if entry.get("weak") else made
