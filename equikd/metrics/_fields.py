"""The fields of states: what each does when states merge, and what it is where there is nothing yet.

`sum_field`, `min_field` and the like put a `Rule` into the metadata of a field; `State` (in `_state.py`) reads it. A
rule is a merge and its identity; that merging is associative is what makes batches, devices and scans interchangeable.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import ConfigError, WiringError, message
from equikd.metrics._rows import Rows, checked_rows, concatenated, first_rows, flattened, no_rows
from equikd.metrics._sums import TwoFloat, add, has_overflowed

CHOICES = "sum_field(), min_field(), max_field(), truncate_field(n), concat_field(), state_field() or static_field()"


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the values of one field merge, and what merging with changes nothing.

    Attributes:
        merge: two values of the field -> one.
        empty: the field's shapes (a pytree of `ShapeDtypeStruct`) -> the identity of `merge`, as numpy arrays.
        reduce: values stacked along the first axis -> one; by default pair after pair with `merge`.
        gather: many values on the host -> one, in order; by default one after the other with `merge`.
        finish: the value on the host, at the end -> what `compute` sees, or an error.
        fixed: whether merging keeps the shape.
        ordered: whether the value depends on the order of the rows.
    """

    merge: Callable[[Any, Any], Any]
    empty: Callable[[Any], Any]
    reduce: Callable[[Any], Any] | None = None
    gather: Callable[[Sequence[Any]], Any] | None = None
    finish: Callable[[Any], Any] = lambda value: value
    fixed: bool = True
    ordered: bool = False

    def gathered(self, values: Sequence[Any]) -> Any:
        """The merge of many values on the host, in order, as numpy arrays."""
        merged = functools.reduce(self.merge, values) if self.gather is None else self.gather(values)
        return jax.device_get(merged)

    def reduced(self, stacked: Any) -> Any:
        """The merge of values stacked along the first axis, in order."""
        if self.reduce is not None:
            return self.reduce(stacked)
        count = jax.tree.leaves(stacked)[0].shape[0] if jax.tree.leaves(stacked) else 1
        if count == 0:
            return self.empty(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked))
        while count > 1:  # neighbours, since the order of rows may matter
            even = count - count % 2
            first, second = (jax.tree.map(operator.itemgetter(slice(i, even, 2)), stacked) for i in (0, 1))
            merged = jax.vmap(self.merge)(first, second)
            if count % 2:
                merged = jax.tree.map(lambda x, rest: jnp.concatenate([x, rest[-1:]]), merged, stacked)
            stacked, count = merged, count // 2 + count % 2
        return jax.tree.map(lambda x: x[0], stacked)


def _leafwise(merge: Callable[[Any, Any], Any], identity: Callable[[np.dtype], Any]) -> Rule:
    """A rule that treats each array of the field alike."""

    def one(a: Any, b: Any) -> Any:
        _same_shape(a, b)
        return merge(a, b)

    return Rule(
        functools.partial(jax.tree.map, one),
        functools.partial(jax.tree.map, lambda x: np.full(x.shape, identity(np.dtype(x.dtype)), x.dtype)),
    )


def _same_shape(a: Any, b: Any) -> None:
    if np.shape(a) != np.shape(b):  # broadcasting would count some of the elements twice
        raise WiringError(message("states of different shapes do not merge", got=f"{np.shape(a)} and {np.shape(b)}"))


def _add(a: Any, b: Any) -> Any:
    _zero(jnp.result_type(a))
    return add(a, b)


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


def _not_overflowed(value: Any) -> Any:
    full = [leaf for leaf in jax.tree.leaves(value) if has_overflowed(leaf)]
    if full:
        limit = f"{full[0].dtype}, at most {np.iinfo(full[0].dtype).max:,}"
        fix = "count in units that are larger, or sum floats: ek.metrics.sum_field(exact=True)"
        raise OverflowError(message("a sum of ints does not fit its dtype", got=limit, fix=fix))
    return value


def _is_two_float(value: Any) -> bool:
    return isinstance(value, TwoFloat)


def _add_exactly(a: Any, b: Any) -> Any:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        _same_shape(x, y)
    return jax.tree.map(lambda x, y: x + y, a, b, is_leaf=_is_two_float)


def _two_floats(value: Any) -> Any:
    return jax.tree.map(TwoFloat.of, value, is_leaf=_is_two_float)


_SUM = dataclasses.replace(_leafwise(_add, _zero), finish=_not_overflowed)
_EXACT = Rule(_add_exactly, _leafwise(_add, _zero).empty)


def _real_rows(rows: Rows) -> Rows:
    return Rows(rows.real(), rows.valid[rows.valid])


def _all_fit(size: int, rows: Rows) -> Rows:
    if np.asarray(rows.valid).all():
        what = f"more rows have come than the {size:,} that fit"
        fix = (
            "a larger size: concat_field(size=N), or size=N of a shipped metric\nor fewer rows, as in shorter intervals"
        )
        raise OverflowError(message(what, got=f"at least {size + 1:,} rows", expected=f"at most {size:,}", fix=fix))
    return _real_rows(rows)


def _first(n: int, finish: Callable[[Rows], Rows]) -> Rule:
    """The first n real rows, in a fixed shape."""
    return Rule(
        lambda a, b: first_rows(concatenated(a, b), n),
        lambda shapes: no_rows(shapes, n),
        gather=lambda parts: first_rows(concatenated(*parts), n),
        finish=finish,
        ordered=True,
    )


_CONCAT = Rule(
    concatenated,
    lambda shapes: no_rows(shapes, 0),
    flattened,
    lambda parts: concatenated(*parts),
    _real_rows,
    fixed=False,
    ordered=True,
)
_MIN = _leafwise(jnp.minimum, functools.partial(_extreme, highest=True))
_MAX = _leafwise(jnp.maximum, functools.partial(_extreme, highest=False))


def sum_field(*, exact: bool = False) -> Any:
    """A field that adds up; an array, or a pytree of arrays.

    A sum of ints that does not fit its dtype is refused when the state is read, never wrapped.

    Args:
        exact: keep the rounding errors as well; the field holds a `TwoFloat` (or a pytree of these, its arrays being
            made such), whose `value` `compute` reads. Sum the rows of a batch with `exact_sum(values, mask)`.

    Example:
        >>> import equikd as ek
        >>> from equikd.typing import Array, Int
        >>> class Seen(ek.metrics.State):
        ...     count: Int[Array, ""] = sum_field()
        ...     loss: TwoFloat = sum_field(exact=True)
        ...     def compute(self):
        ...         return self.loss.value / self.count
        >>> (Seen(jnp.int32(2), jnp.float32(5)) | Seen(jnp.int32(3), jnp.float32(10))).compute().item()
        3.0
    """
    if exact:
        return eqx.field(converter=_two_floats, metadata={"merge": _EXACT})
    return eqx.field(metadata={"merge": _SUM})


def min_field() -> Any:
    """A field that keeps the smaller value, element by element; empty, it is +inf or the largest int.

    Example:
        >>> import equikd as ek
        >>> from equikd.typing import Array, Int
        >>> class Lowest(ek.metrics.State):
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
        >>> import equikd as ek
        >>> from equikd.typing import Array, Int
        >>> class Highest(ek.metrics.State):
        ...     value: Int[Array, ""] = max_field()
        ...     def compute(self):
        ...         return self.value
        >>> (Highest(jnp.int32(2)) | Highest(jnp.int32(3))).compute().item()
        3
    """
    return eqx.field(metadata={"merge": _MAX})


def truncate_field(n: int) -> Any:
    """A field that keeps the first n real rows, in a fixed shape: on the device, in scan, and over an interval.

    Args:
        n: how many rows, at least 1. What is put in, `Rows` of any number, is cut to n rows or padded.

    Example:
        >>> import equikd as ek
        >>> class First(ek.metrics.State):
        ...     rows: Rows = truncate_field(2)
        ...     def compute(self):
        ...         return self.rows.values.sum()
        >>> one = First(Rows(jnp.array([1.0, 2.0, 3.0]), jnp.array([False, True, False])))
        >>> (one | First(Rows(jnp.array([7.0, 9.0]), jnp.ones(2, bool)))).rows.values.tolist()
        [2.0, 7.0]
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(message("truncate_field(n) keeps n rows", got=repr(n), expected="an int of at least 1"))
    return _rows_field(_first(n, _real_rows), n)


def _rows_field(rule: Rule, n: int) -> Any:
    return eqx.field(converter=lambda rows: first_rows(checked_rows(rows), n), metadata={"merge": rule})


def concat_field(size: int | None = None) -> Any:
    """A field that keeps all rows, `Rows`.

    Without a size its shape grows, so it is for states that are merged on the host, as in an eval. With a size it has
    room for that many real rows in a fixed shape: on the device, in scan and vmap, and over a training interval. No row
    is dropped in silence: with more rows than fit, `finalize`, and so each result, is an error.

    Args:
        size: how many real rows fit, at least 1; None: any number.

    Raises:
        ConfigError: `size` is no positive int.
        OverflowError: (from `State.finalize`) more real rows have come than fit.

    Example:
        >>> import equikd as ek
        >>> class All(ek.metrics.State):
        ...     rows: Rows = concat_field()
        ...     def compute(self):
        ...         return np.median(self.rows.real())
        >>> one = All(Rows(jnp.array([1.0, 2.0, 3.0]), jnp.array([True, True, False])))
        >>> float((one | All(Rows(jnp.array([7.0]), jnp.ones(1, bool)))).compute())
        2.0
    """
    if size is not None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            expected = "an int of at least 1, or None for any number"
            raise ConfigError(message("concat_field(size=n) has room for n rows", got=repr(size), expected=expected))
        # One row more than fits: if even that one is real, there were too many.
        return _rows_field(_first(size + 1, functools.partial(_all_fit, size)), size + 1)
    return eqx.field(converter=checked_rows, metadata={"merge": _CONCAT})


def static_field(**options: Any) -> Any:
    """A field that is part of the program, such as a number of classes; merged states must agree on it.

    Args:
        **options: `default` and the like, as in `dataclasses.field`.

    Example:
        >>> import equikd as ek
        >>> from equikd.typing import Array, Int
        >>> class Count(ek.metrics.State):
        ...     value: Int[Array, " k"] = sum_field()
        ...     k: int = static_field(default=3)
        ...     def compute(self):
        ...         return {f"class_{i}": self.value[i] for i in range(self.k)}
        >>> len(Count(jnp.zeros(3, jnp.int32)).compute())
        3
    """
    return eqx.field(static=True, metadata={"merge": None}, **options)
