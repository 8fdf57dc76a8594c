"""Host-side checks and conversions of whole configs: `validate`, `host`, names of fields."""

import dataclasses
from typing import Any, TypeVar

import jax
import numpy as np

from equikd._compat import Tracer
from equikd.config._dataclass import config, fields_of, plans, raw
from equikd.config._values import FrozenDict, Pin, Ref, is_config, is_node, is_part
from equikd.errors import ConfigError, EquikdError, listing, message, nearest, report
from equikd.tree import PathError, get, join, walk

T = TypeVar("T")


def check_names(cls: type, names: Any, where: str) -> None:
    """Refuse names that are no fields, and required fields without a value, all at once."""
    known = plans(cls)
    errors = [
        message(
            f"{where}: {cls.__qualname__} has no field {name!r}", near=nearest(name, known), expected=listing(known)
        )
        for name in names
        if name not in known
    ]
    required = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    errors += [message(f"{where}: {cls.__qualname__} needs {name!r}") for name in required if name not in names]
    if errors:
        raise ConfigError(report(f"{len(errors)} fields of {cls.__qualname__} are wrong", errors))


def validate(cfg: T, path: str = "") -> T:
    """Run the `validate` methods of all configs in a tree, on the host.

    Args:
        cfg: a config, node or container.
        path: where it stands, for messages.

    Returns:
        The same config.

    Raises:
        ConfigError: all failures together, each with its config path.

    Example:
        >>> @config
        ... class Opt:
        ...     learning_rate: float
        ...     def validate(self):
        ...         if self.learning_rate <= 0:
        ...             raise ValueError("learning_rate must be positive")
        >>> validate(Opt(-1.0))
        Traceback (most recent call last):
            ...
        equikd.errors.ConfigError: Opt: learning_rate must be positive
    """
    failures = []
    for keys, value in walk(cfg):
        check = getattr(type(value), "validate", None) if is_config(value) else None
        if check is None:
            continue
        where = ".".join(part for part in (path, join(keys)) if part) or type(value).__qualname__
        try:
            check(_substituted(value, cfg))
        except jax.errors.ConcretizationTypeError as error:
            raise ConfigError(
                message(f"{where}: validate was called inside a trace", fix="call it outside jit")
            ) from error
        except (AssertionError, ValueError, TypeError, EquikdError) as error:
            failures.append(f"{where}: {error}")
    if failures:
        raise ConfigError(report(f"{len(failures)} configs are invalid", failures))
    return cfg


def _shortest(array: np.ndarray) -> float:
    """The float of the fewest decimal digits that this dtype does not tell from `array`."""
    exact = float(array)
    for digits in range(1, 17):
        short = float(f"{exact:.{digits}g}")
        with np.errstate(over="ignore"):  # few digits may round up past the largest number
            same = np.asarray(short, array.dtype) == array
        if same:
            return short
    return exact


def _substituted(value: Any, root: Any) -> Any:
    """A config with the values of its pins and references in place, so that `validate` sees numbers."""
    fields = fields_of(value)
    new = {name: _plain(part, root) for name, part in fields.items()}
    return value if all(new[name] is fields[name] for name in fields) else raw(type(value), new)


def _plain(part: Any, root: Any) -> Any:
    if type(part) is Ref:
        try:
            return _plain(get(root, part.path), root)
        except (PathError, RecursionError):  # dangling and circular references are reported by their own check
            return part
    if type(part) is tuple:
        return tuple(_plain(element, root) for element in part)
    if isinstance(part, dict):
        return {key: _plain(element, root) for key, element in part.items()}
    return part.value if type(part) is Pin else part


def host(cfg: T) -> T:
    """A config whose concrete 0-d leaves are Python numbers again, by the shortest decimal of the leaf dtype.

    Args:
        cfg: a config or node after a tree operation or a device transfer; tracers stay.

    Example:
        >>> @config
        ... class Opt:
        ...     learning_rate: float
        >>> host(jax.tree.map(lambda x: x, Opt(0.1))).learning_rate
        0.1
    """

    def to_python(value: Any) -> Any:
        if isinstance(value, Tracer) or not isinstance(value, jax.Array | np.ndarray) or np.ndim(value):
            return value
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        array = np.asarray(value)
        return array.item() if array.dtype.kind in "iubc" else _shortest(array)

    def rebuild(value: Any, inside: bool = True) -> Any:
        if is_config(value):
            kinds = {name: plan.kind for name, plan in plans(type(value)).items()}
            fields = fields_of(value).items()
            return raw(type(value), {name: part if kinds[name] == "opaque" else rebuild(part) for name, part in fields})
        if is_node(value):
            return type(value).map(value, rebuild)
        if type(value) is tuple:
            return tuple(rebuild(part, inside) for part in value)
        if isinstance(value, dict):
            made = {key: rebuild(part, inside) for key, part in value.items()}
            return FrozenDict(made) if inside else made
        return to_python(value)

    return rebuild(cfg, inside=is_part(cfg))


__all__ = ["check_names", "config", "host", "validate"]
