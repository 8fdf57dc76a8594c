"""Annotations that are strings: each is evaluated for itself. This file has none of Python's later evaluation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import equinox as eqx
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

from equikd.typing import ShapeError, check, typechecked

if TYPE_CHECKING:
    from somewhere import Optimizer


def f(*sizes):
    return jnp.ones(sizes)


@typechecked
def step(opt: Optimizer, x: Float[Array, "n n"]) -> Float[Array, " n"]:
    return x


def test_one_name_that_is_not_there_costs_no_other_its_check():
    with pytest.raises(ShapeError, match="x has 1 axis"):
        step(None, f(2))
    with pytest.raises(ShapeError, match="result has 2 axes"):
        step(None, f(2, 2))


@typechecked
class Model(eqx.Module):
    opt: Optimizer
    x: Float[Array, "n n"]


@dataclasses.dataclass
class Batch:
    opt: Optimizer | None
    x: Float[Array, "n n"]


class Pair(NamedTuple):
    opt: Optimizer
    x: Float[Array, "n n"]


class Dict(TypedDict):
    opt: Optimizer
    x: Float[Array, "n n"]


@dataclasses.dataclass
class Derived(Batch):
    y: Optimizer = None


def test_fields_of_classes():
    @typechecked
    def takes(batch: Batch) -> int:
        return 1

    assert Model(1, f(2, 2)).opt == 1
    assert takes(Batch(1, f(2, 2))) == 1
    for refused in (
        lambda: Model(1, f(2, 3)),
        lambda: takes(Batch(1, "no")),
        lambda: check(Batch(1, f(2, 3)), Batch),
        lambda: check(Derived(1, f(2, 3)), Derived),
        lambda: check(Pair(1, f(2, 3)), Pair),
        lambda: check({"opt": 1, "x": f(2, 3)}, Dict),
    ):
        with pytest.raises(ShapeError):
            refused()


def test_names_of_a_function():
    class Local:
        pass

    @typechecked
    def g(x: Local, y: Float[Array, "n n"]) -> Local:
        return x

    g(Local(), f(2, 2))
    with pytest.raises(ShapeError):
        g(Local(), f(2, 3))


def test_names_that_a_function_closes_over():
    class Local:
        pass

    @typechecked
    def g(x: Local) -> object:
        return Local

    g(Local())
    with pytest.raises(ShapeError, match="says Local"):
        g(3)


@typechecked
class Abstract(eqx.Module):
    d: eqx.AbstractVar[Float[Array, " n"]]


@typechecked
class Concrete(Abstract):
    d: Float[Array, " n"]


def test_abstract_variables_are_no_fields():
    @typechecked
    def takes(x: Abstract) -> int:
        return 1

    assert takes(Concrete(f(2))) == 1
    with pytest.raises(ShapeError, match="Concrete: d has 2 axes"):
        Concrete(f(2, 3))
    with pytest.raises(ShapeError):
        takes(3)
