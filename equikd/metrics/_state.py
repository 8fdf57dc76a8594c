"""States: what a metric keeps of the rows it has seen, with a merge that makes the split into batches irrelevant.

    class Range(ek.metrics.State):
        low: Float[Array, ""] = ek.metrics.min_field()
        high: Float[Array, ""] = ek.metrics.max_field()

        def compute(self):
            return self.high - self.low

Each field says how it merges, and everything else follows: `a.merge(b)` (or `a | b`) is associative, `empty_state`
makes its identity from shapes alone, and a state is a pytree that jit, vmap and scan carry. A mean is therefore a sum
and a count, divided at the end by `compute`, never a mean of means: see `_average.py`.
"""

import abc
import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.config._values import typed_key
from equikd.errors import ConfigError, WiringError, message, report

S = TypeVar("S", bound="State")
T = TypeVar("T")

_CHOICES = "sum_field(), min_field(), max_field(), state_field() or static_field()"


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the values of one field merge, and what merging with changes nothing.

    Attributes:
        merge: two values of the field -> one.
        empty: the field's shapes (a pytree of `ShapeDtypeStruct`) -> the identity of `merge`, as numpy arrays.
    """

    merge: Callable[[Any, Any], Any]
    empty: Callable[[Any], Any]


def _leafwise(merge: Callable[[Any, Any], Any], identity: Callable[[np.dtype], Any]) -> Rule:
    """A rule that treats each array of the field alike."""

    def one(a: Any, b: Any) -> Any:
        if np.shape(a) != np.shape(b):  # broadcasting would count some of the elements twice
            raise WiringError(
                message("states of different shapes do not merge", got=f"{np.shape(a)} and {np.shape(b)}")
            )
        return merge(a, b)

    return Rule(
        functools.partial(jax.tree.map, one),
        functools.partial(jax.tree.map, lambda x: np.full(x.shape, identity(np.dtype(x.dtype)), x.dtype)),
    )


def _add(a: Any, b: Any) -> Any:
    _zero(jnp.result_type(a))
    return jnp.add(a, b)


def _zero(dtype: np.dtype) -> Any:
    if dtype == np.bool_:  # True + True is True
        raise WiringError(
            message("a sum over bools loses its count", got="bool", fix="sum it first: x.sum(dtype=jnp.int32)")
        )
    return 0


def _extreme(dtype: np.dtype, *, highest: bool) -> Any:
    if dtype == np.bool_:
        return highest
    if jnp.issubdtype(dtype, jnp.inexact):
        return math.inf if highest else -math.inf
    return jnp.iinfo(dtype).max if highest else jnp.iinfo(dtype).min


_SUM = _leafwise(_add, _zero)
_MIN = _leafwise(jnp.minimum, functools.partial(_extreme, highest=True))
_MAX = _leafwise(jnp.maximum, functools.partial(_extreme, highest=False))
_STATE = Rule(lambda a, b: a.merge(b), lambda shapes: _empty(shapes))  # noqa: PLW0108  # defined below


def sum_field() -> Any:
    """A field that adds up; an array, or a pytree of arrays.

    Example:
        >>> from equikd.typing import Array, Int
        >>> class Seen(State):
        ...     count: Int[Array, ""] = sum_field()
        ...     def compute(self):
        ...         return self.count
        >>> (Seen(jnp.int32(2)) | Seen(jnp.int32(3))).compute().item()
        5
    """
    return eqx.field(metadata={"merge": _SUM})


def min_field() -> Any:
    """A field that keeps the smaller value, element by element; empty, it is +inf or the largest int.

    Example:
        >>> from equikd.typing import Array, Int
        >>> class Lowest(State):
        ...     value: Int[Array, ""] = min_field()
        ...     def compute(self):
        ...         return self.value
        >>> (Lowest(jnp.int32(2)) | Lowest(jnp.int32(3))).compute().item()
        2
    """
    return eqx.field(metadata={"merge": _MIN})


def max_field() -> Any:
    """A field that keeps the larger value, element by element; empty, it is -inf or the smallest int.

    Example:
        >>> from equikd.typing import Array, Int
        >>> class Highest(State):
        ...     value: Int[Array, ""] = max_field()
        ...     def compute(self):
        ...         return self.value
        >>> (Highest(jnp.int32(2)) | Highest(jnp.int32(3))).compute().item()
        3
    """
    return eqx.field(metadata={"merge": _MAX})


def state_field() -> Any:
    """A field that holds another state, merged by its own rules.

    Example:
        >>> from equikd.metrics import Average
        >>> class Pair(State):
        ...     left: Average = state_field()
        ...     right: Average = state_field()
        ...     def compute(self):
        ...         return {"left": self.left.compute(), "right": self.right.compute()}
        >>> Pair(Average.of(jnp.ones(2)), Average.of(jnp.zeros(2))).compute()["left"].item()
        1.0
    """
    return eqx.field(metadata={"merge": _STATE})


def static_field(**options: Any) -> Any:
    """A field that is part of the program, such as a number of classes; merged states must agree on it.

    Args:
        **options: `default` and the like, as in `dataclasses.field`.

    Example:
        >>> from equikd.typing import Array, Int
        >>> class Count(State):
        ...     value: Int[Array, " k"] = sum_field()
        ...     k: int = static_field(default=3)
        ...     def compute(self):
        ...         return {f"class_{i}": self.value[i] for i in range(self.k)}
        >>> len(Count(jnp.zeros(3, jnp.int32)).compute())
        3
    """
    return eqx.field(static=True, metadata={"merge": None}, **options)


class State(eqx.Module):
    """Base of all metric states: a pytree whose fields carry their merge rules.

    Raises:
        ConfigError: a class is made with a field that does not say how it merges; names field and choices.

    Example:
        >>> from equikd.typing import Array, Float
        >>> class Total(State):
        ...     value: Float[Array, ""] = sum_field()
        ...     def compute(self):
        ...         return self.value
        >>> (Total(jnp.ones(())) | Total(jnp.ones(()))).compute().item()
        2.0
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_rules(cls)
        if "compute" in cls.__dict__:
            cls.compute = _quiet(cls.compute)

    @abc.abstractmethod
    def compute(self) -> Any:
        """The value: a scalar, or a dict of scalars. Of nothing, it is what 0/0 gives; numpy's warning is kept away.

        It is called at the end, mostly on the host with numpy arrays in the fields.
        """

    @typing.final
    def merge(self: S, other: S) -> S:
        """The state of the rows of both, in this order.

        Args:
            other: a state of the same class, with equal static fields and equal shapes.

        Raises:
            WiringError: the states are of different classes, static values or shapes; names the field.
        """
        if type(self) is not type(other):
            names = f"{type(self).__qualname__} and {type(other).__qualname__}"
            raise WiringError(message("states of different classes do not merge", got=names))
        children, structure = _children(self)
        others, _ = _children(other)
        _check_statics(self, other)
        merged = []
        for (name, rule), a, b in zip(_rules(self), children, others, strict=True):
            try:
                merged.append(rule.merge(a, b))
            except WiringError as error:
                raise WiringError(f"{type(self).__qualname__}.{name}: {error}") from None
        return structure.unflatten(merged)

    def __or__(self: S, other: S) -> S:
        return self.merge(other)


def empty_state(shapes: T) -> T:
    """The identity of merge: the state of no rows at all.

    Args:
        shapes: a state, or a pytree of states, whose leaves have a shape and a dtype, such as `jax.eval_shape` returns.

    Returns:
        The same structure, shapes and dtypes, its leaves numpy arrays.

    Raises:
        WiringError: a leaf belongs to no state, or a sum is over bools.

    Example:
        >>> from equikd.metrics import Average
        >>> empty_state(jax.eval_shape(Average.of, jnp.ones(3))).count
        array(0, dtype=int32)
    """
    return jax.tree.map(_empty, shapes, is_leaf=lambda part: isinstance(part, State))


def _empty(shapes: Any) -> Any:
    if not isinstance(shapes, State):
        raise WiringError(message("only states can be empty", got=repr(shapes), expected="ek.metrics.State"))
    children, structure = _children(shapes)
    empty = []
    for (name, rule), child in zip(_rules(shapes), children, strict=True):
        try:
            empty.append(rule.empty(child))
        except WiringError as error:
            raise WiringError(f"{type(shapes).__qualname__}.{name}: {error}") from None
    return structure.unflatten(empty)


def _children(state: State) -> tuple[list[Any], Any]:
    """The values of the fields that are not static, and how to put such values back."""
    return jax.tree.flatten(state, is_leaf=lambda part: part is not state)


def _rules(state: State) -> Iterator[tuple[str, Rule]]:
    for field in dataclasses.fields(state):
        if not field.metadata.get("static", False):
            yield field.name, field.metadata["merge"]


def _check_statics(a: State, b: State) -> None:
    errors = []
    for field in dataclasses.fields(a):
        if field.metadata.get("static", False):
            one, other = getattr(a, field.name), getattr(b, field.name)
            if typed_key(one) != typed_key(other):
                what = f"{type(a).__qualname__}.{field.name}: states with different static values do not merge"
                errors.append(message(what, got=f"{one!r} and {other!r}"))
    if errors:
        raise WiringError(report(f"{len(errors)} static fields differ", errors))


def _check_rules(cls: type) -> None:
    """Runs before the class becomes a dataclass, so that the error stands at the line that made the class."""
    errors = []
    for name, annotation in inspect.get_annotations(cls).items():
        field = cls.__dict__.get(name)
        if "ClassVar" in str(annotation) or (isinstance(field, dataclasses.Field) and "merge" in field.metadata):
            continue
        what = f"{cls.__qualname__}.{name} does not say how it merges"
        fix = f"{name}: ... = ek.metrics.sum_field()"
        errors.append(message(what, got="a field without a rule", expected=_CHOICES, fix=fix))
    if errors:
        raise ConfigError(report(f"{len(errors)} fields of {cls.__qualname__} do not say how they merge", errors))


def _quiet(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` without numpy's warnings about 0/0: nan is the right value of an empty metric, not an accident."""

    @functools.wraps(compute)
    def call(self: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return compute(self)

    return call
