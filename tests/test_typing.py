"""`typechecked`: axis names across arguments, tracers for floats, an off switch, beartype only when called."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from equikd.typing import Array, Float, Scalar, typechecked

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # a new process finds what this one does


@typechecked
def matmul(x: Float[Array, "b d"], w: Float[Array, "d n"]) -> Float[Array, "b n"]:
    return x @ w


@typechecked
def scaled(x: Float[Array, " n"], by: float) -> Float[Array, " n"]:
    return x * by


def test_axes_are_bound_across_arguments():
    assert matmul(jnp.ones((2, 3)), jnp.ones((3, 4))).shape == (2, 4)
    with pytest.raises(TypeCheckError):
        matmul(jnp.ones((2, 3)), jnp.ones((4, 3)))


def test_the_result_is_checked():
    @typechecked
    def wrong(x: Float[Array, " n"]) -> Float[Array, "n n"]:
        return x

    with pytest.raises(TypeCheckError):
        wrong(jnp.ones(3))


def test_axis_names_are_local_to_a_call():
    assert scaled(jnp.ones(2), 1.0).shape == (2,)
    assert scaled(jnp.ones(3), 1.0).shape == (3,)


def test_a_float_may_be_a_0d_float_tracer():
    assert jax.jit(scaled)(jnp.ones(2), 0.5).tolist() == [0.5, 0.5]
    assert jax.grad(lambda by: scaled(jnp.ones(2), by).sum())(0.5) == 2.0
    assert jax.vmap(scaled, (None, 0))(jnp.ones(2), jnp.arange(3.0)).shape == (3, 2)


@pytest.mark.parametrize("wrong", ["fast", None, jnp.ones(2), jnp.int32(1)])
def test_a_float_is_nothing_else(wrong):
    with pytest.raises(TypeCheckError):
        scaled(jnp.ones(2), wrong)


def test_methods_and_names():
    class Model:
        @typechecked
        def __call__(self, x: Float[Array, " d"]) -> Scalar:
            """Adds up."""
            return x.sum()

    assert Model()(jnp.ones(3)) == 3
    assert Model.__call__.__doc__ == "Adds up."
    assert matmul.__name__ == "matmul"
    with pytest.raises(TypeCheckError):
        Model()(jnp.ones((3, 3)))


def test_a_lambda_has_nothing_to_check():
    assert typechecked(lambda x: x)(3) == 3


def test_classes():
    @typechecked
    @dataclasses.dataclass
    class Pair:
        a: Float[Array, " n"]
        b: Float[Array, " n"]

    Pair(jnp.ones(2), jnp.ones(2))
    with pytest.raises(TypeCheckError):
        Pair(jnp.ones(2), jnp.ones(3))


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("EQUIKD_TYPECHECK", "0")
    assert scaled(jnp.ones((2, 2)), 0.5).shape == (2, 2)

    @typechecked
    class Plain:
        def method(self, x: Float[Array, " n"]) -> int:
            return 1

    assert Plain().method("no array") == 1


def test_beartype_is_imported_at_the_first_call():
    code = (
        "import sys; from equikd.typing import typechecked\n"
        "@typechecked\n"
        "def f(x: int) -> int:\n"
        "    return x\n"
        "assert 'beartype' not in sys.modules\n"
        "f(1)\n"
        "assert 'beartype' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENV)
    assert done.returncode == 0, done.stderr
