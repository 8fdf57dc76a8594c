"""Losses of numbers on cases by hand: what they are near and far from 0, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import TypeCheckError

from equikd.config import override, resolve, validate
from equikd.errors import ConfigError
from equikd.losses import AbsoluteError, Huber, SquaredError
from equikd.wiring import Context

ABSOLUTE = AbsoluteError(preds="preds", targets="batch.y")
SQUARE = SquaredError(preds="preds", targets="batch.y")
HUBER = Huber(preds="preds", targets="batch.y", delta=2.0)


def context(preds, y, mask=None):
    return Context(preds=preds, batch={"y": y}, mask=jnp.ones(preds.shape[0], bool) if mask is None else mask)


class TestSquaredError:
    def test_is_the_mean_over_all_elements(self):
        preds, targets = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1.0, 1.0], [1.0, 1.0]])
        assert SQUARE.values(preds, targets).tolist() == [[0, 1], [4, 9]]
        assert SQUARE.from_context(context(preds, targets)).compute() == 3.5
        assert SQUARE.from_context(context(preds, targets, jnp.array([True, False]))).compute() == 0.5

    def test_mixed_dtypes(self):
        values = SQUARE.values(jnp.array([1.5], jnp.bfloat16), jnp.array([1]))
        assert (values.dtype, values.tolist()) == (jnp.float32, [0.25])

    def test_it_does_not_broadcast(self):
        with pytest.raises(TypeCheckError):
            SQUARE.values(jnp.ones((3, 1)), jnp.ones(3))

    def test_is_twice_the_l2_loss_of_optax(self):
        preds = jnp.linspace(-3, 3, 7)
        np.testing.assert_allclose(SQUARE.values(preds, jnp.ones(7)), 2 * optax.l2_loss(preds, jnp.ones(7)), rtol=1e-6)


@pytest.mark.parametrize("loss", [ABSOLUTE, HUBER])
def test_one_shape_and_mixed_dtypes(loss):
    with pytest.raises(TypeCheckError):
        loss.values(jnp.ones((3, 1)), jnp.ones(3))
    values = loss.values(jnp.array([1.5], jnp.bfloat16), jnp.array([1]))
    assert (values.dtype, values.shape) == (jnp.float32, (1,))


def test_the_absolute_error_and_its_slope():
    preds, y = jnp.array([1.0, -2.0, 3.0]), jnp.array([3.0, -2.0, 1.0])
    assert ABSOLUTE.values(preds, y).tolist() == [2, 0, 2]
    assert jax.grad(lambda p: ABSOLUTE.values(p, y).sum())(preds).tolist() == [-1, 0, 1]
    assert ABSOLUTE.from_context(context(preds[:, None], y[:, None], jnp.array([True, True, False]))).compute() == 1


class TestHuber:
    errors = jnp.array([-5.0, -2.0, -1.0, 0.0, 1.0, 2.0, 5.0])

    def test_is_half_a_square_and_then_a_line(self):
        values, slopes = jax.vmap(jax.value_and_grad(lambda e: HUBER.values(e[None], jnp.zeros(1))[0]))(self.errors)
        assert values.tolist() == [8, 2, 0.5, 0, 0.5, 2, 8]
        assert slopes.tolist() == [-2, -2, -1, 0, 1, 2, 2]

    def test_near_0_it_is_half_the_squared_error(self):
        wide = override(HUBER, {"delta": 99.0})
        np.testing.assert_allclose(
            wide.values(self.errors, 0 * self.errors), SQUARE.values(self.errors, 0 * self.errors) / 2, rtol=1e-6
        )

    def test_one_program_serves_all_deltas(self, compilations):
        run = jax.jit(lambda loss: resolve(loss).values(self.errors, jnp.zeros(7)).sum())
        run(HUBER)
        compilations.clear()
        assert [float(run(override(HUBER, {"delta": d}))) for d in (1.0, 4.0)] == [13.0, 29.0]
        assert compilations.names == []

    def test_delta_is_above_0(self):
        with pytest.raises(ConfigError, match="delta must be above 0"):
            validate(override(HUBER, {"delta": 0.0}))
