"""Writing configs: `lazy` writes a call down, `pin` keeps a float from being traced, `ref` reads a value elsewhere."""

import types
from collections.abc import Callable
from typing import Any, TypeVar, overload

import equinox as eqx

from equikd._compat import Tracer
from equikd.config._names import display_name, from_portable, portable, shortened
from equikd.config._node import build, build_partial, caller
from equikd.config._roles import Plan, normalise
from equikd.config._validate import host
from equikd.config._values import Pin, Ref, is_config, is_node, is_part
from equikd.errors import ConfigError, message, nearest
from equikd.tree import is_glob

T = TypeVar("T")
M = TypeVar("M", bound=eqx.Module)
R = TypeVar("R")


class _Lazy:
    """What `lazy` returns: attributes lead into a module, a call makes a node."""

    __slots__ = ("__equikd_target__",)

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "__equikd_target__", target)

    def __getattr__(self, name: str) -> Any:
        target = self.__equikd_target__
        if name.startswith("__"):
            raise AttributeError(name)
        if not hasattr(target, name):
            raise ConfigError(
                message(
                    f"{display_name(target).rstrip(':')} has no {name!r}",
                    where=caller(),
                    near=nearest(name, dir(target)),
                )
            )
        return _Lazy(getattr(target, name))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        target = self.__equikd_target__
        if isinstance(target, type) and hasattr(target, "__equikd_config__"):
            return target(*args, **kwargs)  # plain data already
        return build(target, args, kwargs)

    def __dir__(self) -> list[str]:
        return dir(self.__equikd_target__)

    def __reduce__(self) -> Any:
        return _unpickle_lazy, (portable(self.__equikd_target__),)

    def __repr__(self) -> str:
        return f"lazy({display_name(self.__equikd_target__).rstrip(':')})"


def _unpickle_lazy(target: Any) -> _Lazy:
    return _Lazy(from_portable(target))


class _LazyFunction:
    """The type of `lazy`."""

    @overload
    def __call__(self, target: type[M], /) -> Callable[..., M]: ...
    @overload
    def __call__(self, target: T, /) -> T: ...
    def __call__(self, target: Any, /) -> Any:
        """Write a call down instead of making it.

        Args:
            target: a callable, or a module whose attributes are then lazy too.

        Returns:
            Something typed as `target`, whose call is a node. Uncalled, it is the name of `target`. The call of a
            config class is the config itself, which is plain data already. A module class is typed as taking any
            arguments, since a checker would miss the PRNG key, which `resolve` adds; they are checked when the node is
            written all the same.

        Raises:
            ConfigError: `target` is neither, or cannot be hashed, or is a config; or, at the call, the arguments do
                not fit.

        Example:
            >>> import optax
            >>> lazy(optax).adamw(learning_rate=3e-4)
            optax.adamw(learning_rate=0.0003)
        """
        if type(target) is _Lazy:
            return target
        if not callable(target) and not isinstance(target, types.ModuleType):
            raise _no_target(target)
        if is_node(target):
            return target
        check_target(target)
        return _Lazy(target)

    def partial(self, target: Callable[..., R], /) -> Callable[..., Callable[..., R]]:
        """Write a call down that lacks arguments: the node makes a `functools.partial`.

        Args:
            target: a callable; its PRNG key, where it needs one, is left to whoever calls the partial.

        Returns:
            A function of some of the arguments of `target`, which are checked against its signature.

        Raises:
            ConfigError: `target` is not callable; or, at the call, the arguments do not fit.

        Example:
            >>> import jax
            >>> from equikd.config import resolve
            >>> resolve(lazy.partial(jax.nn.leaky_relu)(negative_slope=0.5))(-2.0).item()
            -1.0
        """
        function: Any = target
        if type(function) is _Lazy:
            function = function.__equikd_target__
        if not callable(function) or is_node(function):
            raise _no_target(function)
        check_target(function)
        return lambda *args, **kwargs: build_partial(function, args, kwargs, caller())

    def __repr__(self) -> str:
        return "lazy"


def _no_target(target: Any) -> ConfigError:
    got = f"{type(target).__name__} {target!r}"
    return ConfigError(message("lazy takes a callable or a module", got=got, where=caller()))


def check_target(target: Any) -> None:
    """Refuse what a node could not keep as plain data: it would hide the floats of a config, or have no equality."""
    held = target if is_config(target) else getattr(target, "__self__", None)
    if is_config(held):
        kind = type(held).__qualname__
        what = f"lazy takes a function or class, and {kind}(...) is a config, whose floats it would hide"
        fix = f"write the config where it is used, or name a function that takes one: ek.lazy(function)({kind}(...))"
        raise ConfigError(message(what, got=shortened(target), where=caller(), fix=fix))
    try:
        hash(target)
    except TypeError:
        what = f"lazy takes a function or class, and {shortened(target)} is an object that cannot be hashed"
        fix = f"write the call that makes it: ek.lazy({type(target).__name__})(...)"
        raise ConfigError(message(what, where=caller(), fix=fix)) from None


lazy = _LazyFunction()


def pin(value: float) -> Any:
    """One float that is never traced: part of the program, so changing it recompiles.

    Args:
        value: the number; inside the trace it has the value that the leaf dtype gives it.

    Raises:
        ConfigError: it is no number.

    Example:
        >>> pin(0.5)
        pin(0.5)
    """
    if type(value) is Pin:
        return value
    number = value if is_part(value) or isinstance(value, Tracer) else host(value)
    if is_part(number) or isinstance(number, Tracer):
        fix = "pin the value that it reads" if type(number) is Ref else None
        got = "a traced value" if isinstance(number, Tracer) else shortened(number)
        raise ConfigError(message("pin takes a number", got=got, expected="float", fix=fix))
    return Pin(normalise(Plan("float", float), number, "pin"))


def ref(path: str) -> Any:
    """The value that stands at `path` of the same config: one leaf, two readers.

    Args:
        path: from the root, such as `"num_steps"` or `"losses.mse.weight"`.

    Raises:
        ConfigError: it is a pattern, or no string.
        PathError: it is misspelt.

    Example:
        >>> ref("num_steps")
        ref('num_steps')
    """
    if not isinstance(path, str) or not path or is_glob(path):
        raise ConfigError(message("ref takes a path from the root of the config", got=repr(path), expected="str"))
    return Ref(path)
