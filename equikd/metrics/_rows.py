"""Rows that a state keeps: a fixed number of the first ones, or all of them.

A sum forgets its rows; examples to show, or a ranking, need the rows themselves. `Rows` holds arrays with an axis of
rows, and which of these are real. `truncate_field(n)` keeps the first n real rows in a fixed shape, so it works on the
device, in scan and under vmap. `concat_field()` keeps all, so its shape grows, and it lives on the host;
`concat_field(size=n)` has room for n rows in a fixed shape, and refuses to give a value when more have come.

Rows that are numpy arrays are merged by numpy: on the host each shape is new, and JAX would compile for each.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import WiringError, message
from equikd.metrics._elements import arrays_of
from equikd.typing import Array, Bool


class Rows(eqx.Module):
    """Rows, some of which may be padding.

    Attributes:
        values: pytree of arrays that have the axis of rows first.
        valid: bool `rows`, which are real.

    Example:
        >>> Rows({"x": jnp.array([1.0, 2.0, 3.0])}, jnp.array([True, False, True])).real()["x"].tolist()
        [1.0, 3.0]
    """

    values: Any
    valid: Bool[Array, " rows"]

    def real(self) -> Any:
        """The real rows alone, as numpy arrays, in order."""
        valid = np.asarray(self.valid)
        return jax.tree.map(lambda x: np.asarray(x)[valid], self.values)


def checked_rows(rows: Any) -> Rows:
    """Rows whose arrays agree on how many there are.

    Raises:
        WiringError: it is no `Rows`, `valid` is not a bool vector, or an array has another number of rows.
    """
    if not isinstance(rows, Rows):
        got, fix = f"{type(rows).__qualname__}", "ek.metrics.Rows(values, mask)"
        raise WiringError(message("a field of rows holds Rows", got=got, fix=fix))
    valid = jnp.asarray(rows.valid)
    values = jax.tree.map(jnp.asarray, rows.values)
    shapes = [list(leaf.shape) for leaf in jax.tree.leaves(values)]
    if valid.dtype != jnp.bool_ or valid.ndim != 1 or any(shape[:1] != [valid.shape[0]] for shape in shapes):
        got = f"valid: {valid.dtype}{list(valid.shape)}, values: {', '.join(map(str, shapes))}"
        expected = "valid: bool[n], and n rows in each array"
        raise WiringError(message("rows and their validity do not agree", got=got, expected=expected))
    return Rows(values, valid)


def concatenated(*parts: Rows) -> Rows:
    """The rows of all, in this order, in one copy."""
    first = parts[0]
    for other in parts[1:]:
        if jax.tree.structure(first) != jax.tree.structure(other) or _kinds(first) != _kinds(other):
            got = f"{', '.join(map(str, _kinds(first)))} and {', '.join(map(str, _kinds(other)))}"
            raise WiringError(message("rows of different shapes do not merge", got=got))
    arrays = arrays_of(*jax.tree.leaves(parts))
    return jax.tree.map(lambda *leaves: arrays.concatenate(leaves), *parts)


def _kinds(rows: Rows) -> list[tuple[Any, ...]]:
    return [(str(leaf.dtype), *np.shape(leaf)[1:]) for leaf in jax.tree.leaves(rows.values)]


def first_rows(rows: Rows, n: int) -> Rows:
    """The first n real rows, in order, then padding of zeros; always n rows."""
    arrays = arrays_of(*jax.tree.leaves(rows))
    missing = max(0, n - rows.valid.shape[0])
    if missing:
        rows = jax.tree.map(lambda x: arrays.concatenate([x, arrays.zeros((missing, *x.shape[1:]), x.dtype)]), rows)
    order = arrays.argsort(~rows.valid, stable=True)[:n]
    valid = rows.valid[order]

    def taken(leaf: Any) -> Any:  # what stood in the padding (nan) does not stay in the state
        keep = valid.reshape((n,) + (1,) * (leaf.ndim - 1))
        return arrays.where(keep, leaf[order], arrays.zeros((), leaf.dtype))

    return Rows(jax.tree.map(taken, rows.values), valid)


def no_rows(shapes: Rows, n: int) -> Rows:
    """Padding alone: n rows in shapes and dtypes like these, as numpy arrays."""
    return jax.tree.map(lambda x: np.zeros((n, *x.shape[1:]), x.dtype), shapes)


def flattened(rows: Rows) -> Rows:
    """Stacked rows one after the other: `k rows *n` -> `k*rows *n`."""
    return jax.tree.map(lambda x: jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:])), rows)
