"""Fields of rows: a size that is never passed in silence, and many states gathered on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equikd.errors import ConfigError, WiringError
from equikd.metrics import Average, Rows, State, concat_field, empty_state, state_field, static_field, truncate_field
from equikd.metrics._aux import Aux
from equikd.metrics._state import gathered, growing_fields


class Sized(State):
    rows: Rows = concat_field(size=3)

    def compute(self):
        return self.rows.values.sum()


class Growing(State):
    rows: Rows = concat_field()
    kind: str = static_field(default="a")

    def compute(self):
        return self.rows.values.sum()


class Both(State):
    inner: Growing = state_field()
    first: Rows = truncate_field(4)
    sized: Sized = state_field()
    average: Average = state_field()

    def compute(self):
        return self.inner.compute()


def both(values, mask):
    rows = Rows(values, mask)
    return Both(Growing(rows), rows, Sized(rows), Average.of(values, mask))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_a_size_works_in_scan_and_vmap_and_keeps_all_that_fits():
    values = jnp.arange(6.0).reshape(3, 2)
    mask = values.astype(jnp.int32) % 2 == 1
    empty = empty_state(jax.eval_shape(lambda: Sized(Rows(values[0], mask[0]))))
    assert not growing_fields(empty)
    step = lambda state, x: (state | Sized(Rows(*x)), None)
    scanned, _ = jax.lax.scan(step, jax.tree.map(jnp.asarray, empty), (values, mask))
    mapped = jax.vmap(lambda *x: Sized(Rows(*x)))(values, mask).reduce()
    equal(scanned, mapped)
    final = scanned.finalize()
    assert (final.rows.values.tolist(), final.compute()) == ([1, 3, 5], 9)


def test_one_row_too_many_is_an_error_and_not_a_wrong_value(snapshot):
    one, two = Sized(Rows(jnp.ones(3), jnp.ones(3, bool))), Sized(Rows(jnp.ones(9), jnp.arange(9) == 4))
    assert one.finalize().compute() == 3
    texts = []
    for full in (one | two, one | one | one, Sized(Rows(jnp.ones(9), jnp.ones(9, bool)))):
        with pytest.raises(OverflowError) as error:
            full.finalize()
        texts.append(str(error.value))
    assert len(set(texts)) == 1
    with pytest.raises(OverflowError) as error:
        Aux(metrics={"auc": one | two}).results()
    snapshot("too_many_rows", "\n".join([str(error.value), *error.value.__notes__]))
    traced = jax.eval_shape(lambda state: state.finalize(), one | two)  # no values yet, no error yet
    assert traced.rows.valid.shape == (4,)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3"])
def test_a_size_is_a_positive_int(size):
    with pytest.raises(ConfigError, match="has room for n rows"):
        concat_field(size=size)


def test_which_fields_grow():
    state = both(jnp.ones(2), jnp.ones(2, bool))
    assert growing_fields(state) == ["inner.rows"]
    assert growing_fields(state.sized) == []


batches = st.lists(st.lists(st.tuples(st.integers(-9, 9), st.booleans()), max_size=4), min_size=1, max_size=5)


@settings(max_examples=20)
@given(batches, st.booleans())
def test_gathered_is_merged_one_after_the_other(parts, on_host):
    states = [
        both(np.array([x for x, _ in part], np.float32), np.array([keep for _, keep in part], bool)) for part in parts
    ]
    merged = functools.reduce(lambda a, b: a | b, states)
    one = gathered(jax.device_get(states) if on_host else states)
    equal(one, merged)
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(one))
    equal(gathered([one, empty_state(one)]), merged)


def test_host_states_merge_on_the_host():
    states = jax.device_get([Growing(Rows(jnp.ones(n), jnp.ones(n, bool))) for n in (1, 2)])
    assert type((states[0] | states[1]).rows.values) is np.ndarray


def test_states_that_do_not_gather(snapshot):
    rows = Rows(np.ones(2, np.float32), np.ones(2, bool))
    other = Rows(np.ones((2, 1), np.float32), np.ones(2, bool))
    texts = []
    for states in (
        [],
        [Growing(rows), Sized(rows)],
        [Growing(rows), Growing(rows, "b")],
        [Growing(rows), Growing(other)],
    ):
        with pytest.raises(WiringError) as error:
            gathered(states)
        texts.append(str(error.value))
    snapshot("do_not_gather", "\n\n".join(texts))
