"""Nodes: a call written down instead of made.

`lazy(optax.adamw)(learning_rate=3e-4)` is a node: plain data that says which function to call with which arguments, and
a pytree whose leaves are the floats among them. It is typed as what the call returns, so editors complete its arguments
and checkers check them. A node may be called (a call of a call), and an uncalled `lazy(jax.nn.relu)` is just a name.

Arguments that the signature names are addressed by name however they were written (`optimizer.learning_rate`), those it
does not name by position (`optimizer[0]` of `optax.chain`). When a node is written, its function must exist, its
arguments must fit the signature, and each must be plain data; the error is raised at the line that wrote it.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.tree_util import GetAttrKey, SequenceKey

from equikd.config._dataclass import comparison_key
from equikd.config._flatten import Aux, flatten_values, from_child
from equikd.config._names import display_name, from_portable, portable, spell
from equikd.config._roles import ARGUMENT, Plan, normalise
from equikd.config._signatures import admits_float, admits_none, admits_text, named_parameters, needs_key, signature_of
from equikd.config._values import is_node, typed_key
from equikd.errors import ConfigError, listing, message, nearest, report


class Node:
    """A call as plain data: a function (or another node), its arguments, and the line that wrote it.

    Arguments are read as attributes and items (`node.learning_rate`, `node[0]`) and changed with `override`. Two nodes
    are equal if they call the same thing with equal arguments.
    """

    __slots__ = ("_arguments", "_flat", "_function", "_where")
    __equikd_node__ = True

    def __init__(self, function: Any, arguments: Mapping[str | int, Any], where: str = "") -> None:
        object.__setattr__(self, "_function", function)
        object.__setattr__(self, "_arguments", dict(arguments))
        object.__setattr__(self, "_where", where)
        object.__setattr__(self, "_flat", None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._arguments[name]
        except KeyError:
            given = [key for key in self._arguments if isinstance(key, str)]
            text = message(
                f"{display_name(self._function)} is written without an argument {name!r}",
                near=nearest(name, given),
                expected=f"one of {listing(self._arguments)}" if self._arguments else "no arguments",
            )
            raise AttributeError(text) from None

    def __getitem__(self, index: int | str) -> Any:
        if index in self._arguments:
            return self._arguments[index]
        count = sum(isinstance(key, int) for key in self._arguments)
        if isinstance(index, int) and -count <= index < 0:
            return self._arguments[index + count]
        raise IndexError(
            message(
                f"{display_name(self._function)} is written without an argument [{index!r}]",
                expected=f"one of {listing(self._arguments)}" if self._arguments else "no arguments",
            )
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            message(f"{name}: a node is immutable", fix=f"ek.override(cfg, {{'...{name}': {value!r}}})")
        )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return build(self, args, kwargs)

    def __eq__(self, other: object) -> bool:
        return type(other) is Node and _comparison_key(self) == _comparison_key(other)

    def __hash__(self) -> int:
        return hash(_comparison_key(self))

    def __repr__(self) -> str:
        parts = [spell(v) if isinstance(k, int) else f"{k}={spell(v)}" for k, v in self._arguments.items()]
        return f"{spell(self._function)}({', '.join(parts)})"

    def __reduce__(self) -> Any:
        return _unpickle, (portable(self._function), portable(self._arguments), self._where)

    def tree_items(self) -> dict[Any, Any]:
        """The parts under their keys; a called node's own arguments stand under `__call__`."""
        inner = {"__call__": self._function} if is_node(self._function) else {}
        return {**inner, **self._arguments}

    def tree_replace(self, key: Any, value: Any) -> "Node":
        """A copy with one argument changed, its role kept."""
        if key == "__call__":
            return Node(value, self._arguments, self._where)
        function = _signed(self._function, self._arguments)
        new = _argument(function, key, value, _place(function, key))
        return with_arguments(self, {key: new})

    def tree_accepts(self, key: Any) -> bool:
        """Whether the signature has an argument of this name that is not written yet."""
        if is_node(self._function) or not isinstance(key, str):
            return False
        return key in named_parameters(_signed(self._function, self._arguments))

    def map(self, change: Callable[[Any], Any]) -> "Node":
        """A copy whose arguments are changed, without checks."""
        return Node(
            change(self._function) if is_node(self._function) else self._function,
            {key: change(value) for key, value in self._arguments.items()},
            self._where,
        )


def _unpickle(function: Any, arguments: dict[Any, Any], where: str) -> Node:
    return Node(from_portable(function), from_portable(arguments), where)


def with_arguments(node: Node, arguments: Mapping[Any, Any]) -> Node:
    """The node with more or other arguments, all in the order of the signature, so that equal calls are equal."""
    both = {**node._arguments, **arguments}
    names = [] if is_node(node._function) else list(named_parameters(node._function))
    rank = {name: index for index, name in enumerate(names)}
    order = sorted(both, key=lambda key: -1 if isinstance(key, int) else rank.get(key, len(names)))
    return Node(node._function, {key: both[key] for key in order}, node._where)


def parts(node: Node) -> tuple[Any, dict[Any, Any], str]:
    """Function, arguments and origin of a node (its attributes are the arguments of the call)."""
    return node._function, node._arguments, node._where


def _comparison_key(node: Node) -> Any:
    arguments = tuple((key, comparison_key(value)) for key, value in node._arguments.items())
    return (Node, node._function if is_node(node._function) else typed_key(node._function), arguments)


def _flatten(node: Node) -> tuple[tuple[Any, ...], Aux]:
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  # set up at run time by jax
    cached = node._flat
    if cached is None or (cached[0] is not x64 and cached[0] is not None):
        named = {key: (ARGUMENT, value) for key, value in node.tree_items().items()}
        extra = None if is_node(node._function) else (typed_key(node._function),)
        cached = (x64, flatten_values(named, (extra, _Origin(node))))
        object.__setattr__(node, "_flat", cached)
    return cached[1]


class _Origin:
    """Function and line of a node in the static half; only the function counts (it is in the key beside this)."""

    __slots__ = ("function", "where")

    def __init__(self, node: Node) -> None:
        self.function, self.where = node._function, node._where

    def __eq__(self, other: object) -> bool:
        return type(other) is _Origin

    def __hash__(self) -> int:
        return 0


def _flatten_with_keys(node: Node) -> tuple[tuple[tuple[Any, Any], ...], Aux]:
    children, aux = _flatten(node)
    keys = (SequenceKey(key) if isinstance(key, int) else GetAttrKey(key) for key in aux.children)
    return tuple(zip(keys, children, strict=True)), aux


def _unflatten(aux: Aux, children: Any) -> Node:
    children = tuple(children)
    values = {key: static.value for key, static in aux.statics}
    values |= {key: from_child(child) for key, child in zip(aux.children, children, strict=True)}
    origin = aux.key[2][1]
    order = {key: values[key] for key in sorted(values, key=aux.position)}
    function = order.pop("__call__", origin.function)
    node = Node(function, order, origin.where)
    object.__setattr__(node, "_flat", (None, (children, aux)))
    return node


jax.tree_util.register_pytree_with_keys(Node, _flatten_with_keys, _unflatten, _flatten)


def _argument(function: Any, name: Any, value: Any, path: str) -> Any:
    value = normalise(ARGUMENT, value, path)
    if value is None and not is_node(function) and not admits_none(function, name):
        raise ConfigError(message(f"{path}: wrong kind of value", got="None", expected="float"))
    if type(value) in (bool, str) and not is_node(function):
        parameter = named_parameters(function).get(name)
        wants_float = signature_of(function)[1].get(str(name)) is float
        wants_number = parameter is not None and type(parameter.default) is float
        no_text = type(value) is str and admits_float(function, name) and not admits_text(function, name)
        if wants_float or no_text or (type(value) is bool and wants_number):
            raise ConfigError(message(f"{path}: wrong kind of value", got=repr(value), expected="float"))
    if type(value) is int and not is_node(function) and admits_float(function, name):
        return normalise(Plan("float", float), value, path)
    return value


def build(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: str | None = None) -> Node:
    """A node for `function(*args, **kwargs)`, checked against the signature.

    Raises:
        ConfigError: unknown, missing or doubled arguments, or values that are no plain data; all at once.
    """
    where = caller() if where is None else where
    if isinstance(function, types.ModuleType):
        name = function.__name__
        fix = f"name what it is to call: ek.lazy({name}).name(...)"
        raise ConfigError(message(f"{name} is a module, which cannot be called", where=where, fix=fix))
    signature, _ = (None, {}) if is_node(function) else signature_of(function)
    odd = [name for name in kwargs if name.startswith(("__", "["))]  # JSON has these for itself
    if odd:
        raise ConfigError(
            message(f"{_short_name(function)}: {odd[0]!r} cannot be the name of an argument", where=where)
        )
    named = (
        dict(enumerate(args)) | dict(sorted(kwargs.items()))
        if signature is None
        else _bind(function, signature, args, kwargs, where)
    )
    return Node(function, _checked(function, named, where), where)


def _checked(function: Any, named: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """Arguments as a node holds them; those that are no plain data, or of the wrong kind, are refused all at once."""
    errors, values = [], {}
    for key, value in named.items():
        try:
            values[key] = _argument(function, key, value, _place(function, key))
        except ConfigError as error:
            errors.append(f"{error}\n  written:  {where}")
    if errors:
        raise ConfigError(report(f"{len(errors)} arguments are wrong", errors))
    return values


def build_partial(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Node:
    """A node for `functools.partial(function, *args, **kwargs)`, whose arguments are checked against `function`.

    Raises:
        ConfigError: unknown or doubled arguments, or values that are no plain data; all at once.
    """
    signature, _ = signature_of(function)
    named = dict(enumerate(args)) | kwargs
    names: list[Any] = list(range(len(args)))
    if signature is not None:
        named = _bind(function, signature, args, kwargs, where, partial=True)
        names = [name if name in named else at for at, name in zip(names, signature.parameters, strict=False)]
    values = _checked(function, named, where)
    positional = [values.pop(name) for name in names]  # they stay positional, as the call that is still to come sees it
    return build(functools.partial, (function, *positional), values, where)


def _signed(function: Any, arguments: Mapping[Any, Any]) -> Any:
    """What says which arguments a call takes: of a partial, the function that it is a part of."""
    return arguments.get(0, function) if function is functools.partial else function


def _short_name(function: Any) -> str:
    return "call" if is_node(function) else display_name(function).partition(":")[2] or display_name(function)


def _place(function: Any, key: str | int) -> str:
    return f"{_short_name(function)}[{key}]" if isinstance(key, int) else f"{_short_name(function)}.{key}"


def _bind(
    function: Any, signature: inspect.Signature, args: Any, kwargs: Any, where: str, partial: bool = False
) -> dict[Any, Any]:
    """Arguments by the one key each has: its name where the signature gives one, else its position."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    filled = {"key": None} if needs_key(function) and "key" not in kwargs and not partial else {}
    try:
        bound = (signature.bind_partial if partial else signature.bind)(*args, **kwargs, **filled).arguments
    except TypeError as error:
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        unknown = [] if takes_any else [name for name in kwargs if name not in kinds]
        raise ConfigError(
            message(
                f"{_short_name(function)}: "
                + (f"no argument {', '.join(map(repr, unknown))}" if unknown else str(error)),
                where=where,
                near=[near for name in unknown for near in nearest(name, kinds, 1)],
                expected=f"{_short_name(function)}({listing(kinds, 20)})",
            )
        ) from None
    if filled:
        bound.pop("key", None)
    named: dict[Any, Any] = {}
    positional = len(args) if inspect.Parameter.VAR_POSITIONAL in kinds.values() else 0
    if positional:
        named.update(enumerate(args))
        bound = {
            name: value for name, value in bound.items() if name in kwargs or kinds[name] is kinds[name].VAR_KEYWORD
        }
    for name, value in bound.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            named.update(sorted(value.items()))
        elif kinds[name] is inspect.Parameter.POSITIONAL_ONLY:
            named[list(kinds).index(name)] = value
        else:
            named[name] = value
    return named


_PACKAGE = __name__.rpartition(".")[0]


def caller() -> str:
    """File and line of the first frame outside this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
