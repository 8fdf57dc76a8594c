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

from equikd._compat import CONFIG
from equikd.config._arguments import checked_argument
from equikd.config._dataclass import comparison_key
from equikd.config._flatten import Aux, flatten_values, from_child, has_float
from equikd.config._names import display_name, from_portable, portable, spell
from equikd.config._roles import ARGUMENT, is_uncalled
from equikd.config._signatures import named_parameters, needs_key, parameter_of, signature_of
from equikd.config._values import as_leaf, is_node, typed_key
from equikd.errors import ConfigError, listing, message, nearest, report


class _Protocol:
    """A method that the class has for `equikd.tree`; of an instance, an argument of that name comes first."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __get__(self, node: Any, owner: type) -> Any:
        if node is None:
            return self.method
        name = self.method.__name__
        return node[name] if name in node.__node_arguments__ else types.MethodType(self.method, node)


class Node:
    """A call as plain data: a function (or another node), its arguments, and the line that wrote it.

    Arguments are read as attributes and items (`node.learning_rate`, `node[0]`) and changed with `override`. Two nodes
    are equal if they call the same thing with equal arguments.
    """

    __slots__ = ("__node_arguments__", "__node_flat__", "__node_function__", "__node_where__")
    __equikd_node__ = True

    def __init__(self, function: Any, arguments: Mapping[str | int, Any], where: str = "") -> None:
        object.__setattr__(self, "__node_function__", function)
        object.__setattr__(self, "__node_arguments__", dict(arguments))
        object.__setattr__(self, "__node_where__", where)
        object.__setattr__(self, "__node_flat__", None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__node_arguments__[name]
        except KeyError:
            given = [key for key in self.__node_arguments__ if isinstance(key, str)]
            text = message(
                f"{display_name(self.__node_function__)} is written without an argument {name!r}",
                near=nearest(name, given),
                expected=f"one of {listing(self.__node_arguments__)}" if self.__node_arguments__ else "no arguments",
            )
            raise AttributeError(text) from None

    def __getitem__(self, index: int | str) -> Any:
        if index in self.__node_arguments__:
            return self.__node_arguments__[index]
        count = sum(isinstance(key, int) for key in self.__node_arguments__)
        if isinstance(index, int) and -count <= index < 0:
            return self.__node_arguments__[index + count]
        raise IndexError(
            message(
                f"{display_name(self.__node_function__)} is written without an argument [{index!r}]",
                expected=f"one of {listing(self.__node_arguments__)}" if self.__node_arguments__ else "no arguments",
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
        parts = [spell(v) if isinstance(k, int) else f"{k}={spell(v)}" for k, v in self.__node_arguments__.items()]
        return f"{spell(self.__node_function__)}({', '.join(parts)})"

    def __reduce__(self) -> Any:
        return _unpickle, (portable(self.__node_function__), portable(self.__node_arguments__), self.__node_where__)

    @_Protocol
    def tree_items(self) -> dict[Any, Any]:
        """The parts under their keys; a called node's own arguments stand under `__call__`."""
        inner = {"__call__": self.__node_function__} if is_node(self.__node_function__) else {}
        return {**inner, **self.__node_arguments__}

    @_Protocol
    def tree_replace(self, key: Any, value: Any) -> "Node":
        """A copy with one argument changed, its role kept."""
        if key == "__call__":
            return Node(value, self.__node_arguments__, self.__node_where__)
        return with_arguments(self, {key: fitting(self, key, value)})

    @_Protocol
    def tree_accepts(self, key: Any) -> bool:
        """Whether the signature has an argument of this name that is not written yet."""
        function, _ = _signed(self)
        if is_node(function) or not isinstance(key, str):
            return False
        return key in named_parameters(function) and key not in by_position(self)

    @_Protocol
    def map(self, change: Callable[[Any], Any]) -> "Node":
        """A copy whose arguments are changed, without checks."""
        return Node(
            change(self.__node_function__) if is_node(self.__node_function__) else self.__node_function__,
            {key: change(value) for key, value in self.__node_arguments__.items()},
            self.__node_where__,
        )


def _unpickle(function: Any, arguments: dict[Any, Any], where: str) -> Node:
    return Node(from_portable(function), from_portable(arguments), where)


def with_arguments(node: Node, arguments: Mapping[Any, Any]) -> Node:
    """The node with more or other arguments, all in the order of the signature, so that equal calls are equal."""
    both = {**node.__node_arguments__, **arguments}
    function, _ = _signed(node)
    names = [] if is_node(function) else list(named_parameters(function))
    rank = {name: index for index, name in enumerate(names)}
    order = sorted(both, key=lambda key: -1 if isinstance(key, int) else rank.get(key, len(names)))
    return Node(node.__node_function__, {key: both[key] for key in order}, node.__node_where__)


def parts(node: Node) -> tuple[Any, dict[Any, Any], str]:
    """Function, arguments and origin of a node (its attributes are the arguments of the call)."""
    return node.__node_function__, node.__node_arguments__, node.__node_where__


def _comparison_key(node: Node) -> Any:
    arguments = tuple((key, comparison_key(value)) for key, value in node.__node_arguments__.items())
    return (
        Node,
        node.__node_function__ if is_node(node.__node_function__) else typed_key(node.__node_function__),
        arguments,
    )


def _flatten(node: Node) -> tuple[tuple[Any, ...], Aux]:
    kept = node.__node_flat__
    if kept is not None:  # see `Kept`
        x64, flat, arrays = kept
        if x64 is CONFIG.jax_enable_x64:
            if not arrays or not any(map(type(arrays[0]).is_deleted, arrays)):
                return flat
        elif x64 is None:
            return (_strong(flat[0]), flat[1]) if has_float(flat[0]) else flat
    named = {key: (ARGUMENT, value) for key, value in Node.tree_items(node).items()}
    function = None if is_node(node.__node_function__) else typed_key(node.__node_function__)
    extra = (function, tuple(node.__node_arguments__))  # the order is seen by a function with **kwargs
    kept = flatten_values(named, (extra, _Origin(node)))
    object.__setattr__(node, "__node_flat__", kept)
    return kept[1]


def _strong(child: Any) -> Any:
    """A child that a tree operation made, its Python floats wrapped, lest they be weak at the jit border."""
    if type(child) is float:
        with jax.ensure_compile_time_eval():
            return jax.device_put(as_leaf(child))
    if type(child) is tuple:
        return tuple(map(_strong, child))
    return {key: _strong(part) for key, part in child.items()} if type(child) is dict else child


class _Origin:
    """Function and line of a node in the static half; only the function counts (it is in the key beside this)."""

    __slots__ = ("function", "where")

    def __init__(self, node: Node) -> None:
        self.function, self.where = node.__node_function__, node.__node_where__

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
    object.__setattr__(node, "__node_flat__", (None, (children, aux), ()))
    return node


jax.tree_util.register_pytree_with_keys(Node, _flatten_with_keys, _unflatten, _flatten)


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
    if function is functools.partial and args and _is_target(args[0]):
        return build_partial(args[0], args[1:], kwargs, where)
    signature, _ = (None, {}) if is_node(function) else signature_of(function)
    odd = [name for name in kwargs if name.startswith(("__", "["))]  # JSON has these for itself
    if odd:
        raise ConfigError(
            message(f"{_short_name(function)}: {odd[0]!r} cannot be the name of an argument", where=where)
        )
    named = dict(enumerate(args)) | kwargs if signature is None else _bind(function, signature, args, kwargs, where)
    return Node(function, _checked(function, named, where), where)


def _checked(function: Any, named: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """Arguments as a node holds them; those that are no plain data, or of the wrong kind, are refused all at once."""
    errors, values = [], {}
    for key, value in named.items():
        try:
            values[key] = checked_argument(function, key, value, _place(function, key))
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
    function = function.__equikd_target__ if is_uncalled(function) else function
    signature, _ = signature_of(function)
    named = dict(enumerate(args)) | kwargs
    names: list[Any] = list(range(len(args)))
    if signature is not None:
        named = _bind(function, signature, args, kwargs, where, partial=True)
        names = [name if name in named else at for at, name in zip(names, signature.parameters, strict=False)]
    values = _checked(function, named, where)
    positional = [values.pop(name) for name in names]  # they stay positional, as the call that is still to come sees it
    given = dict(enumerate((checked_argument(functools.partial, 0, function, "partial[0]"), *positional)))
    return Node(functools.partial, given | values, where)


def _is_target(value: Any) -> bool:
    return is_uncalled(value) or (callable(value) and not is_node(value))


def _signed(node: Node) -> tuple[Any, int]:
    """What says which arguments a call takes, and at which position they start: of a partial, the function in it."""
    function, arguments = node.__node_function__, node.__node_arguments__
    if function is functools.partial and _is_target(arguments.get(0)):
        return arguments[0], 1
    return function, 0


def fitting(node: Node, key: str | int, value: Any) -> Any:
    """A value as the node would hold it as this argument.

    Raises:
        ConfigError: it is of the wrong kind.
    """
    function, shift = _signed(node)
    place = key - shift if isinstance(key, int) else key
    return value if place == -1 else checked_argument(function, place, value, _place(node.__node_function__, key))


def declared(node: Node, key: str | int) -> tuple[inspect.Parameter | None, Any]:
    """The parameter that takes an argument of a node, and its annotation; None and `Parameter.empty` if unknown."""
    function, shift = _signed(node)
    place = key - shift if isinstance(key, int) else key
    return (None, inspect.Parameter.empty) if is_node(function) or place == -1 else parameter_of(function, place)


def by_position(node: Node) -> dict[str, int]:
    """Arguments that have a name in the signature and yet are written by position: name -> position."""
    function, shift = _signed(node)
    signature, _ = (None, {}) if is_node(function) else signature_of(function)
    parameters = () if signature is None else signature.parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {name: at for at, name in enumerate(names, shift) if at in node.__node_arguments__}


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
        names = list(kinds)
        if filled and not unknown and len(args) > names.index("key"):  # a value stands where the key belongs
            following = zip(names[names.index("key") + 1 :], args[names.index("key") :], strict=False)
            after = ", ".join(f"{name}={spell(value)}" for name, value in following)
            what = f"{_short_name(function)}: its PRNG key is not written, resolve fills it"
            raise ConfigError(message(what, where=where, fix=f"name what comes after it: {after}")) from None
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
            named.update(value)
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
