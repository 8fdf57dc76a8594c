"""Paths: one spelling for a place in a tree, used by overrides, globs, key paths, JSON, flags and error messages.

`losses.ce.weight`, `optimizer[0]`, `layers[-1]`, `head['my key']`, `batch.image[..., :3]`: names after dots, everything
else in brackets. A parsed path is a tuple of keys: `str` (an item or an attribute), `int`, `slice`, `...`, tuples of
these (an index into several axes), and `Wildcard` for `*` (one key, also inside a name: `block*`) and `**` (any
number).

Configs and nodes join in through two methods, `tree_items()` and `tree_replace(key, value)`; dicts, tuples, lists,
named tuples and dataclasses (`eqx.Module` among them) are known here. `named_leaves` gives the leaves of any JAX pytree
under the same spelling, so a parameter is `layers[0].weight` everywhere.
"""

import collections
import copy
import dataclasses
import fnmatch
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from equikd.errors import EquikdError, listing, message, nearest


class PathError(EquikdError, LookupError):
    """A path is misspelt or leads nowhere."""


@dataclasses.dataclass(frozen=True)
class Wildcard:
    """`*` (any one key), `name*` (one key like it) or `**` (any number of keys) in a path."""

    pattern: str


Key = Any  # str | int | slice | Ellipsis | Wildcard | tuple of int, slice, Ellipsis
Path = tuple[Key, ...]

_NAME = re.compile(r"\*\*|(?:[^\W\d]|\*)[\w*]*")
_PLAIN_NAME = re.compile(r"[^\W\d]\w*")
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)


def parse(text: str) -> Path:
    """The keys that a path spells.

    Args:
        text: a path such as `"a.b[0]['c d'][..., :3]"`; the empty string is the root.

    Returns:
        A tuple of keys.

    Raises:
        PathError: the text is no path; the message shows where it stops making sense.

    Example:
        >>> parse("batch.image[0]['a b'][..., :3]")
        ('batch', 'image', 0, 'a b', (Ellipsis, slice(None, 3, None)))
    """
    keys: list[Key] = []
    position = 0
    while position < len(text):
        if text[position] == "[":
            content, position = _bracket(text, position)
            keys.append(_index(content, text))
            continue
        if text[position] == "." and keys:
            position += 1
        elif keys:
            raise _misspelt(text, position)
        found = _NAME.match(text, position)
        if found is None:
            raise _misspelt(text, position)
        name = found.group()
        keys.append(Wildcard(name) if "*" in name else name)
        position = found.end()
    return tuple(keys)


def _misspelt(text: str, position: int) -> PathError:
    return PathError(
        message(
            f"{text!r} is not a path",
            where=f"at character {position}: {text[position:]!r}",
            expected="names after dots and keys in brackets, such as a.b[0]['key'][..., :3]",
        )
    )


def _bracket(text: str, start: int) -> tuple[str, int]:
    """The text inside the bracket that opens at `start`, and the position after it; quotes may hold brackets."""
    position = start + 1
    while position < len(text):
        quoted = _QUOTED.match(text, position)
        if quoted is not None:
            position = quoted.end()
        elif text[position] == "]":
            return text[start + 1 : position].strip(), position + 1
        else:
            position += 1
    raise _misspelt(text, start)


def _index(content: str, text: str) -> Key:
    quoted = _QUOTED.fullmatch(content)
    if quoted is not None:
        inside = quoted.group(1) if quoted.group(2) is None else quoted.group(2)
        return re.sub(r"\\(.)", r"\1", inside, flags=re.DOTALL)
    if content in ("*", "**"):
        return Wildcard(content)
    parts = [part.strip() for part in content.split(",")]
    if len(parts) > 1 and parts[-1] == "":
        return tuple(_axis(part, content, text) for part in parts[:-1])
    keys = tuple(_axis(part, content, text) for part in parts)
    return keys if len(parts) > 1 else keys[0]


def _axis(part: str, content: str, text: str) -> Key:
    try:
        if part == "...":
            return Ellipsis
        if ":" in part:
            bounds = [int(bound) if bound.strip() else None for bound in part.split(":")]
            if len(bounds) <= 3:
                return slice(*bounds) if len(bounds) > 1 else slice(bounds[0])
        return int(part)
    except ValueError:
        raise _misspelt(text, text.find(content)) from None


def join(keys: Iterable[Key]) -> str:
    """The spelling of a path; the inverse of `parse`.

    Example:
        >>> join(("optimizer", 0, "learning_rate", "a b"))
        "optimizer[0].learning_rate['a b']"
    """
    text = ""
    for key in keys:
        if isinstance(key, Wildcard) or (isinstance(key, str) and _PLAIN_NAME.fullmatch(key)):
            name = key.pattern if isinstance(key, Wildcard) else key
            text += f".{name}" if text else name
        else:
            text += f"[{_spell(key)}]"
    return text


def _spell(key: Key) -> str:
    if isinstance(key, str):
        return "'" + key.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(key, slice):
        bounds = ["" if bound is None else str(bound) for bound in (key.start, key.stop)]
        return ":".join([*bounds, str(key.step)] if key.step is not None else bounds)
    if isinstance(key, tuple):
        return ", ".join(map(_spell, key)) + ("," if len(key) == 1 else "")
    return "..." if key is Ellipsis else str(key)


def items(value: object) -> Mapping[Key, Any]:
    """The named parts of a value: fields, entries or elements; empty for a leaf.

    Example:
        >>> items((7, 8))
        {0: 7, 1: 8}
    """
    own = getattr(type(value), "tree_items", None)
    if own is not None:
        return own(value)
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return typing.cast(Any, value)._asdict()
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return {}


def get(value: Any, path: str | Path) -> Any:
    """The part of `value` that `path` names.

    Args:
        value: a config, node, container or dataclass.
        path: names and indices; slices and wildcards are for key paths and globs.

    Returns:
        The part itself, not a copy.

    Raises:
        PathError: something on the way does not exist; the message says where, and gives near matches.

    Example:
        >>> get({"a": (1, 2)}, "a[-1]")
        2
    """
    keys = parse(path) if isinstance(path, str) else path
    for depth, key in enumerate(keys):
        value = items(value)[find(value, key, keys[:depth])]
    return value


def find(value: object, key: Key, at: Path) -> Key:
    """The key under which `items(value)` holds `key` (a negative index counts from the end).

    Raises:
        PathError: there is no such part.
    """
    parts = items(value)
    if isinstance(key, int) and key < 0 and key + _length(parts) in parts:
        return key + _length(parts)
    if not isinstance(key, slice | tuple) and key in parts:
        return key
    raise PathError(
        message(
            f"{join((*at, key))}: there is no {key!r} here",
            where=join(at) or "the root",
            near=nearest(str(key), map(str, parts)),
            expected=f"one of {listing(parts)}" if parts else f"nothing below a {type(value).__name__}",
        )
    )


def _length(parts: Mapping[Key, Any]) -> int:
    return sum(isinstance(key, int) for key in parts)


def update(value: Any, path: str | Path, change: Callable[[Any], Any]) -> Any:
    """A copy of `value` in which the part at `path` is replaced by `change(part)`.

    Raises:
        PathError: the path does not exist.

    Example:
        >>> update({"a": (1, 2)}, "a[0]", lambda old: old + 10)
        {'a': (11, 2)}
    """
    keys = parse(path) if isinstance(path, str) else path
    return _update(value, keys, change, ())


def _update(value: Any, keys: Path, change: Callable[[Any], Any], at: Path) -> Any:
    if not keys:
        return change(value)
    accept = getattr(type(value), "tree_accepts", None)  # a node takes arguments that its signature has
    if accept is not None and len(keys) == 1 and keys[0] not in items(value) and accept(value, keys[0]):
        return type(value).tree_replace(value, keys[0], change(None))  # an argument may have any name
    key = find(value, keys[0], at)
    part = _update(items(value)[key], keys[1:], change, (*at, key))
    own = getattr(type(value), "tree_replace", None)
    if own is not None:
        return own(value, key, part)
    if isinstance(value, dict):
        return {**value, key: part}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return typing.cast(Any, value)._replace(**{key: part})
    if isinstance(value, list | tuple):
        return type(value)([*value[:key], part, *value[key + 1 :]])
    if not value.__dataclass_params__.init:  # its constructor takes other arguments, as that of many an eqx.Module does
        value = copy.copy(value)
        object.__setattr__(value, key, part)
        return value
    return dataclasses.replace(value, **{key: part})


def walk(value: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every part of a value with its path, parents before children, the value itself first.

    Example:
        >>> [join(path) for path, _ in walk({"a": (1, 2)})]
        ['', 'a', 'a[0]', 'a[1]']
    """
    yield at, value
    for key, part in items(value).items():
        yield from walk(part, (*at, key))


def is_glob(path: str) -> bool:
    """Whether a path holds `*` or `**`."""
    return any(isinstance(key, Wildcard) for key in parse(path))


def matches(pattern: str | Path, path: str | Path) -> bool:
    """Whether a path fits a pattern with `*` (one key) and `**` (any number of keys, none included).

    Example:
        >>> matches("**.bias", "layers[0].bias"), matches("layers[*].bias", "layers[0].weight")
        (True, False)
    """
    wanted = parse(pattern) if isinstance(pattern, str) else pattern
    given = parse(path) if isinstance(path, str) else path
    if not wanted:
        return not given
    first = wanted[0]
    if isinstance(first, Wildcard) and first.pattern == "**":
        return any(matches(wanted[1:], given[start:]) for start in range(len(given) + 1))
    if not given:
        return False
    if isinstance(first, Wildcard):
        return fnmatch.fnmatchcase(str(given[0]), first.pattern) and matches(wanted[1:], given[1:])
    return first == given[0] and matches(wanted[1:], given[1:])


def keys_of(path: Iterable[Any]) -> Path:
    """Our keys for a key path of `jax.tree_util`.

    Example:
        >>> keys_of((jax.tree_util.GetAttrKey("layers"), jax.tree_util.SequenceKey(0)))
        ('layers', 0)
    """
    keys = []
    for entry in path:
        for attribute in ("name", "idx", "key"):
            if hasattr(entry, attribute):
                key = getattr(entry, attribute)
                keys.append(key if isinstance(key, str | int) else str(key))
                break
        else:
            keys.append(str(entry))
    return tuple(keys)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a JAX pytree by path, in the order of `jax.tree.leaves`.

    Args:
        tree: any pytree.
        is_leaf: as in `jax.tree.flatten`.

    Returns:
        `{path: leaf}`, with paths spelt as in overrides and globs.

    Example:
        >>> named_leaves({"layers": [1.0, 2.0]})
        {'layers[0]': 1.0, 'layers[1]': 2.0}
    """
    return {join(keys_of(path)): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]}


def nested(values: Mapping[str, Any]) -> dict[Any, Any]:
    """Nested dicts, in order, in which each value stands at its path; the inverse of `named_leaves` for dicts.

    Example:
        >>> nested({"total": 5.0, "layers[0].weight": 3.0})["layers"][0]["weight"]
        3.0
    """
    made: collections.OrderedDict[Any, Any] = collections.OrderedDict()
    for path, value in values.items():
        *parents, name = parse(path)
        place = made
        for key in parents:
            place = place.setdefault(key, collections.OrderedDict())
        place[name] = value
    return made
