"""`resolve`: make the calls that a config describes, bottom-up.

On the host the floats are Python floats. Inside a trace they are tracers, handed to user code *weak*, so that they
promote like Python floats (a strong one would turn bf16 optimizer state into float32). A reference resolves to what
stands at its path, and a node that is referred to is built once. An exception keeps its type and traceback and gains a
note with the config path and the line that wrote the node.
"""

import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from equikd._compat import Tracer, is_weak, weaken
from equikd.config._dataclass import fields_of, plans, raw
from equikd.config._names import display_name
from equikd.config._node import Node, needs_key, parts
from equikd.config._roles import is_uncalled
from equikd.config._values import Pin, Ref, float_dtype, is_config, is_node, is_part
from equikd.errors import ConfigError, message, report
from equikd.tree import Path, PathError, find, items, join, parse, walk


def resolve(value: Any, *, key: jax.Array | None = None, root: Any = None, path: str = "") -> Any:
    """The object that a node, config or container describes.

    Args:
        value: what to resolve; plain values come back as they are.
        key: a PRNG key for nodes whose required argument `key` is not written: each gets its own, folded from its path
            below `value`, so that adding a layer does not reseed the others.
        root: the config that references are looked up in; `value` itself by default.
        path: where `value` stands in `root`, for messages.

    Returns:
        The built object; configs come back as configs whose children are built.

    Raises:
        ConfigError: a reference leads nowhere or in a circle, or a node needs a key and none is given.

    Example:
        >>> import optax
        >>> from equikd.config import lazy
        >>> resolve(lazy(optax.constant_schedule)(0.5))(0)
        0.5
    """
    return Resolver(value if root is None else root, key=key, base=parse(path)).build(value, parse(path))


class Resolver:
    """One resolution of parts of one config: what is built at a path is built once."""

    def __init__(
        self,
        root: Any,
        *,
        key: jax.Array | None = None,
        base: Path = (),
        seen: Callable[[str, Any], None] | None = None,
    ) -> None:
        self.root, self.key, self.base, self.seen = root, key, base, seen
        self.built: dict[Path, Any] = {}
        self.open: list[Path] = []

    def build(self, value: Any, at: Path) -> Any:
        """What `value`, standing at `at`, describes."""
        if is_node(value):
            if at not in self.built:
                self.built[at] = self._call(value, at)
            return self.built[at]
        if is_config(value):
            return self._config(value, at)
        if type(value) is tuple:
            return tuple(self.build(part, (*at, index)) for index, part in enumerate(value))
        if isinstance(value, dict):
            return {key: self.build(part, (*at, key)) for key, part in value.items()}
        if type(value) is Ref:
            return self._refer(value, at)
        if is_uncalled(value):
            return value.__equikd_target__
        if type(value) is Pin:
            return float(float_dtype().type(value.value))  # the value it would have as a leaf
        return self._leaf(value, at)

    def _leaf(self, value: Any, at: Path) -> Any:
        if not isinstance(value, jax.Array) or value.ndim or value.dtype != float_dtype():
            return value
        weak = value if is_weak(value) else weaken(value)
        if self.seen is not None:
            self.seen(join(at), weak)
        return weak

    def _config(self, value: Any, at: Path) -> Any:
        fields = fields_of(value)
        opaque = {name for name, plan in plans(type(value)).items() if plan.kind == "opaque"}
        new = {
            name: part if name in opaque and not is_part(part) else self.build(part, (*at, name))
            for name, part in fields.items()
        }
        return value if all(new[name] is fields[name] for name in fields) else raw(type(value), new)

    def _refer(self, reference: Ref, at: Path) -> Any:
        try:
            target, where = target_of(self.root, reference.path)
        except ConfigError as error:
            raise ConfigError(f"{join(at) or 'the config'}: {error}") from None
        if where in self.open:
            circle = " -> ".join(join(path) for path in [*self.open[self.open.index(where) :], where])
            raise ConfigError(message(f"{join(at)} = {reference!r} leads back to itself", got=circle))
        self.open.append(where)
        try:
            return self.build(target, where)
        finally:
            self.open.pop()

    def _call(self, node: Node, at: Path) -> Any:
        function, arguments, where = parts(node)
        if is_node(function):
            function = self.build(function, (*at, "__call__"))
        values = {key: self.build(part, (*at, key)) for key, part in arguments.items()}
        positional = [values.pop(key) for key in sorted(key for key in values if isinstance(key, int))]
        if not is_node(parts(node)[0]) and needs_key(function) and "key" not in values:
            values["key"] = self._key(node, at)
        try:
            return function(*positional, **values)
        except Exception as error:
            error.add_note(self._note(node, at, where, error))
            raise

    def _key(self, node: Node, at: Path) -> jax.Array:
        if self.key is None:
            raise ConfigError(
                message(
                    f"{join(at) or 'the node'}: {display_name(parts(node)[0])} needs a PRNG key",
                    where=parts(node)[2],
                    fix="give resolve(..., key=...); inside a trainer only what is below `model` gets keys",
                )
            )
        below = join(at[len(self.base) :])
        return jax.random.fold_in(self.key, np.uint32(zlib.crc32(below.encode())))

    def _note(self, node: Node, at: Path, where: str, error: Exception) -> str:
        text = f"while resolving {join(at) or 'the config'} = {_short(node)}, written at {where}"
        if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
            floats = [join((*at, *p)) for p, v in walk(node) if isinstance(v, Tracer) and not v.ndim]
            pins = ", ".join(f"{path!r}: ek.pin(...)" for path in floats[:8])
            if floats:
                text += (
                    f"\nPython needs the value of one of its traced floats here; pin it: ek.override(cfg, {{{pins}}})"
                )
        return text


def _short(node: Node) -> str:
    text = re.sub(r"\w*Tracer\([^()]*\)", "(traced)", repr(node))
    return text if len(text) <= 200 else text[:197] + "..."


def target_of(root: Any, path: str) -> tuple[Any, Path]:
    """What a reference of `root` points at, and the path of that.

    `root` may carry values from outside under `referred` (the part of a trainer that enters its step does).

    Raises:
        ConfigError: the path leads nowhere.
    """
    value, where, keys = root, (), parse(path)
    outside = getattr(root, "referred", None) if is_config(root) else None
    for held in outside or ():
        if keys[: len(parse(held))] == parse(held):
            value, where, keys = outside[held], ("referred", held), keys[len(parse(held)) :]  # pyright: ignore[reportOptionalSubscript]
            break
    try:
        for written in keys:
            key = find(value, written, where)  # one spelling of each place, so that what stands there is built once
            value, where = items(value)[key], (*where, key)
    except PathError as error:
        raise ConfigError(message(f"ref({path!r}) leads nowhere", got=str(error))) from None
    return value, where


def references(value: Any, at: Path = ()) -> list[tuple[Path, Ref]]:
    """All references in a config, with their paths."""
    return [(path, part) for path, part in walk(value, at) if type(part) is Ref]


def _circle(root: Any, value: Any, where: Path, trail: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """The places that building `value` leads through until one comes again; empty if none does."""
    if where in trail:
        return (*trail[trail.index(where) :], where)
    for _, reference in references(value, where):
        try:
            found = _circle(root, *target_of(root, reference.path), (*trail, where))
        except ConfigError:  # reported as leading nowhere
            continue
        if found:
            return found
    return ()


def check_references(root: Any) -> None:
    """Refuse references that lead nowhere or in a circle, all at once.

    Raises:
        ConfigError: naming each config path that holds one.
    """
    errors = []
    for at, reference in references(root):
        try:
            circle = _circle(root, *target_of(root, reference.path))
        except ConfigError as error:
            errors.append(f"{join(at)}: {error}")
            continue
        if circle:
            trail = " -> ".join(map(join, circle))
            errors.append(message(f"{join(at)} = {reference!r} leads back to itself", got=trail))
    if errors:
        raise ConfigError(report(f"{len(errors)} references lead nowhere", errors))
