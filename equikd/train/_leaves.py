"""Leaves by name, as files hold them: the border between JAX pytrees and what lies on disk.

A file knows no tree, only names: `state.model.layers[0].weight` and the like, spelt as everywhere in equikd
(`equikd.tree.join`). `to_host` copies leaves to numpy arrays that nothing else owns, `entry_of` says in JSON what a
leaf is, `differences` compares two sets of leaves and names every one that does not fit, `from_host` makes it again. A
typed PRNG key is kept as its raw integers with the name of its implementation; nothing is ever cast.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from equikd.errors import CheckpointError, message, nearest
from equikd.tree import join, keys_of

Entry = dict[str, Any]
"""What JSON says of one leaf: `dtype` and `shape`, for a PRNG key also `key`, the name of its implementation."""

SHOWN = 30  # lines of one listing, so that a message stays on one screen


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, in the order of `jax.tree.leaves`.

    Args:
        tree: any pytree.

    Returns:
        `{path: leaf}`; the root alone has the empty path.

    Raises:
        CheckpointError: two leaves have the same path, because two keys of one dict are written alike.

    Example:
        >>> named({"layers": [1.0, 2.0]})
        {'layers[0]': 1.0, 'layers[1]': 2.0}
    """
    pairs = [(join(keys_of(path)), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    leaves = dict(pairs)
    if len(leaves) != len(pairs):
        paths = [path for path, _ in pairs]
        doubled = sorted({path for path in paths if paths.count(path) > 1})
        raise CheckpointError(cut("two leaves have one name", doubled, fix="use strings or ints as keys of the dict"))
    return leaves


def is_array(leaf: Any) -> bool:
    """Whether a leaf has values that a file can hold: a JAX or numeric numpy array, or a numpy scalar."""
    if isinstance(leaf, jax.Array):
        return True
    return isinstance(leaf, np.ndarray | np.generic) and _is_plain(leaf.dtype)


def _is_plain(dtype: np.dtype) -> bool:
    """Numbers and bools of a fixed size; ml_dtypes' own (bfloat16, int4, ...) are those numpy sees as named voids."""
    return (dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= 16 and dtype != np.longdouble) or (
        dtype.kind == "V"
        and dtype.names is None
        and dtype.subdtype is None
        and issubclass(dtype.type, np.generic)
        and dtype.type is not np.void
    )


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key, or the shape of one."""
    return not isinstance(leaf.dtype, np.dtype) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def entry_of(leaf: Any) -> Entry:
    """Dtype and shape of an array, or of its `jax.ShapeDtypeStruct`, as JSON.

    Example:
        >>> entry_of(np.zeros((2, 3), np.float32))
        {'dtype': 'float32', 'shape': [2, 3]}
    """
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}


def to_host(leaves: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Entry]]:
    """Copies arrays to the host, all in one transfer.

    The copies are real: on a CPU numpy sees the buffer itself, and a view of it would keep the step from reusing it.

    Args:
        leaves: `{path: array}`, PRNG keys included; a sharded array counts as the whole, global one.

    Returns:
        `{path: numpy array}` that own their memory, PRNG keys as their raw integers; and `{path: entry}` of the
        keys, whose dtype, shape and implementation the integers do not tell.

    Raises:
        CheckpointError: leaves that are no arrays, were donated, or live partly in another process; all at once.
    """
    wrong = [f"{path}: {reason}" for path, leaf in leaves.items() if (reason := _unsavable(leaf))]
    if wrong:
        raise CheckpointError(cut(f"{len(wrong)} of {len(leaves)} leaves cannot be saved", wrong))
    keys = {path: leaf for path, leaf in leaves.items() if is_key(leaf)}
    raw = {**leaves, **{path: jax.random.key_data(leaf) for path, leaf in keys.items()}}
    if jax.default_backend() != "cpu":  # on a CPU there is nothing to transfer, and this takes five times the copy
        raw = jax.device_get(raw)
    copies = {path: np.array(leaf, order="C", copy=True) for path, leaf in raw.items()}
    return copies, {path: {**entry_of(key), "key": str(jax.random.key_impl(key))} for path, key in keys.items()}


def _unsavable(leaf: Any) -> str | None:
    """Why a leaf cannot be saved, if so."""
    if not is_array(leaf):
        kind = f"numpy array of {leaf.dtype}" if isinstance(leaf, np.ndarray | np.generic) else type(leaf).__name__
        return f"a {kind}, not an array of numbers" + (
            "; make it one with jnp.asarray" if isinstance(leaf, bool | int | float | complex) else ""
        )
    if isinstance(leaf, Tracer):
        return "a tracer; save outside jit"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "its buffer was donated to a later step"
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return "lives partly in another process; saving from several processes is not supported yet"
    return None


def from_host(array: np.ndarray, entry: Entry) -> Any:
    """The leaf again: a numpy array as it is, a PRNG key from its raw integers."""
    return jax.random.wrap_key_data(jnp.asarray(array), impl=entry["key"]) if "key" in entry else array


def storable(arrays: dict[str, np.ndarray], keys: dict[str, Entry]) -> tuple[dict[str, np.ndarray], dict[str, Entry]]:
    """Arrays that orbax can hold, and of every leaf an entry, which says how the array stored differs from it.

    Args:
        arrays: as `to_host` gives them.
        keys: the entries of those that are PRNG keys.

    Returns:
        `{name in orbax: array}` and `{path: entry}`.
    """
    stored, entries = {}, {}
    for number, (path, array) in enumerate(arrays.items()):
        entries[path] = entry = keys.get(path) or entry_of(array)
        if array.size == 0:
            continue
        name = path if path.isprintable() and path else f"#{number}"
        if name != path:
            entry["name"] = name
        if array.dtype.kind == "V" and array.dtype.name != "bfloat16":
            entry["bytes"] = True
        stored[name] = array.view(f"u{array.dtype.itemsize}") if "bytes" in entry else array
    return stored, entries


def loaded(stored: Mapping[str, np.ndarray], path: str, entry: Entry) -> np.ndarray:
    """One array as it was saved: the inverse of `storable`.

    Raises:
        ValueError: what is stored is not what the entry says.
    """
    name = entry.get("name", path)
    if name not in stored:  # an empty one
        raw = () if "key" not in entry else np.shape(jax.random.key_data(jax.random.key(0, impl=entry["key"])))
        return np.zeros((*entry["shape"], *raw), np.uint32 if "key" in entry else np.dtype(entry["dtype"]))
    array = np.asarray(stored[name])
    array = array.view(np.dtype(entry["dtype"])) if "bytes" in entry else array
    if "key" not in entry and entry_of(array) != {"dtype": entry["dtype"], "shape": entry["shape"]}:
        raise ValueError(f"{path} is {entry_of(array)}, which checkpoint.json does not say")
    return array


def spell(entry: Entry) -> str:
    """An entry for people.

    Example:
        >>> spell({"dtype": "float32", "shape": [2, 3]})
        'float32[2, 3]'
    """
    return f"{entry['dtype']}{entry['shape']}"


def differences(saved: Mapping[str, Entry], wanted: Mapping[str, Entry], holder: str) -> list[str]:
    """One line for each leaf that is missing on a side or differs in shape or dtype, in the order of paths.

    Args:
        saved: what the file holds.
        wanted: what the template holds.
        holder: what the file is called in the text, `"checkpoint"`.

    Example:
        >>> differences({"w": {"dtype": "float32", "shape": [2]}}, {"w": {"dtype": "bfloat16", "shape": [2]}}, "file")
        ['w: float32[2] in the file, bfloat16[2] in the template']
    """
    lines = []
    for path in sorted(saved.keys() | wanted.keys()):
        ours, theirs = (spell(side[path]) if path in side else None for side in (saved, wanted))
        if ours is None:
            near = nearest(path, [p for p in saved if p not in wanted and spell(saved[p]) == theirs], 1)
            hint = f" (near: {near[0]})" if near else ""
            lines.append(f"{path}: not in the {holder}, {theirs} in the template{hint}")
        elif ours != theirs:
            lines.append(f"{path}: {ours} in the {holder}, {theirs or 'nothing'} in the template")
    return lines


def cut(what: str, lines: list[str], *, where: str | None = None, fix: str | None = None) -> str:
    """A message with a listing that stays on one screen: what does not fit is counted."""
    shown = lines if len(lines) <= SHOWN else [*lines[: SHOWN - 1], f"... and {len(lines) - SHOWN + 1} more"]
    return message("\n".join([what, *(f"  - {line}" for line in shown)]), where=where, fix=fix)
