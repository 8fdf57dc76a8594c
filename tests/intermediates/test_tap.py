"""Modules of any make can be tapped, and stay what they are."""

import abc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, jaxtyped

import equikd as ek

WIDTH = 4
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (3, WIDTH))


def call(model, *args, **kwargs):
    return model(*args, **kwargs)


def linear(seed=0):
    return eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(seed))


class Net(eqx.Module):
    """Two parts and a rule of how they are used."""

    one: Any
    other: Any = None
    rule: Callable[..., Any] = eqx.field(static=True, default=lambda self, x: self.other(self.one(x)))

    def __call__(self, *args):
        return self.rule(self, *args)


class Scores(eqx.Module):
    inner: eqx.nn.Linear

    def scores(self, x):
        return self.inner(x)


def test_functions_among_the_leaves_are_submodules(same):
    model = eqx.nn.MLP(WIDTH, WIDTH, 8, 2, activation=jax.nn.gelu, key=KEY)
    _, found = eqx.filter_jit(ek.capture(call, ["activation[0]", "layers[0]"]))(model, X[0])
    same(found["activation[0]"], eqx.filter_jit(jax.nn.gelu)(found["layers[0]"]))


def test_bound_methods_partials_and_jitted_functions_as_parts(same):
    for part in (
        Scores(linear()).scores,
        jax.tree_util.Partial(jnp.multiply, 2.0),
        eqx.filter_jit(jnp.sin),
        jax.jit(jnp.cos),
    ):
        model = Net(part, rule=lambda self, x: self.one(x))
        out, found = ek.capture(call, ["one"])(model, X[0])
        same((out, found["one"]), (out, out))
        same(out, model(X[0]))


@pytest.mark.parametrize("decorate", [eqx.filter_jit, eqx.filter_checkpoint, jax.named_scope("scope")])
def test_a_decorated_call(decorate, same):
    class Decorated(eqx.Module):
        inside: eqx.nn.Linear

        @decorate
        def __call__(self, x):
            return jnp.sin(self.inside(x))

    model = Net(Decorated(linear()), linear(1))
    out, found = eqx.filter_jit(ek.capture(call, ["one", "one.inside"]))(model, X[0])
    same(
        (out, found), eqx.filter_jit(lambda m, x: (m(x), {"one": m.one(x), "one.inside": m.one.inside(x)}))(model, X[0])
    )


def _registered():
    registry: dict[str, type] = {}

    class Base(eqx.Module):
        def __init_subclass__(cls, kind, **kwargs):
            registry[kind] = cls
            super().__init_subclass__(**kwargs)

    class Doubled(Base, kind="doubled"):
        def __call__(self, x):
            return 2 * x

    return Doubled(), registry


def test_a_registry_of_subclasses_sees_no_other_class(same):
    part, registry = _registered()
    _, found = ek.capture(call, ["one"])(Net(part, linear()), X[0])
    same(found["one"], 2 * X[0])
    assert registry == {"doubled": type(part)}


def test_generic_abstract_and_strict_classes(same):
    kind = TypeVar("kind")

    class Abstract(eqx.Module, Generic[kind], strict=True):
        scale: eqx.AbstractVar[float]

        @abc.abstractmethod
        def __call__(self, x): ...

    class Final(Abstract[int], strict=True):
        scale: float
        inner: eqx.nn.Linear

        def __call__(self, x):
            return self.scale * self.inner(x)

    model = Net(Final(2.0, linear()), linear(1))
    seen = []
    forward = lambda model, x: (seen.append(model.one), model(x))[1]
    _, found = ek.capture(forward, ["one", "one.inner"])(model, X[0])
    same(found, {"one": model.one(X[0]), "one.inner": model.one.inner(X[0])})
    assert isinstance(seen[0], Final)
    assert (seen[0].scale, type(seen[0]).__name__) == (2.0, "Final")


def test_calls_of_unusual_make(same):
    class Property(eqx.Module):
        inner: eqx.nn.Linear

        @property
        def __call__(self):
            return lambda x: 2 * self.inner(x)

    class Static(eqx.Module):
        @staticmethod
        def __call__(*args, **kwargs):
            return args[0] * kwargs["by"]

    model = Net(Property(linear()), Static(), lambda self, x: self.other(self.one(x), by=2))
    _, found = ek.capture(call, ["one", "one.inner", "other", "other.inputs['by']"])(model, X[0])
    inner = model.one.inner(X[0])
    same(found, {"one": 2 * inner, "one.inner": inner, "other": 4 * inner, "other.inputs['by']": 2})


def test_modules_with_checked_shapes(same):
    from beartype import beartype

    class Checked(eqx.Module):
        inner: eqx.nn.Linear

        @ek.typechecked
        def __call__(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
            return self.inner(x)

    @jaxtyped(typechecker=beartype)
    class Typed(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
            return self.inner(x)

    model = Net(Checked(linear()), Typed(linear(1)))
    out, found = ek.capture(call, ["one", "other", "one.inner", "other.inner"])(model, X[0])
    one = model.one(X[0])
    same((out, found), (out, {"one": one, "other": out, "one.inner": one, "other.inner": out}))
    with pytest.raises(Exception, match="x"):
        ek.capture(call, ["one"])(model, X)


def test_a_part_that_another_reads_the_weights_of(same):
    model = Net(linear(), rule=lambda self, x: self.one(x) @ self.one.weight + self.one.bias)
    out, found = ek.capture(call, ["one"])(model, X[0])
    same((out, found["one"]), (model(X[0]), model.one(X[0])))


def test_functions_stay_leaves():
    """Equinox keeps functions that say how to map beside those that compute; a tree with one more level breaks it."""
    mapped = eqx.filter_vmap(linear())
    model = Net(mapped, jnp.tanh)
    assert list(ek.intermediates.available(call, model, X)) == ["one", "one._fun", "other"]
    seen = []
    ek.capture(lambda model: seen.append((model.other, jax.tree.structure(model))) or model.other(X), ["other"])(model)
    assert seen[0][1] == jax.tree.structure(model)
    assert seen[0][0].__name__ == "tanh"
