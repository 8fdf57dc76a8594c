"""Editing configs: `override` sets values by path, `diff` lists what differs, `with_defaults` spells defaults out.

Configs and nodes are immutable; every edit is a copy. Roles are fixed when a value is written and kept by edits: where
a float stands, `1` becomes `1.0`; a string there is an error; what is pinned stays pinned.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from equikd.config._arguments import like
from equikd.config._dataclass import comparison_key
from equikd.config._names import display_name, shortened
from equikd.config._node import by_position, declared, parts, with_arguments
from equikd.config._roles import is_array, normalise, plan, spell
from equikd.config._signatures import mentions, named_parameters
from equikd.config._values import Pin, is_config, is_node, is_part, number
from equikd.errors import ConfigError, listing, message, nearest, report
from equikd.tree import PathError, Wildcard, find, get, items, join, matches, parse, update, walk

T = TypeVar("T")


def override(cfg: T, changes: Mapping[str, Any]) -> T:
    """A copy of a config with other values at some paths.

    Args:
        cfg: a config, node or container; a trainer.
        changes: `{path: value}`; globs (`"**.weight_decay"`) must match something. New arguments of a node may be set
            where its signature has them.

    Returns:
        The edited copy.

    Raises:
        ConfigError: all wrong paths and values at once, with near matches.

    Example:
        >>> import optax
        >>> from equikd.config import lazy
        >>> override({"optimizer": lazy(optax.adamw)(3e-4)}, {"optimizer.learning_rate": 1})
        {'optimizer': optax.adamw(learning_rate=1.0)}
    """
    if not isinstance(changes, Mapping):
        got = f"{type(changes).__name__} {shortened(changes)}"
        raise ConfigError(message("override takes a dict of paths and values", got=got, expected="{'path': value}"))
    errors = []
    for path, value in changes.items():
        try:
            if not isinstance(path, str):
                fix = f"write it as a path: '[{path}]'" if type(path) is int else None
                raise ConfigError(message("an override names a part by its path", got=repr(path), fix=fix))
            for target in _targets(cfg, path):
                new = _checked(cfg, target, number(value))
                cfg = _updated(cfg, target, new)
        except (ConfigError, PathError) as error:
            errors.append(str(error))
    if errors:
        raise ConfigError(report(f"{len(errors)} overrides are wrong", errors))
    return cfg


def _updated(cfg: T, path: str, new: Any) -> T:
    try:
        return update(cfg, path, lambda old: new)
    except ConfigError as error:  # it names the class and the field, not the path
        raise ConfigError(f"{path}: {error}") from None


def _targets(cfg: Any, path: str) -> list[str]:
    keys = parse(path)
    if not keys:
        raise ConfigError(message("an override names a part of the config", got=repr(path), expected="a path"))
    if not any(isinstance(key, Wildcard) for key in keys):
        _exists(cfg, path)
        return [path]
    found = [join(at) for at, _ in walk(cfg) if at and matches(keys, at)]
    if not found:
        unwritten = [join(at) for at in _unwritten(cfg) if matches(keys, at)]
        if unwritten:
            what = f"{path}: the pattern matches nothing that is written; arguments at their defaults are not"
            fix = f"spell them out first: ek.with_defaults(cfg), or name the path: {unwritten[0]!r}"
            raise ConfigError(message(what, got=f"at its default: {listing(unwritten)}", fix=fix))
        every = [join(at) for at, _ in walk(cfg) if at]
        raise ConfigError(message(f"{path}: the pattern matches nothing", near=nearest(path.replace("*", ""), every)))
    return found


def _exists(cfg: Any, path: str) -> None:
    """A misspelt key is met with near matches over the whole config, not only at the level where it fails."""
    try:
        update(cfg, path, lambda old: old)
    except PathError:
        raise _no_such_path(cfg, path) from None
    except ConfigError:
        return  # the path exists; the value None that stands for an unwritten argument may not fit


def _no_such_path(cfg: Any, path: str) -> ConfigError:
    value, at = cfg, ()
    for key in parse(path):
        try:
            value, at = items(value)[find(value, key, at)], (*at, key)
        except PathError:
            break
    last, *rest = parse(path)[len(at) :] or (path,)
    if is_node(value) and last in (placed := by_position(value)):
        there = join((*at, placed[last], *rest))
        what = f"{path}: this argument is written by position"
        return ConfigError(message(what, got=_text(items(value)[placed[last]]), fix=f"name its place: {there!r}"))
    there = [*items(value), *(where[-1] for where in _unwritten(value) if len(where) == 1)]
    similar = [name for text in nearest(str(last), map(str, there)) for name in there if str(name) == text]
    near = [join((*at, name, *rest)) if _leads(value, (name, *rest)) else join((*at, name)) for name in similar]
    every = [where for where, _ in walk(cfg) if where] + _unwritten(cfg)
    alike = [join(where) for where in every if nearest(str(parse(path)[-1]), [str(where[-1])])]
    spelt = join((last,))
    return ConfigError(
        message(
            f"{path}: no such path; there is no {spelt} in {join(at) or 'the config'}",
            expected=f"one of {listing(there)}" if there else f"nothing below {_text(value)}",
            near=near or nearest(path, alike),
        )
    )


def _leads(value: Any, keys: tuple[Any, ...]) -> bool:
    try:
        get(value, keys)
    except PathError:
        return False
    return True


def _unwritten(cfg: Any) -> list[tuple[Any, ...]]:
    """Paths of arguments that nodes leave at their defaults."""
    found = []
    for at, value in walk(cfg):
        if is_node(value) and not is_node(parts(value)[0]):
            placed = {*parts(value)[1], *by_position(value)}
            found += [(*at, name) for name in named_parameters(parts(value)[0]) if name not in placed]
    return found


def _checked(cfg: Any, path: str, new: Any) -> Any:
    """The new value, which must be of the old one's kind where that is a plain scalar.

    In a config the annotation decides, when the edited copy is made.
    """
    *above, key = parse(path)
    parent = get(cfg, tuple(above))
    old, annotation = _before(parent, key)
    if type(old) is Pin or not is_config(parent):
        new = like(old, new, path)  # roles are kept
    return new if is_config(parent) else _of_kind(old, new, annotation, path)


def _of_kind(old: Any, new: Any, annotation: Any, path: str) -> Any:
    """The new value, where an old scalar, also one in a tuple or dict, has one of its kind."""
    if type(old) is Pin and isinstance(new, bool | str | tuple | dict):  # numbers are pins by now
        normalise(plan(float), new, path)
    if old is None or new is None or is_part(new) or is_part(old):
        return new
    if type(new) is tuple and type(old) is tuple:
        pairs = zip(new, [*old, *[None] * len(new)], strict=False)
        return tuple(_of_kind(was, part, None, f"{path}[{index}]") for index, (part, was) in enumerate(pairs))
    if isinstance(new, dict) and isinstance(old, dict):
        return {key: _of_kind(old.get(key), part, None, f"{path}[{key!r}]") for key, part in new.items()}
    if mentions(annotation, type(new)) and not (type(old) is float and type(new) is bool):
        return new
    if isinstance(old, float) and (type(new) in (int, float) or is_array(new)):
        return normalise(plan(float), new, path)
    if type(old) in (bool, int, float, str) and type(new) is not type(old) and not callable(new):
        raise ConfigError(
            message(f"{path}: wrong kind of value", got=f"{type(new).__name__} {new!r}", expected=type(old).__name__)
        )
    return new


def _before(parent: Any, key: Any) -> tuple[Any, Any]:
    """What stands under a key, or would by default, and what the signature says of it."""
    written = items(parent)
    if key in written or isinstance(key, int):
        key = find(parent, key, ())
    old = written.get(key)
    if not is_node(parent):
        return old, None
    parameter, annotation = declared(parent, key)
    if key not in written and parameter is not None and parameter.default is not inspect.Parameter.empty:
        old = parameter.default
    return old, annotation


class Difference(NamedTuple):
    """One place where two configs differ; a side without the path holds `MISSING`."""

    path: str
    before: Any
    after: Any


class _Missing:
    def __repr__(self) -> str:
        return "(not there)"


MISSING = _Missing()


class Differences(tuple[Difference, ...]):
    """The differences of two configs, as a tuple; printed as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [(path, _text(before), _text(after)) for path, before, after in self]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}} -> {c}" for a, b, c in rows)


def _text(value: Any) -> str:
    return shortened(value, 60)


def diff(before: Any, after: Any) -> Differences:
    """Where two configs differ, a replaced subtree once.

    Args:
        before: a config, node, container or plain value.
        after: another.

    Returns:
        A tuple of `(path, before, after)`, printed as a table.

    Example:
        >>> print(diff({"rate": 0.1, "steps": 10}, {"rate": 0.2, "steps": 10}))
        rate  0.1 -> 0.2
    """
    return Differences(_differences(before, after, ()))


def _differences(before: Any, after: Any, at: tuple[Any, ...]) -> list[Difference]:
    if before is MISSING or after is MISSING or not _same_kind(before, after):
        different = before is MISSING or after is MISSING or comparison_key(before) != comparison_key(after)
        return [Difference(join(at), before, after)] if different else []
    first, second = items(before), items(after)
    keys = list(dict.fromkeys([*first, *second]))
    found = [one for key in keys for one in _differences(first.get(key, MISSING), second.get(key, MISSING), (*at, key))]
    reordered = not found and is_node(before) and list(first) != list(second)  # arguments of a **kwargs
    return [Difference(join(at), before, after)] if reordered else found


def _same_kind(before: Any, after: Any) -> bool:
    """Whether two values are to be compared part by part."""
    if is_node(before) and is_node(after):
        return comparison_key(parts(before)[0]) == comparison_key(parts(after)[0])
    return (
        type(before) is type(after) and (is_config(before) or isinstance(before, dict | tuple)) and bool(items(before))
    )


def with_defaults(cfg: T) -> T:
    """A copy in which nodes spell out the float arguments that they leave at their Python defaults.

    Args:
        cfg: a config, node or container.

    Returns:
        The copy; its floats can then be overridden, swept and differentiated like written ones.

    Example:
        >>> import optax
        >>> from equikd.config import lazy
        >>> with_defaults(lazy(optax.sgd)(0.1, momentum=0.9))
        optax.sgd(learning_rate=0.1, momentum=0.9)
        >>> with_defaults(lazy(optax.lion)(0.1)).b2
        0.99
    """
    for at, value in reversed(list(walk(cfg))):
        if not is_node(value) or is_node(parts(value)[0]):
            continue
        placed = by_position(value)
        named = {
            name: parameter.default
            for name, parameter in named_parameters(parts(value)[0]).items()
            if name not in parts(value)[1] and name not in placed and type(parameter.default) is float
        }
        cfg = update(cfg, at, lambda node, new=named: with_arguments(node, new))
    return cfg


def flatten(cfg: Any) -> dict[str, Any]:
    """`{path: value}` of everything in a config that has no parts of its own.

    Example:
        >>> flatten({"a": (1, 2.0), "b": "x"})
        {'a[0]': 1, 'a[1]': 2.0, 'b': 'x'}
    """
    return {join(at): value for at, value in walk(cfg) if at and not items(value)}


__all__ = [
    "Difference",
    "Differences",
    "diff",
    "display_name",
    "flatten",
    "listing",
    "override",
    "spell",
    "with_defaults",
]
