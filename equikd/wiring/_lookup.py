"""Following a key path into a context, and saying what is there where it leads nowhere."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from equikd.errors import WiringError, listing, message, nearest
from equikd.tree import Key, Path, PathError, Wildcard, is_glob, items, join, matches, named_leaves, parse, walk
from equikd.wiring._context import NAMES, UNSET, ByPath, Context


def lookup(context: Any, path: str, *, many: bool = False) -> Any:
    """What a key path names in a context.

    Args:
        context: a `Context`, or any tree.
        path: items, attributes, indices and slices: `"batch.image[..., :3]"`.
        many: whether `path` may be a pattern, `"grads.**.weight"`: `*` is one key, `**` any number.

    Returns:
        The value; indices and slices are applied to arrays. Of a pattern, the arrays it fits below its fixed beginning,
        by their paths there.

    Raises:
        WiringError: the path is misspelt or leads nowhere, with near matches and what is available.

    Example:
        >>> lookup(Context(batch={"image": "pixels"}), "batch.image")
        'pixels'
        >>> grads = {"layers": [{"weight": np.ones(2), "bias": np.zeros(1)}]}
        >>> lookup(Context(grads=grads), "grads.**.weight", many=True)
        {'layers[0].weight': array([1., 1.])}
    """
    try:
        keys = parse(path)
    except PathError as error:
        raise WiringError(str(error)) from None
    if not keys:
        raise WiringError(
            message(
                "a key path is empty", got=repr(path), expected=f"a path below one of {listing(items(context), 20)}"
            )
        )
    part = _by_path(context, keys)
    if part is not None:
        value, rest, why = part.read(path, many=many)
        for depth, key in enumerate(rest, len(keys) - len(rest)):
            try:
                value = _step(context, value, key, keys, depth, path)
            except WiringError:
                if why is None:
                    raise
                raise WiringError(why) from None
        return value
    fixed = next((at for at, key in enumerate(keys) if isinstance(key, Wildcard)), len(keys)) if many else len(keys)
    value = context
    for depth, key in enumerate(keys[:fixed]):
        value = _step(context, value, key, keys, depth, path)
    return value if fixed == len(keys) else _fitting(value, keys, fixed, path)


def _by_path(context: Any, keys: Path) -> ByPath | None:
    """The part of a context that a path is looked up in as a whole."""
    if not isinstance(context, Context):
        return None
    if keys[:2] == ("grads", "interms") and context.grads_of_interms is not None:
        return context.grads_of_interms
    return context.interms if keys[0] == "interms" and isinstance(context.interms, ByPath) else None


def root_of(path: str) -> str:
    """The name of the context that a key path begins with; empty where it is no path, which `lookup` refuses.

    Example:
        >>> root_of("preds.logits[0]"), root_of("preds[")
        ('preds', '')
    """
    try:
        keys = parse(path)
    except PathError:
        return ""
    return keys[0] if keys and isinstance(keys[0], str) else ""


_ROWS = ("key", "batch", "mask", "preds", "interms", "losses")


def reads_rows(paths: Iterable[str]) -> bool:
    """Whether any of some key paths names what depends on the batch.

    Example:
        >>> reads_rows(["model.**.weight"]), reads_rows(["model", "mask"])
        (False, True)
    """
    return any(root_of(path) in _ROWS for path in paths)


def leaves_at(path: str, value: Any) -> dict[str, Any]:
    """The leaves of what a key path gave, by their paths there; for a pattern that is what it gave.

    Example:
        >>> leaves_at("grads", {"layers": [{"bias": 1.0}]}), leaves_at("grads.**", {"layers[0].bias": 1.0})
        ({'layers[0].bias': 1.0}, {'layers[0].bias': 1.0})
    """
    return value if is_glob(path) else named_leaves(value)


def _fitting(value: Any, keys: Path, fixed: int, path: str) -> dict[str, Any]:
    """The arrays below a value whose paths there fit the rest of a pattern."""
    if not fixed:
        first = listing(NAMES, len(NAMES))
        raise WiringError(message(f"{path!r}: a pattern begins with a name", expected=f"one of {first}"))
    arrays = {at: leaf for at, leaf in named_leaves(value).items() if _is_array(leaf)}
    found = {at: leaf for at, leaf in arrays.items() if matches(keys[fixed:], at)}
    if not found:
        where, rest = join(keys[:fixed]), [key for key in keys[fixed:] if not isinstance(key, Wildcard)]
        ends = {join(parse(at)[-len(rest) :]): join((*keys[:fixed], *parse(at))) for at in reversed(arrays)}
        end = itertools.dropwhile(lambda key: isinstance(key, Wildcard) and key.pattern in ("*", "**"), keys[fixed:])
        deep = (*keys[:fixed], Wildcard("**"), *end)
        fits = any(matches(deep[fixed:], at) for at in arrays)
        raise WiringError(
            message(
                f"{path!r} fits nothing",
                near=[ends[end] for end in nearest(join(rest), ends)] if rest else (),
                expected=f"a pattern of one of {listing(arrays)}, below {where}" if arrays else f"arrays below {where}",
                fix=f"{join(deep)!r}, if it is to fit at any depth" if fits and rest else None,
            )
        )
    return found


def _step(context: Any, value: Any, key: Key, keys: Path, depth: int, path: str) -> Any:
    if isinstance(key, Wildcard):
        raise WiringError(
            message(f"{path!r}: this key path names one value", got=repr(key.pattern), expected="a path, no pattern")
        )
    if isinstance(key, str):
        parts = items(value)
        attribute = _attribute(value, key)
        if key in parts:
            if attribute is not UNSET and attribute is not parts[key] and isinstance(value, Mapping):
                raise _ambiguous(path, keys, depth, type(value))
            return parts[key]
        if attribute is not UNSET:
            return attribute
    elif isinstance(value, Mapping):
        if isinstance(key, int) and key in value:
            return value[key]
    else:
        try:
            if _is_array(value):  # jax clamps an index out of bounds; numpy says so, and this one takes no memory
                np.broadcast_to(np.False_, value.shape)[key]
            return value[key]
        except (TypeError, IndexError, KeyError, ValueError):
            pass
    raise _nowhere(context, value, keys, depth, path)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _attribute(value: Any, name: str) -> Any:
    """An attribute that is a part of the value: none of an array, no private one, and no method of a container."""
    containers = (dict, tuple, list) if isinstance(value, Mapping | tuple | list) else ()
    private = name.startswith("_") or isinstance(value, Context | str)
    if private or _is_array(value) or any(hasattr(kind, name) for kind in containers):
        return UNSET
    return getattr(value, name, UNSET)


def _ambiguous(path: str, keys: Path, depth: int, cls: type) -> WiringError:
    key = keys[depth]
    return WiringError(
        message(
            f"{path!r} names two values: {join(keys[:depth]) or 'the context'} has an item and an attribute {key!r}",
            got=f"a {cls.__qualname__}",
            fix="rename one of them; a key path does not choose",
        )
    )


_LATE = "gradients, updates and opt_state exist only in metrics of the training step"
_ELSEWHERE = {
    "params": "in an eval, the model has them: `model`, or a pattern such as `model.**.weight`",
    "interms": "intermediates are captured where a loss or metric of the trainer names them",
}


def _nowhere(context: Any, value: Any, keys: Path, depth: int, path: str) -> WiringError:
    first = keys[0]
    if depth == 0 and first in NAMES:
        return WiringError(
            message(
                f"{path!r}: {first!r} is not computed at this point of the step",
                expected=f"a path below one of {listing(items(context), 20)}",
                fix=_ELSEWHERE.get(first, _LATE),
            )
        )
    where = join(keys[:depth]) or "the context"
    every = available(context)
    parts = items(value)
    shape = f"{value.dtype}{list(value.shape)}" if _is_array(value) else None
    there = listing(parts) if parts else shape or f"a {type(value).__name__} without parts"
    return WiringError(
        message(
            f"{path!r} leads nowhere: there is no {join(keys[depth : depth + 1])!r} in {where}",
            near=() if _is_array(value) else nearest(path, every) or nearest(str(keys[depth]), map(str, parts)),
            expected=f"in {where}: {there}",
        )
    )


def named(context: Any) -> Iterator[tuple[str, Any]]:
    """Every part of a context by key path, containers included, in the order of computation."""
    for at, value in walk(context):
        if isinstance(value, ByPath):
            yield from value.named().items()
        elif at:
            yield join(at), value
        if at == ("grads",) and isinstance(context, Context) and context.grads_of_interms is not None:
            yield from context.grads_of_interms.named().items()


def available(context: Any, limit: int = 2000) -> list[str]:
    """Paths of what a context holds, arrays and containers alike, at most `limit`."""
    held = (path for path, value in named(context) if items(value) or _is_array(value))
    return list(itertools.islice(held, limit))
