"""States: what a metric keeps of the rows it has seen, with a merge that makes the split into batches irrelevant.

    class Range(ek.metrics.State):
        low: Float[Array, ""] = ek.metrics.min_field()
        high: Float[Array, ""] = ek.metrics.max_field()

        def compute(self):
            return self.high - self.low

Each field says how it merges, and everything else follows: `a.merge(b)` (or `a | b`) is associative, `empty_state`
makes its identity from shapes alone, `reduce` merges what vmap has stacked, and a state is a pytree that jit, vmap and
scan carry. A mean is therefore a sum and a count, divided at the end by `compute`, never a mean of means: see
`_average.py`. Sums that round are in `_sums.py`, fields that keep rows in `_rows.py`.
"""

import abc
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd._compat import Tracer
from equikd.config._values import typed_key
from equikd.errors import ConfigError, WiringError, message, report
from equikd.metrics._fields import CHOICES, Rule
from equikd.metrics._fields import concat_field as concat_field
from equikd.metrics._fields import max_field as max_field
from equikd.metrics._fields import min_field as min_field
from equikd.metrics._fields import static_field as static_field
from equikd.metrics._fields import sum_field as sum_field
from equikd.metrics._fields import truncate_field as truncate_field

S = TypeVar("S", bound="State")
T = TypeVar("T")


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
        """The value: a scalar, a summary (`Images`, `Values`, ...), or a dict of these; of nothing, what 0/0 gives.

        Numpy's warning of 0/0 is kept away. Called at the end, mostly on the host with numpy arrays in the fields.
        """

    @typing.final
    def merge(self: S, other: S) -> S:
        """The state of the rows of both, in this order.

        Args:
            other: a state of the same class, with equal static fields and equal shapes.

        Raises:
            WiringError: the states are of different classes, static values or shapes; names the field.
        """
        _check_kind(self, other)
        children, structure = _children(self)
        others, _ = _children(other)
        merged = []
        for (name, rule), a, b in zip(_rules(self), children, others, strict=True):
            try:
                merged.append(rule.merge(a, b))
            except WiringError as error:
                raise WiringError(f"{type(self).__qualname__}.{name}: {error}") from None
        return structure.unflatten(merged)

    def __or__(self: S, other: S) -> S:
        return self.merge(other)

    def _empty(self: S) -> S:
        children, structure = _children(self)
        empty = []
        for (name, rule), child in zip(_rules(self), children, strict=True):
            try:
                empty.append(rule.empty(child))
            except WiringError as error:
                raise WiringError(f"{type(self).__qualname__}.{name}: {error}") from None
        return structure.unflatten(empty)

    @typing.final
    def reduce(self: S, axis: int = 0) -> S:
        """One state from states stacked along an axis, as vmap or the outputs of a scan stack them; in their order.

        Args:
            axis: of the arrays of this state, the one that is merged away; of size 0, the empty state is left.

        Example:
            >>> from equikd.metrics import Average
            >>> jax.vmap(Average.of)(jnp.array([[1.0, 2.0], [3.0, 6.0]])).reduce().compute().item()
            3.0
        """
        children, structure = _children(jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), self))
        rules = [rule for _, rule in _rules(self)]
        return structure.unflatten([rule.reduced(child) for rule, child in zip(rules, children, strict=True)])

    @typing.final
    def finalize(self: S) -> S:
        """The state as `compute` should see it, on the host: rows without padding, and no sum past its dtype.

        Inside a trace, where there are no values yet, the state itself.

        Raises:
            OverflowError: a sum of ints does not fit its dtype, or more rows came than a `concat_field(size=n)` holds;
                names the field.
        """
        if any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(self)):
            return self
        on_device = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(self))
        children, structure = _children(jax.device_get(self) if on_device else self)
        finished = []
        for (name, rule), child in zip(_rules(self), children, strict=True):
            try:
                finished.append(rule.finish(child))
            except OverflowError as error:
                raise OverflowError(f"{type(self).__qualname__}.{name}: {error}") from None
        return structure.unflatten(finished)


def _is_state(part: Any) -> bool:
    return isinstance(part, State)


def _each(change: Callable[..., Any]) -> Callable[..., Any]:
    """A function of states, applied to the states of a pytree."""
    return lambda *trees: jax.tree.map(change, *trees, is_leaf=_is_state)


_STATE = Rule(
    _each(lambda a, b: a.merge(b)),
    _each(lambda shapes: shapes._empty()),
    _each(lambda stacked: stacked.reduce()),
    lambda parts: _each(lambda *states: gathered(states))(*parts),
    _each(lambda state: state.finalize()),
)


def state_field() -> Any:
    """A field that holds another state, or a pytree of states, each merged by its own rules.

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

    def empty(part: Any) -> Any:
        if not isinstance(part, State):
            raise WiringError(message("only states can be empty", got=repr(part), expected="ek.metrics.State"))
        return part._empty()

    return jax.tree.map(empty, shapes, is_leaf=_is_state)


def fields_where(state: State, holds: Callable[[Rule], bool]) -> list[str]:
    """Paths of the fields whose rule is such and such, `rows` or `inner.rows`."""
    children, _ = _children(state)
    found = []
    for (name, rule), child in zip(_rules(state), children, strict=True):
        inner = [part for part in jax.tree.leaves(child, is_leaf=_is_state) if _is_state(part)]
        found += [f"{name}.{path}" for part in inner for path in fields_where(part, holds)]
        if not inner and holds(rule):
            found.append(name)
    return list(dict.fromkeys(found))


def growing_fields(state: State) -> list[str]:
    """Paths of the fields whose shape grows when states merge: `concat_field()` without a size."""
    return fields_where(state, lambda rule: not rule.fixed)


def gathered(states: Sequence[S]) -> S:
    """One state from many, on the host: what merging them one after the other gives, their rows in one copy.

    Args:
        states: at least one, in order, of one class; with arrays of any kind.

    Returns:
        The state over the rows of all, its leaves numpy arrays.

    Raises:
        WiringError: there are none, or they are of different classes, static values or shapes; names the field.

    Example:
        >>> from equikd.metrics import Average
        >>> gathered([Average.of(jnp.ones(2)), Average.of(jnp.zeros(2))]).compute().item()
        0.5
    """
    if not states:
        raise WiringError(message("no states to gather", got="an empty sequence", fix="empty_state(shapes)"))
    first = states[0]
    for other in states[1:]:
        _check_kind(first, other)
    _, structure = _children(first)
    columns = zip(*(_children(state)[0] for state in jax.device_get(list(states))), strict=True)
    merged = []
    for (name, rule), values in zip(_rules(first), columns, strict=True):
        try:
            merged.append(rule.gathered(values))
        except WiringError as error:
            raise WiringError(f"{type(first).__qualname__}.{name}: {error}") from None
    return structure.unflatten(merged)


def _children(state: State) -> tuple[list[Any], Any]:
    """The values of the fields that are not static, and how to put such values back."""
    return jax.tree.flatten(state, is_leaf=lambda part: part is not state)


def _rules(state: State) -> Iterator[tuple[str, Rule]]:
    for field in dataclasses.fields(state):
        if not field.metadata.get("static", False):
            yield field.name, field.metadata["merge"]


def _check_kind(a: State, b: State) -> None:
    if type(a) is not type(b):
        names = f"{type(a).__qualname__} and {type(b).__qualname__}"
        raise WiringError(message("states of different classes do not merge", got=names))
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
        errors.append(message(what, got="a field without a rule", expected=CHOICES, fix=fix))
    if errors:
        raise ConfigError(report(f"{len(errors)} fields of {cls.__qualname__} do not say how they merge", errors))


def _quiet(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` without numpy's warnings about 0/0: nan is the right value of an empty metric, not an accident."""

    @functools.wraps(compute)
    def call(self: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return compute(self)

    return call
