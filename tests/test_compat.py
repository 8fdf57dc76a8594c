"""Private API and its public fallback say the same, everywhere a config's float may be resolved."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from equikd import _compat
from equikd._compat import is_ready, is_weak, weaken

WAYS = {"private": _compat._weaken_private, "public": _compat.weaken_public, "chosen": weaken}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def test_values_dtype_and_weakness(way):
    strong = jnp.float32(0.3)
    weak = way(strong)
    assert not is_weak(strong)
    assert is_weak(weak)
    assert weak.dtype == jnp.float32
    assert weak.shape == ()
    assert weak == strong
    assert (weak * jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16
    assert (strong * jnp.ones((), jnp.bfloat16)).dtype == jnp.float32


def test_special_values_survive(way):
    for value in (float("inf"), float("-inf"), -0.0, 1e-38, 3e38):
        weak = way(jnp.float32(value))
        assert weak.tobytes() == jnp.float32(value).tobytes()
    assert jnp.isnan(way(jnp.float32(jnp.nan)))


def test_under_x64(way):
    with jax.enable_x64(True):
        weak = way(jnp.float64(0.1))
        assert is_weak(weak)
        assert weak.dtype == jnp.float64
        assert float(weak) == 0.1


def test_under_jit_vmap_and_grad(way):
    half = jnp.ones((), jnp.bfloat16)

    def scaled(x):
        weak = way(x)
        assert is_weak(weak)
        product = weak * half
        assert product.dtype == jnp.bfloat16
        return product.astype(jnp.float32) * 2

    stack = jnp.arange(3, dtype=jnp.float32)
    assert jax.jit(scaled)(jnp.float32(0.5)) == 1.0
    assert jax.vmap(scaled)(stack).tolist() == [0.0, 2.0, 4.0]
    assert jax.grad(scaled)(jnp.float32(0.5)) == 2.0
    assert jax.jit(jax.vmap(jax.grad(scaled)))(stack).tolist() == [2.0, 2.0, 2.0]
    assert jax.jacfwd(scaled)(jnp.float32(0.5)) == 2.0


def test_a_scan_carry_keeps_its_dtype(way):
    def run(rate):
        def body(carry, _):
            return carry * way(rate), None

        return lax.scan(body, jnp.ones((), jnp.bfloat16), length=3)[0]

    assert jax.jit(run)(jnp.float32(0.5)).dtype == jnp.bfloat16


def test_the_fallback_takes_over(monkeypatch):
    def gone(x):
        raise ImportError("moved")

    monkeypatch.setattr(_compat, "_weaken_private", gone)
    assert is_weak(weaken(jnp.float32(1.0)))


def test_is_weak():
    assert is_weak(jnp.asarray(1.0))
    assert not is_weak(1.0)
    assert not is_weak(None)


def test_whether_an_array_is_there():
    """JAX still tells, without waiting; where it does not, the answer is no."""
    assert is_ready(jax.block_until_ready(jnp.ones(3)))
    assert not is_ready(object())
