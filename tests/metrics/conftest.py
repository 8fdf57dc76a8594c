"""`equals_reference`: a metric against a plain function of numpy arrays, over ragged, padded, masked batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equikd.metrics import Summary, empty_state
from equikd.metrics._state import gathered, growing_fields
from equikd.tree import named_leaves

SIZE = 16
_MERGE = jax.jit(lambda a, b: a | b)  # one, so that equal states compile once


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def junk(array, random):
    """What padding may hold: nan and inf, or labels that are no class."""
    if array.dtype == bool:
        return random.random(array.shape) < 0.5
    kinds = [-100, 77, 120] if array.dtype.kind in "iu" else [np.nan, np.inf, -np.inf]
    return random.choice(kinds, array.shape).astype(array.dtype)


def merged_batches(of, arrays, mask, size, random):
    """The state merged from batches of one size, junk in the rows that do not count; in order, and half by half."""
    rows = len(mask)
    states = []
    for start in range(0, rows, size):
        part = {name: array[start : start + size] for name, array in arrays.items()}
        keep = np.zeros((size, *mask.shape[1:]), bool)
        keep[: len(mask[start : start + size])] = mask[start : start + size]
        for name, array in part.items():
            full = junk(np.empty((size, *array.shape[1:]), array.dtype), random)
            full[: len(array)] = array
            shown = keep.reshape(keep.shape + (1,) * (full.ndim - keep.ndim))
            part[name] = jnp.asarray(np.where(shown, full, junk(full, random)))
        states.append(of(**part, mask=jnp.asarray(keep)))
    half = len(states) // 2
    if growing_fields(states[0]):
        forward = gathered(states)
        return forward, gathered([gathered(states[:half]), gathered(states[half:])]) if half else forward
    forward = functools.reduce(_MERGE, states)
    if not half:
        return forward, forward
    return forward, _MERGE(functools.reduce(_MERGE, states[:half]), functools.reduce(_MERGE, states[half:]))


@pytest.fixture
def equals_reference():
    """Check a metric on random data sets.

    Args of what it gives:
        metric: the metric.
        draw: random generator, number of rows -> arrays by name.
        reference: the arrays of the rows that count -> the value, a number or a dict by result path.
        by_element: name of an array whose axes the mask has; by default it is one bool for each row.
        traced: whether `compute` works in a trace as well.

    It returns the value of nothing, by result path.
    """

    def check(metric, draw, reference, *, by_element=None, sets=20, rtol=1e-5, atol=1e-7, traced=True):
        of = jax.jit(metric.from_values)
        for seed in range(sets):
            random = np.random.default_rng(seed)
            rows = int(random.integers(2, 60))
            arrays = draw(random, rows)
            shape = (rows,) if by_element is None else arrays[by_element].shape
            mask = random.random(shape) < 0.7
            mask[0] = True
            kept = {name: array[mask] for name, array in arrays.items()}
            expected = named(reference(**kept))
            for state in merged_batches(of, arrays, mask, SIZE, random):
                got = named(state.finalize().compute())
                assert got.keys() == expected.keys()
                for name, value in expected.items():
                    np.testing.assert_allclose(got[name], value, rtol=rtol, atol=atol, err_msg=f"{name}, seed {seed}")
        if traced and not isinstance(state.finalize().compute(), Summary):
            compiled = named(jax.jit(lambda state: state.compute())(state))
            for name, value in got.items():
                np.testing.assert_allclose(compiled[name], value, rtol=rtol, atol=atol)
        padding = {name: jnp.asarray(junk(array, random)) for name, array in draw(random, SIZE).items()}
        state = of(**padding, mask=jnp.zeros((SIZE, *shape[1:]), bool))
        empty = jax.device_get(state | empty_state(state))
        return named(empty.finalize().compute())

    return check


def named(value):
    if isinstance(value, Summary):
        return dict(vars(value))
    return named_leaves(value) if isinstance(value, dict) else {"": value}
