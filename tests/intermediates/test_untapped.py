"""What a captured function returns is as it would be without capture: no part of it is marked any more."""

import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equikd as ek

X = jnp.ones((5, 4))


def mlp() -> Any:
    return eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))


def test_gradients_taken_inside_fit_the_model() -> None:
    model = mlp()
    gradient = eqx.filter_grad(lambda model, x: jax.vmap(model)(x).sum())
    paths = ["layers[0]", "layers[1].inputs", "activation[0]", "layers[*]"]
    found, values = ek.capture(gradient, paths)(model, X)
    plain = gradient(model, X)
    assert jax.tree.structure(found) == jax.tree.structure(plain)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)
    eqx.apply_updates(model, found)
    assert values["layers[1]"].shape == (5, 8)


def test_a_model_that_is_returned_is_the_model() -> None:
    model = {"net": eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Lambda(jnp.tanh)])}
    (_, again), _ = ek.capture(lambda model, x: (model["net"](x), model), ["**"])(model, X[0])
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert type(again["net"]) is eqx.nn.Sequential
    assert type(again["net"].layers[0]) is eqx.nn.Linear
    pickle.loads(pickle.dumps(again["net"].layers[0]))


def test_a_module_that_is_a_value_is_not_marked() -> None:
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    shared = eqx.nn.Shared(
        (linear, eqx.nn.Linear(4, 4, key=jax.random.key(1))), lambda p: p[1].bias, lambda p: p[0].bias
    )

    class Tied(eqx.Module):
        shared: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            first, second = self.shared()
            return second(first(x))

    _, found = ek.capture(lambda model, x: model(x), ["shared", "shared.pytree[0]"])(Tied(shared), X[0])
    assert type(found["shared"][0]) is eqx.nn.Linear


def test_partials_inside_a_pattern() -> None:
    class Holds(eqx.Module):
        part: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.part(x)

    model = Holds(jax.tree_util.Partial(eqx.nn.Linear(4, 4, key=jax.random.key(0))))
    out, found = ek.capture(lambda model, x: model(x), ["**"])(model, X[0])
    np.testing.assert_array_equal(found["part"], out)


def test_parts_of_inputs_by_a_pattern() -> None:
    _, found = ek.capture(lambda model, x: model(x), ["layers[*].inputs[0]"])(mlp(), X[0])
    assert {path: value.shape for path, value in found.items()} == {
        "layers[0].inputs[0]": (4,),
        "layers[1].inputs[0]": (8,),
        "layers[2].inputs[0]": (8,),
    }


def test_what_is_named_goes_before_patterns() -> None:
    _, found = ek.capture(lambda model, x: model(x), {"layers[0]": jnp.sum, "layers[*]": None})(mlp(), X[0])
    assert [found[f"layers[{at}]"].shape for at in range(3)] == [(), (8,), (2,)]


@pytest.mark.parametrize("paths", [[5], [None], {"layers[0]": "mean"}, {"layers[0]": jnp.shape}])
def test_what_cannot_be_asked_for(paths: Any, snapshot: Any, request: pytest.FixtureRequest) -> None:
    with pytest.raises(ek.intermediates.IntermediateError) as caught:
        ek.capture(lambda model, x: model(x), paths)(mlp(), X[0])
    snapshot(request.node.callspec.id, str(caught.value))


def test_a_pattern_of_what_is_not_called_is_refused(snapshot: Any) -> None:
    with pytest.raises(ek.intermediates.IntermediateError) as caught:
        ek.capture(lambda model, x: x, ["layers[*]", "*.inputs"])(mlp(), X[0])
    snapshot("idle_patterns", str(caught.value))


def test_modules_and_methods_reduce_where_a_value_is_computed() -> None:
    probe = eqx.nn.Linear(8, 3, key=jax.random.key(1))
    _, found = ek.capture(lambda model, x: model(x), {"layers[0]": probe, "layers[1]": probe.__call__})(mlp(), X[0])
    _, whole = ek.capture(lambda model, x: model(x), "layers[0]")(mlp(), X[0])
    np.testing.assert_allclose(found["layers[0]"], probe(whole["layers[0]"]), rtol=1e-6)
    assert found["layers[1]"].shape == (3,)


def test_one_path_may_be_given_as_it_is() -> None:
    score = lambda model, x: model(x)[0]
    _, found = ek.intermediates.gradients(score, "layers[1]")(mlp(), X[0])
    assert found["layers[1]"].shape == (8,)
