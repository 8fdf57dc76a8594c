"""A penalty on the parameters is a loss like any other."""

import numpy as np
import optax

import equikd as ek
from tests.train._small import quick


def test_a_penalty_on_the_parameters_trains() -> None:
    """Its gradient is twice the parameter; the bias is left out by the pattern."""
    penalty = ek.losses.ParameterL2("params.**.weight")
    trainer = quick(losses={"l2": penalty}, metrics={}, num_steps=1, optimizer=ek.lazy(optax.sgd)(0.25))
    before, after = trainer.init().params(), trainer.train().state.params()
    np.testing.assert_allclose(after.first.weight, 0.5 * before.first.weight, rtol=1e-6)
    np.testing.assert_array_equal(after.first.bias, before.first.bias)
    assert ek.inspect.check(trainer).warnings[-1:] != (
        "losses.l2: it has no gradient with respect to any trainable parameter",
    )
