"""What may stand in a config, and how two static values are told apart.

A config holds plain data: `None`, bools, ints, floats, strings, enums, dtypes, functions and classes by name, paths,
tuples and string-keyed dicts of these, hashable frozen dataclasses, other configs, nodes, references and pins. Whatever
has been *built* (an optimizer, a module, an array, an open file) is refused with what to write instead.

JAX compares the static parts of a program with `==`, and so takes `1` for `True`, `0.0` for `-0.0`, and never finds
`nan` again. `typed_key` compares by type and value.
"""

import dataclasses
import enum
import functools
import io
import pathlib
import types
from collections import abc
from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import DictKey

from equikd.config._names import array_spec, display_name, shortened
from equikd.errors import ConfigError, message


def typed_key(value: Any) -> Any:
    """A hashable key, equal for two values exactly if they have the same type and value.

    Raises:
        TypeError: the value, or something in it, is unhashable.

    Example:
        >>> typed_key(1) == typed_key(True), typed_key(0.0) == typed_key(-0.0), typed_key((1, float("nan")))[0]
        (False, False, <class 'tuple'>)
    """
    kind = type(value)
    if kind is float:
        return (kind, value.hex() if value == value else "nan")
    if kind is complex:
        return (kind, typed_key(value.real), typed_key(value.imag))
    if isinstance(value, tuple):  # named tuples too
        return (kind, tuple(map(typed_key, value)))
    if kind is frozenset:
        return (kind, frozenset(map(typed_key, value)))
    if isinstance(value, dict):
        return (dict, tuple(sorted((key, typed_key(part)) for key, part in value.items())))
    if isinstance(value, enum.Enum):
        return (kind, value.value if isinstance(value, enum.Flag) else value.name)  # some flags have no name
    hash(value)
    own = "__hash__" in kind.__dict__ and not (is_frozen(kind) and kind.__dataclass_params__.eq)
    if is_frozen(kind) and not own:  # its own == takes 1 for True as well
        fields = [f.name for f in dataclasses.fields(value) if f.compare]
        return (kind, tuple((name, typed_key(getattr(value, name))) for name in fields))
    return (kind, value)


class Identity:
    """A key that equals only itself: what an opaque field is compared by."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Static:
    """A static value in a pytree container: no leaves, compared by type and value."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any, key: Any = None) -> None:
        self.value = value
        self.key = typed_key(value) if key is None else key

    def __eq__(self, other: object) -> bool:
        return type(other) is Static and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


jax.tree_util.register_pytree_node(Static, lambda static: ((), static), lambda static, _: static)


class Pin:
    """A float kept static, never traced. Written with `pin`."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Pin and typed_key(self.value) == typed_key(other.value)

    def __hash__(self) -> int:
        return hash((Pin, typed_key(self.value)))

    def __reduce__(self) -> Any:
        return Pin, (self.value,)

    def __repr__(self) -> str:
        return f"pin({self.value!r})"


class Ref:
    """A value that stands elsewhere in the same config. Written with `ref`."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __eq__(self, other: object) -> bool:
        return type(other) is Ref and self.path == other.path

    def __hash__(self) -> int:
        return hash((Ref, self.path))

    def __reduce__(self) -> Any:
        return Ref, (self.path,)

    def __repr__(self) -> str:
        return f"ref({self.path!r})"


for _leafless in (Pin, Ref):
    jax.tree_util.register_pytree_node(_leafless, lambda value: ((), value), lambda value, _: value)


class FrozenDict(dict[str, Any]):
    """A dict in a config: sorted by its keys, as in every JAX pytree, and never changed in place.

    In a trace a config has ordinary dicts. JAX takes the two for different containers: outside a trace, beside ordinary
    dicts in one `jax.tree.map`, write `dict(cfg.weights)`.
    """

    __slots__ = ()

    def __init__(self, entries: Iterable[tuple[Any, Any]] | Mapping[Any, Any] = (), /) -> None:
        if self:
            self._refuse()
        super().__init__(sorted(dict(entries).items(), key=lambda entry: (type(entry[0]).__name__, entry[0])))

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        fix = "make a changed copy of the config: ek.override(cfg, {'path': value}), or dataclasses.replace(cfg, ...)"
        raise ConfigError(message("a dict in a config cannot be changed in place", got=shortened(self), fix=fix))

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> Any:
        return FrozenDict, (dict(self),)


jax.tree_util.register_pytree_with_keys(
    FrozenDict,  # as JAX does with dicts: by sorted keys
    lambda named: (tuple((DictKey(key), named[key]) for key in sorted(named)), tuple(sorted(named))),
    lambda keys, children: FrozenDict(zip(keys, children, strict=True)),
)


def is_config(value: object) -> bool:
    """Whether a value is an instance of a config class."""
    return "__equikd_config__" in type(value).__dict__


def is_node(value: object) -> bool:
    """Whether a value is a node: a call written down with `lazy`."""
    return getattr(type(value), "__equikd_node__", False)


def is_part(value: object) -> bool:
    """Whether a value is a pytree of its own in a config: a node, a config, a reference or a pin."""
    return is_node(value) or is_config(value) or type(value) in (Ref, Pin)


def float_dtype() -> np.dtype:
    """The dtype of float leaves: JAX's default float (float32; float64 under x64)."""
    return np.dtype(jax.dtypes.canonicalize_dtype(float))


def whole_float(value: int, path: str) -> float:
    """An int as the float that equals it.

    Raises:
        ConfigError: there is none.
    """
    try:
        as_float = float(value)
    except OverflowError:
        raise ConfigError(message(f"{path}: the int is too large for any float", expected="float")) from None
    if int(as_float) != value:
        raise ConfigError(message(f"{path}: the int {value} has no exact float value", expected="float"))
    return as_float


def exact_float(value: int | float, path: str) -> float:
    """A number as a Python float that the leaf dtype can hold.

    Raises:
        ConfigError: an int has no exact float; or the leaf dtype turns the value to inf, to 0, or to another integer.
    """
    as_float = whole_float(value, path) if type(value) is int else float(value)
    dtype = float_dtype()
    with np.errstate(over="ignore", under="ignore"):
        stored = float(dtype.type(as_float))
    lost = (
        (np.isfinite(as_float) and not np.isfinite(stored))
        or (as_float != 0 and abs(stored) < np.finfo(dtype).tiny)  # XLA flushes subnormal numbers to 0
        or (np.isfinite(as_float) and as_float.is_integer() and stored != as_float and abs(as_float) < 2**53)
    )
    if lost:
        raise ConfigError(
            message(
                f"{path}: {value!r} becomes {stored if abs(stored) >= np.finfo(dtype).tiny else 0.0!r} "
                f"as a {dtype.name} leaf",
                expected=f"a number that {dtype.name} can hold",
                fix="use a representable number, or enable x64",
            )
        )
    return as_float


def as_leaf(value: float) -> np.ndarray:
    """A float as the array that goes to the device.

    Raises:
        ConfigError: it was written under x64, and the leaf dtype of now cannot hold it.
    """
    dtype = float_dtype()
    if dtype.itemsize < 8 and value and not 1e-37 < abs(value) < 1e7:  # the rest surely fits
        exact_float(value, "a float of the config")
    return np.asarray(value, dtype)


def number(value: Any) -> Any:
    """A numpy scalar as the Python number it stands for; everything else as it is."""
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return float(value) if isinstance(value, np.floating) else value.item()
    return value


_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype, type, pathlib.PurePath)


def check_plain(value: Any, path: str) -> Any:
    """`value` if it is plain data (containers are checked by the caller).

    Raises:
        ConfigError: it is a built object, an array, or something that cannot be hashed.
    """
    if value is None or isinstance(value, _PLAIN) or is_part(value) or value is Ellipsis:
        return value
    if isinstance(value, list):
        raise ConfigError(
            message(
                f"{path}: a list can be changed by anybody who holds it, so a config has none",
                got=shortened(value),
                fix=f"write a tuple: {shortened(tuple(value))}",
            )
        )
    if isinstance(value, jax.Array | np.ndarray):
        is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
        raise ConfigError(
            message(
                f"{path}: got an array {array_spec(value)}; arrays are data, not configuration",
                expected="plain data",
                fix="leave it out: each node gets its own key, folded from its path"
                if is_key
                else "write a node that makes or loads it, such as ek.lazy(load)(...); "
                "data to train on: ek.data.InMemory(arrays, batch_size=...)",
            )
        )
    if isinstance(value, types.ModuleType):
        raise ConfigError(
            message(
                f"{path}: got the module {value.__name__}",
                expected="plain data, a config or a node",
                fix=f"name what you want of it: ek.lazy({value.__name__}).name",
            )
        )
    if _is_built(value):
        raise ConfigError(_built_message(value, path))
    if callable(value) and (hasattr(value, "__qualname__") or hasattr(value, "__name__")):
        return value
    if is_frozen(type(value)):
        try:
            typed_key(value)
        except TypeError:
            raise ConfigError(
                message(
                    f"{path}: {type(value).__qualname__} is a frozen dataclass whose value cannot be hashed",
                    got=repr(value),
                    fix=f"decorate {type(value).__qualname__} with @ek.config.config, or give it hashable fields",
                )
            ) from None
        return value
    raise ConfigError(_built_message(value, path))


def _is_built(value: Any) -> bool:
    named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    wrapper = hasattr(value, "__wrapped__")  # eqx.filter_jit(function) is a module, but also a named function
    return named_tuple or isinstance(value, io.IOBase) or (isinstance(value, eqx.Module) and not wrapper)


def is_frozen(cls: type) -> bool:
    """Whether a class is a frozen dataclass."""
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _built_message(value: Any, path: str) -> str:
    kind = type(value)
    if kind.__name__.startswith("GradientTransformation"):
        fix = "write the call instead of making it: ek.lazy(optax.adamw)(learning_rate=1e-3)"
    elif isinstance(value, set | frozenset | range):
        fix = f"write a tuple: tuple({shortened(value)})"
    elif isinstance(value, io.IOBase):
        fix = "write its path, and open it in the function that a node calls"
    elif isinstance(value, abc.Iterator):
        fix = "give the function that makes it, uncalled; for data: ek.data.Iterable(function)"
    elif isinstance(value, np.random.Generator):
        fix = "write a seed, or the call instead of making it: ek.lazy(np.random.default_rng)(0)"
    elif isinstance(value, functools.partial):
        name = display_name(value.func).partition(":")[2]
        fix = f"write the partial instead of making it: ek.lazy.partial({name})(...)"
    elif isinstance(value, eqx.Module):
        fix = f"write the call instead of making it: ek.lazy({kind.__name__})(...)"
        fix += "; a live model is an argument of init or train"
    elif dataclasses.is_dataclass(value):
        fix = f"decorate {kind.__qualname__} with @ek.config.config"
    else:
        fix = f"write the call instead of making it: ek.lazy({kind.__name__})(...)"
    return message(
        f"{path}: got a built {display_name(kind).removeprefix('builtins:')} object; "
        "a config describes, it holds nothing built",
        got=shortened(value),
        expected="plain data, a config or a node",
        fix=fix,
    )
