"""Command lines from config classes, by tyro: the only file that imports it.

tyro knows dataclasses; what it does not know of a config is told to it in a registry: functions and classes are given
by name (`--activation jax.nn:gelu`), and nodes, pins and references are defaults that stay as they are, or are
replaced by a value of the field's own type.
"""

import sys
import types
import typing
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar, overload

from equikd.config._dataclass import plans
from equikd.config._flags import asks_callable, named
from equikd.config._names import display_name
from equikd.config._node import Node
from equikd.config._roles import is_config_class
from equikd.config._validate import host, validate
from equikd.config._values import Pin, Ref
from equikd.errors import ConfigError, message

T = TypeVar("T")


@overload
def cli(cls: type[T], args: Sequence[str] | None = None, *, default: T | None = None, **options: Any) -> T: ...
@overload
def cli(cls: types.UnionType, args: Sequence[str] | None = None, *, default: Any = None, **options: Any) -> Any: ...
def cli(cls: Any, args: Sequence[str] | None = None, *, default: Any = None, **options: Any) -> Any:
    """An instance of a config class from the command line.

    Args:
        cls: the config class; docstrings under its fields become help, nested configs nested flags, functions are
            given by name (`jax.nn:gelu`), and a union of configs becomes subcommands: in a field
            (`optimizer: Adam | Sgd`: `optimizer:sgd --optimizer.momentum 0.9`) and here (`cli(Train | Evaluate)`).
        args: the words of the command line; those of the process by default.
        default: an instance whose values are the flags' defaults.
        **options: `prog` and `description`, as in `tyro.cli`.

    Returns:
        The instance, validated.

    Raises:
        ConfigError: a value does not fit its field, or `validate` refuses it, and `args` were given; a field of the
            class is called `help`, which is a flag already.
        SystemExit: code 2 after printing what is wrong with the words, and, where those are the process's own, with
            the values; 0 after `--help`.

    Example:
        >>> from equikd.config import config
        >>> @config
        ... class Opt:
        ...     learning_rate: float = 1e-3
        >>> cli(Opt, ["--learning-rate", "0.1"])
        Opt(learning_rate=0.1)
        >>> @config
        ... class Sgd:
        ...     momentum: float = 0.9
        >>> cli(Opt | Sgd, ["sgd", "--momentum", "0.5"])
        Sgd(momentum=0.5)
    """
    import tyro

    if default is not None:
        options["default"] = host(default)
    try:
        _refuse_taken(cls)
        with warnings.catch_warnings():
            # A pin, a reference or a node may stand in any field; tyro then takes the value's type for one more.
            warnings.filterwarnings("ignore", "The field `", UserWarning)
            made = tyro.cli(cls, args=args, registry=_registry(), **options)
        return validate(made)
    except ConfigError as error:
        if args is not None:
            raise
        sys.stderr.write(f"{error}\n")  # the user of a command line has typed a value; a traceback says nothing more
        raise SystemExit(2) from error


def _refuse_taken(cls: Any) -> None:
    """Refuses a field whose flag means something else already."""
    union = typing.get_origin(cls) in (typing.Union, types.UnionType)
    members = typing.get_args(cls) if union else (cls,)
    for member in members:
        if is_config_class(member) and "help" in plans(member):
            what = f"{member.__qualname__}.help: --help is the flag that shows the help"
            raise ConfigError(message(what, fix="give the field another name"))


def _registry() -> Any:
    """What tyro is told of the values in configs."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def by_name(info: Any) -> Any:
        kind = info.type
        union = info.type_origin in (typing.Union, types.UnionType)  # its members come one by one
        of_classes = kind is type or info.type_origin is type
        if union or not (of_classes or asks_callable(kind) or _is_called(kind)):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="MODULE:NAME",
            instance_from_str=lambda words: _from_name(words[0], type if of_classes else None),
            is_instance=lambda value: isinstance(value, type) if of_classes else callable(value),
            str_from_instance=lambda value: [display_name(value)],
        )

    @registry.primitive_rule
    def as_it_is(info: Any) -> Any:
        kind = info.type
        if kind not in (Pin, Ref, Node):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=kind.__name__.upper(),
            instance_from_str=lambda words: _refuse_text(words[0], kind.__name__.lower()),
            is_instance=lambda value: type(value) is kind,
            str_from_instance=lambda value: [repr(value)],
        )

    return registry


def _is_called(kind: Any) -> bool:
    """Whether a class is that of functions, such as the one of `jax.nn.relu`, in a field annotated `Any`."""
    if not isinstance(kind, type) or is_config_class(kind) or kind is Node:
        return False
    return any("__call__" in vars(base) for base in kind.__mro__ if base is not type)


def _from_name(text: str, kind: type | None) -> Any:
    """The thing of a name; a ValueError is what tyro shows beside the flag."""
    try:
        value = named(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not callable(value) or (kind is not None and not isinstance(value, kind)):
        raise ValueError(f"{text} is no {'class' if kind is type else 'function'}")
    return value


def _refuse_text(text: str, kind: str) -> Any:
    raise ValueError(f"a {kind} cannot be written as text, got {text!r}; change it in the code")
