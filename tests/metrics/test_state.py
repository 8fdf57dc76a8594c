"""States: the merge algebra, the empty state, and the errors of fields that do not fit."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equikd.errors import ConfigError, WiringError
from equikd.metrics import (
    Average,
    State,
    empty_state,
    max_field,
    min_field,
    state_field,
    static_field,
    sum_field,
)
from equikd.metrics._aux import Aux
from equikd.metrics._rows import Rows
from equikd.metrics._state import concat_field, truncate_field
from equikd.metrics._sums import TwoFloat
from equikd.typing import Array, Float, Int


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


class Everything(State):
    """A state with a field of each rule."""

    total: Float[Array, " k"] = sum_field()
    by_name: dict[str, Int[Array, ""]] = sum_field()
    low: Float[Array, ""] = min_field()
    high: Int[Array, ""] = max_field()
    average: Average = state_field()
    exact: TwoFloat = sum_field(exact=True)
    first: Rows = truncate_field(2)
    classes: int = static_field(default=2)

    @classmethod
    def of(cls, values, mask):
        kept = jnp.where(mask[:, None], values, 0)
        return cls(
            total=kept.sum(axis=0),
            by_name={"rows": mask.sum(dtype=jnp.int32)},
            low=jnp.where(mask, values[:, 0], jnp.inf).min(initial=jnp.inf),
            high=jnp.where(mask, values[:, 1].astype(jnp.int32), jnp.iinfo(jnp.int32).min).max(
                initial=jnp.iinfo(jnp.int32).min
            ),
            average=Average.of(values[:, 0], mask),
            exact=kept[:, 1].sum(),
            first=Rows({"row": values}, mask),
        )

    def compute(self):
        return {"low": self.low, "mean": self.average.compute()}


# Small integers: their float32 sums are exact, so the laws hold to the bit.
rows = st.lists(st.tuples(st.integers(-99, 99), st.integers(-99, 99), st.booleans()), max_size=3)


EVERYTHING_OF = jax.jit(Everything.of)


def state_of(some_rows):
    values = np.array([row[:2] for row in some_rows], np.float32).reshape(-1, 2)
    return EVERYTHING_OF(values, np.array([row[2] for row in some_rows], bool))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@settings(max_examples=20)
@given(rows, rows, rows)
def test_laws(first, second, third):
    a, b, c = state_of(first), state_of(second), state_of(third)
    empty = empty_state(jax.eval_shape(lambda: a))
    equal((a | b) | c, a | (b | c))
    equal(empty | a, a)
    equal(a | empty, a)
    equal(a.merge(b), state_of(first + second))


def test_empty_state_is_numpy_and_keeps_dtypes():
    class Extremes(State):
        low: Array = min_field()
        high: Array = max_field()
        total: Array = sum_field()

        def compute(self):
            return self.low

    for dtype, lowest, highest in [
        (jnp.bfloat16, -np.inf, np.inf),
        (jnp.int8, -128, 127),
        (jnp.uint32, 0, 2**32 - 1),
    ]:
        struct = jax.ShapeDtypeStruct((2,), dtype)
        empty = empty_state(Extremes(struct, struct, struct))
        assert all(type(leaf) is np.ndarray and leaf.dtype == dtype for leaf in jax.tree.leaves(empty))
        assert [empty.low[0], empty.high[1], empty.total[0]] == [highest, lowest, 0]
    flags = jax.ShapeDtypeStruct((), jnp.bool_)
    assert empty_state(Extremes(flags, flags, jax.ShapeDtypeStruct((), jnp.int32))).low


def test_empty_state_of_a_tree_of_states():
    shapes = jax.eval_shape(lambda: {"a": Average.of(jnp.ones(2)), "b": (state_of([]),)})
    empty = empty_state(shapes)
    assert jax.tree.structure(empty) == jax.tree.structure(shapes)
    assert empty["a"].count == 0


def test_states_pass_through_jit_scan_and_vmap():
    values, mask = jnp.arange(12.0).reshape(4, 3), jnp.arange(12).reshape(4, 3) % 3 != 1
    expected = Average.of(values.reshape(-1), mask.reshape(-1))
    empty = empty_state(jax.eval_shape(Average.of, values[0], mask[0]))
    scanned, _ = jax.jit(lambda xs: jax.lax.scan(lambda state, x: (state | Average.of(*x), None), empty, xs))(
        (values, mask)
    )
    equal(scanned, expected)
    batch = jax.vmap(Average.of)(values, mask)
    equal(batch.reduce(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [0, 1, 5])
def test_scan_and_reduce_are_merges_in_order(batches):
    random = np.random.default_rng(batches)
    rows = random.integers(-9, 9, (batches, 2, 2)).astype(np.float32)
    mask = random.random((batches, 2)) < 0.6
    empty = empty_state(jax.eval_shape(Everything.of, np.ones((2, 2), np.float32), np.ones(2, bool)))
    expected = empty
    for batch in zip(rows, mask, strict=True):
        expected = expected | EVERYTHING_OF(*batch)
    states = jax.vmap(Everything.of)(rows, mask)
    equal(states.reduce(), expected)
    equal(jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), states).reduce(axis=-1), expected)
    scanned, _ = jax.lax.scan(lambda state, batch: (state | Everything.of(*batch), None), empty, (rows, mask))
    equal(scanned, expected)


class First(State):
    rows: Rows = truncate_field(3)

    def compute(self):
        return self.rows.real()


def test_truncate_keeps_the_first_real_rows_in_one_shape():
    mask = np.array([False, True, False, True])
    state = First(Rows({"x": np.array([np.nan, 1.0, np.inf, 2.0], np.float32)}, mask))
    assert state.rows.values["x"].tolist() == [1, 2, 0]
    merged = state | First(Rows({"x": np.full(5, 7, np.float32)}, np.ones(5, bool)))
    assert merged.compute()["x"].tolist() == [1, 2, 7]
    assert (merged | state).compute()["x"].tolist() == [1, 2, 7]
    nothing = First(Rows({"x": np.ones((0,), np.float32)}, np.ones(0, bool)))
    assert nothing.rows.valid.tolist() == [False] * 3
    assert (nothing | state).finalize().rows.values["x"].tolist() == [1, 2]


class All(State):
    rows: Rows = concat_field()

    def compute(self):
        return self.rows.values.sum()


def test_concat_keeps_all_rows_and_finalize_leaves_the_real_ones():
    one = All(Rows(np.arange(4.0, dtype=np.float32), np.array([True, False, True, True])))
    two = All(Rows(np.array([5.0, np.nan], np.float32), np.array([True, False])))
    empty = empty_state(jax.eval_shape(lambda: one))
    assert empty.rows.values.shape == (0,)
    final = (empty | one | two).finalize()
    assert (final.rows.values.tolist(), final.compute()) == ([0, 2, 3, 5], 10)
    stacked = jax.vmap(lambda x: All(Rows(x, x > 0)))(jnp.arange(6.0).reshape(3, 2))
    assert stacked.reduce().finalize().rows.values.tolist() == [1, 2, 3, 4, 5]


class Inside(State):
    inner: All = state_field()

    def compute(self):
        return self.inner.compute()


def test_rows_that_do_not_fit(snapshot):
    one, two = np.ones(2, np.float32), np.ones(2, bool)
    texts = []
    for broken in (
        lambda: All(one),
        lambda: All(Rows(one, one)),
        lambda: First(Rows(np.ones(3), two)),
        lambda: All(Rows(one, two)) | All(Rows(np.ones((2, 1), np.float32), two)),
        lambda: Aux(metrics={"auc": Inside(All(Rows(one, two)))}).check_fixed(),
    ):
        with pytest.raises(WiringError) as error:
            broken()
        texts.append(str(error.value))
    for n in (0, True, 2.0):
        with pytest.raises(ConfigError, match="keeps n rows"):
            truncate_field(n)
    snapshot("rows_do_not_fit", "\n\n".join(texts))


def test_results_are_of_finalized_states():
    state = All(Rows(np.array([1.0, np.nan], np.float32), np.array([True, False])))
    assert Aux(metrics={"sum": state}).results() == {"sum": 1}
    full = Average(jnp.float32(1), jnp.int32(2**31 - 1))
    with pytest.raises(OverflowError, match=r"Average\.count") as error:
        Aux(metrics={"mean": full}).results()
    assert "metric 'mean'" in error.value.__notes__[0]


def test_a_field_without_a_rule_is_an_error(snapshot):
    with pytest.raises(ConfigError) as error:

        class Broken(State):
            total: Float[Array, ""]
            count: "Int[Array, '']" = eqx.field(default=0)
            fine: Int[Array, ""] = sum_field()
            names: ClassVar[tuple[str, ...]] = ()

            def compute(self):
                return self.total

    snapshot("field_without_rule", str(error.value))


class Sum(State):
    value: Array = sum_field()
    k: int = static_field(default=1)

    def compute(self):
        return self.value / 0


def test_user_compute_is_quiet_about_0_over_0():
    assert np.isnan(Sum(np.zeros(())).compute())


def test_states_that_do_not_merge(snapshot):
    one = jnp.ones(())
    texts = []
    for a, b in [
        (Average.of(jnp.ones(1)), Sum(one)),
        (Sum(one, 1), Sum(one, 2)),
        (Sum(jnp.ones(3)), Sum(one)),
        (Sum(jnp.array(True)), Sum(jnp.array(True))),
    ]:
        with pytest.raises(WiringError) as error:
            _ = a | b
        texts.append(str(error.value))
    with pytest.raises(WiringError) as error:
        empty_state({"x": np.ones(2)})
    snapshot("do_not_merge", "\n\n".join([*texts, str(error.value)]))
