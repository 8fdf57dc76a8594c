"""What a capture costs: nothing where nothing is asked for or used, and else what a person would have paid by hand."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import equikd as ek
from equikd.intermediates._mark import Name
from equikd.intermediates._tap import tapped

WIDTH, LAYERS = 8, 4
X = jax.random.normal(jax.random.key(1), (5, WIDTH))


class Scanned(eqx.Module):
    """Rematerialised layers in a scan, with the value among what it gives on request."""

    layers: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), LAYERS)
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(keys)
        self.head = eqx.nn.Linear(WIDTH, 3, key=keys[0])

    def __call__(self, x):
        return self.by_hand(x, give=False)[0]

    def by_hand(self, x, give=True):
        dynamic, static = eqx.partition(self.layers, eqx.is_array)

        @jax.checkpoint
        def body(x, layer):
            inside = eqx.combine(layer, static)(x)
            return x + jnp.tanh(inside), inside if give else None

        x, inside = jax.lax.scan(body, x, dynamic)
        return self.head(x), inside


MODEL = Scanned()
ARRAYS, STATIC = eqx.partition(MODEL, eqx.is_array)


def call(model, x):
    return jax.vmap(model)(x)


def by_path(model, x, paths=("layers",)):
    def one(x):
        out, found = ek.capture(lambda model, x: model(x), paths)(model, x)
        return out, *found.values()

    return jax.vmap(one)(x)


def by_hand(model, x):
    return jax.vmap(model.by_hand)(x)


def on_arrays(function: Any) -> Any:
    return lambda arrays, x: function(eqx.combine(arrays, STATIC), x)


def jaxpr(function):
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(on_arrays(function))(ARRAYS, X)))


def program(function):
    return re.sub(r'jax\.result_info = "[^"]*"|@\w+', "", jax.jit(on_arrays(function)).lower(ARRAYS, X).as_text())


def compiled(function):
    return jax.jit(on_arrays(function)).lower(ARRAYS, X).compile()


def cost(function):
    program = compiled(function)
    return program.cost_analysis()["flops"], program.memory_analysis().temp_size_in_bytes


def step(forward):
    def loss(model, x):
        out, inside = forward(model, x)
        return jnp.mean(out**2) + jnp.mean(inside**2)

    return eqx.filter_grad(loss)


def test_nothing_asked_is_the_same_program():
    nothing = lambda model, x: ek.capture(call, [])(model, x)[0]
    assert jaxpr(nothing) == jaxpr(call)
    assert program(nothing) == program(call)


def test_what_is_asked_and_not_used_costs_nothing():
    unused = lambda model, x: by_path(model, x, ["layers", "head"])[0]
    assert cost(unused) == cost(call)


def test_a_value_costs_what_it_costs_by_hand():
    assert cost(by_path) == cost(by_hand)
    assert cost(by_path) > cost(call)  # or the comparison says nothing


@pytest.mark.slow
def test_a_value_in_a_loss_costs_what_it_costs_by_hand():
    assert cost(step(by_path)) == cost(step(by_hand))


def test_marks_that_nobody_asks_for_are_free():
    """Left over where a tapped model gets out of a capture, or in the gradient rule of a function."""
    marked = lambda model, x: call(tapped(model, [Name(("layers",)), Name(("head",))]), x)
    assert "equikd_mark" in jaxpr(marked)
    assert "equikd" not in program(marked)
    assert program(marked) == program(call)


def test_a_value_that_is_reduced_is_not_kept():
    """Of the values of all layers, a number each goes out of the scan."""
    shapes = jax.make_jaxpr(on_arrays(lambda model, x: by_path(model, x, {"layers": jnp.max})))(ARRAYS, X)
    (scan,) = [equation for equation in shapes.eqns if equation.primitive.name == "scan"]
    assert sorted(variable.aval.shape for variable in scan.outvars) == [(LAYERS, 5), (5, WIDTH)]
