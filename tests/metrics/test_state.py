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
    equal(jax.tree.map(lambda leaf: leaf.sum(axis=0, dtype=leaf.dtype), batch), expected)


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
