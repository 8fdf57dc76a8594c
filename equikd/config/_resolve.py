"""`resolve`: make the calls that a config describes, bottom-up.

On the host the floats are Python floats. Inside a trace they are tracers, handed to user code *weak*, so that they
promote like Python floats (a strong one would turn bf16 optimizer state into float32). A reference resolves to what
stands at its path, and a node that is referred to is built once. An exception keeps its type and traceback and gains a
note with the config path and the line that wrote the node.

Where Python needs the value of a traced float in a call, the note also names the float to pin. What a call returns may
need it later, as a schedule that branches when it is called: of that `resolve` sees nothing, nor does
`ek.inspect.traceable` outside a trainer, whose step calls it; a trainer explains it.
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
from equikd.config._node import Node, fitting, parts
from equikd.config._roles import Plan, is_uncalled, normalise
from equikd.config._signatures import needs_key
from equikd.config._values import Pin, Ref, float_dtype, is_config, is_node, is_part
from equikd.errors import ConfigError, message, report
from equikd.tree import Path, PathError, find, items, join, parse, update, walk


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
        for name, plan in plans(type(value)).items():
            if new[name] is not fields[name]:
                new[name] = self._fitting(plan, fields[name], new[name], (*at, name))
        return value if all(new[name] is fields[name] for name in fields) else raw(type(value), new)

    def _fitting(self, plan: Plan, written: Any, built: Any, at: Path) -> Any:
        """What a field's references have led to, if it fits the field as a written value would have to."""
        if type(written) is Ref:
            return self._read(built, at, written, lambda value: normalise(plan, value, join(at)))
        if plan.kind in ("tuple", "sequence") and type(written) is tuple:
            members = plan.members * len(written) if plan.kind == "sequence" else plan.members
            pairs = zip(members, written, built, strict=True)
            return tuple(self._fitting(m, w, b, (*at, index)) for index, (m, w, b) in enumerate(pairs))
        if plan.kind == "dict" and isinstance(written, dict):
            return {k: self._fitting(plan.members[0], w, built[k], (*at, k)) for k, w in written.items()}
        return built

    def _read(self, value: Any, at: Path, reference: Ref, fit: Callable[[Any], Any]) -> Any:
        """A number or text that a reference has led to, as its reader holds it; built objects pass."""
        traced = isinstance(value, jax.Array) and not value.ndim and jax.numpy.issubdtype(value.dtype, np.number)
        if not traced and type(value) not in (bool, int, float, str):
            return value
        floating = traced and jax.numpy.issubdtype(value.dtype, np.floating)
        try:
            fitting = fit((0.5 if floating else 1) if traced else value)  # of a traced value, its kind alone is known
        except ConfigError as error:
            got = f"{'a traced ' if traced else ''}{'float' if floating else type(value).__name__}"
            got = f"{got} at {reference.path}" if traced else f"{got} {value!r} at {reference.path}"
            expected = re.search(r"expected: +(.*)", str(error))
            raise ConfigError(
                message(
                    f"{join(at)} = {reference!r} leads to a value of the wrong kind",
                    got=got,
                    expected=expected.group(1) if expected else None,
                    fix=f"refer to a value that {join(at)} could hold itself",
                )
            ) from None
        if not traced:
            return fitting
        # A float field that reads an int has a float, weak as any other.
        as_float = type(fitting) is float and not floating and isinstance(value, Tracer)
        return weaken(value.astype(float_dtype())) if as_float else value

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
        function, arguments, _ = parts(node)
        if is_node(function):
            function = self.build(function, (*at, "__call__"))
        given = {key: self._argument(node, key, part, (*at, key)) for key, part in arguments.items()}
        if not is_node(parts(node)[0]) and needs_key(function) and "key" not in given:
            given["key"] = self._key(node, at)
        try:
            return _called(function, given)
        except Exception as error:
            error.add_note(self._note(node, at, error, function, given))
            raise

    def _argument(self, node: Node, key: Any, part: Any, at: Path) -> Any:
        built = self.build(part, at)
        return self._read(built, at, part, lambda value: fitting(node, key, value)) if type(part) is Ref else built

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

    def _note(self, node: Node, at: Path, error: Exception, function: Any, given: dict[Any, Any]) -> str:
        text = f"while resolving {join(at) or 'the config'} = {_short(node)}, written at {parts(node)[2]}"
        if not isinstance(error, (*_NEEDS_VALUE, TypeError)):
            return text
        floats = self._traced(parts(node)[1], given, at)
        guilty = _guilty(function, given, list(floats), error)
        if guilty is None and isinstance(error, _NEEDS_VALUE):  # one inside what is built here, or none of them alone
            floats |= {p: join((*at, *p)) for p, v in walk(node) if p not in floats and _is_traced(v)}
            guilty = list(floats)
        if guilty:
            pins = ", ".join(f"{path!r}: ek.pin(...)" for path in dict.fromkeys(floats[p] for p in guilty[:8]))
            text += f"\nPython needs the value of one of its traced floats here; pin it: ek.override(cfg, {{{pins}}})"
        return text

    def _traced(self, written: Any, built: Any, at: Path, inside: Path = ()) -> dict[Path, str]:
        """Place among the arguments -> config path to pin, of the traced floats that a call is given directly."""
        if _is_traced(built):
            path = join((*at, *inside))
            while type(written) is Ref:
                path = written.path
                written = target_of(self.root, path)[0]
            return {inside: path}
        if type(written) is not tuple and not isinstance(written, dict):
            return {}
        found: dict[Path, str] = {}
        for key, part in items(written).items():
            found |= self._traced(part, built[key], at, (*inside, key))
        return found


_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tracer) and not value.ndim and jax.numpy.issubdtype(value.dtype, np.floating)


def _called(function: Any, given: dict[Any, Any]) -> Any:
    named = dict(given)
    positional = [named.pop(key) for key in sorted(key for key in given if isinstance(key, int))]
    return function(*positional, **named)


_MOST_TRIED = 32


def _guilty(function: Any, given: dict[Any, Any], floats: list[Path], error: Exception) -> list[Path] | None:
    """Which floats make a call fail when they alone are traced; None if it fails so with none of them traced.

    The call is made again for each of the first floats, on shapes alone. Their values are not known inside a trace:
    some number stands for each that is not traced.
    """

    def fails(traced: Path | None) -> bool:
        def call(value: Any) -> None:
            arguments = given
            for path in floats:
                arguments = update(arguments, path, lambda _, new=value if path == traced else 0.5: new)
            _called(function, arguments)

        try:
            jax.eval_shape(lambda value: call(weaken(value)), np.zeros((), float_dtype()))
        except type(error):
            return True
        except Exception:  # of another kind, for the number that stands there
            return False
        return False

    return None if not floats or fails(None) else [path for path in floats[:_MOST_TRIED] if fails(path)] or None


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
    outside: dict[str, Any] = getattr(root, "referred", None) or {} if is_config(root) else {}
    for held, part in outside.items():
        if keys[: len(parse(held))] == parse(held):
            value, where, keys = part, ("referred", held), keys[len(parse(held)) :]
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
