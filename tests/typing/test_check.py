"""`typechecked`: functions, methods, classes; tracers for floats; an off switch; beartype only when needed."""

import asyncio
import dataclasses
import functools
import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import equikd as ek
from equikd.typing import Array, Float, Scalar, ShapeError, dim, typechecked

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


def test_beartype_is_imported_when_it_is_first_needed():
    code = (
        "import sys, numpy as np; from equikd.typing import typechecked, Float\n"
        "@typechecked\n"
        "def f(x: int, y: float, z: Float[np.ndarray, 'b']) -> int:\n"
        "    return x\n"
        "@typechecked\n"
        "def g(x: type[int]): ...\n"
        "f(1, 1.0, np.ones(2))\n"
        "assert 'beartype' not in sys.modules\n"
        "g(int)\n"
        "assert 'beartype' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENV)
    assert done.returncode == 0, done.stderr


# Kinds of functions.


def test_static_and_class_methods_and_properties():
    class Model:
        size = 3

        @typechecked
        @staticmethod
        def double(x: Float[Array, " n"]) -> Float[Array, " n"]:
            return x * 2

        @typechecked
        @classmethod
        def fits(cls, x: Float[Array, " {cls.size}"]) -> bool:
            return True

        @typechecked
        @property
        def wrong(self) -> int:
            """A docstring."""
            return "no int"

    assert Model.double(jnp.ones(2)).shape == (2,)
    assert Model().fits(jnp.ones(3))
    assert Model.wrong.__doc__ == "A docstring."
    for refused in (lambda: Model.double(jnp.ones((2, 2))), lambda: Model.fits(jnp.ones(2)), lambda: Model().wrong):
        with pytest.raises(ShapeError):
            refused()


def test_self_in_an_axis():
    class Model:
        def __init__(self, dim):
            self.dim = dim

        @typechecked
        def __call__(self, x: Float[Array, "b {self.dim}"]) -> Float[Array, "b {self.dim}//2"]:
            return x[:, ::2]

    assert Model(4)(jnp.ones((2, 4))).shape == (2, 2)
    with pytest.raises(ShapeError, match=r"axis 1 of x is 4, and \{self.dim\} = 6"):
        Model(6)(jnp.ones((2, 4)))


def test_async_functions():
    @typechecked
    async def double(x: Float[Array, " n"], wrong: bool = False) -> Float[Array, " n"]:
        return x if not wrong else jnp.ones((dim("n"), 2))

    assert asyncio.run(double(jnp.ones(2))).shape == (2,)
    for call in (double(jnp.ones((2, 2))), double(jnp.ones(2), wrong=True)):
        with pytest.raises(ShapeError):
            asyncio.run(call)
    assert inspect.iscoroutinefunction(double)


def test_generators_are_checked_at_the_call():
    @typechecked
    def rows(x: Float[Array, "n d"]) -> Iterator[Float[Array, " d"]]:
        yield from x

    assert len(list(rows(jnp.ones((2, 3))))) == 2
    with pytest.raises(ShapeError):
        rows(jnp.ones(2))


def test_variadic_parameters():
    @typechecked
    def stack(*xs: Float[Array, " n"], **named: Float[Array, " n"]) -> None: ...

    stack(jnp.ones(2), jnp.ones(2), a=jnp.ones(2))
    for args, named, where in (((2, 3), {}, r"xs\[1\]"), ((2,), {"a": 3}, r"named\['a'\]")):
        with pytest.raises(ShapeError, match=where):
            stack(*map(jnp.ones, args), **{name: jnp.ones(size) for name, size in named.items()})


def test_a_wrong_call_is_the_functions_own_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
        matmul(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'v'"):
        matmul(jnp.ones((2, 3)), jnp.ones((3, 2)), v=1)
    with pytest.raises(TypeError, match="missing a required argument: 'w'"):
        matmul(jnp.ones(3))


def test_an_error_of_the_body_passes_as_it_is():
    @typechecked
    def broken(x: Float[Array, " n"]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        broken(jnp.ones(2))
    assert not getattr(error.value, "__notes__", [])


def test_annotations_for_type_checkers_alone():
    class Model:
        @typechecked
        def me(self, x: "NotThere", y: typing.TypeVar("T") = None) -> typing.Self:  # noqa: F821
            return self

    model = Model()
    assert model.me("anything") is model

    @typechecked
    def guard(x: object) -> typing.TypeGuard[int]:
        return isinstance(x, int)

    assert guard(1)


def test_checking_twice_checks_once():
    once = typechecked(lambda: None)
    assert typechecked(once) is once
    assert typechecked(matmul) is matmul

    @typing.no_type_check
    def unchecked(x: int): ...

    assert typechecked(unchecked) is unchecked


def test_local_annotations():
    class Local(typing.NamedTuple):
        x: Float[Array, " n"]
        y: Float[Array, " n"]

    @typechecked
    def f(pair: Local) -> None: ...

    with pytest.raises(ShapeError, match="axis 'n'"):
        f(Local(jnp.ones(2), jnp.ones(3)))


# Classes.


@typechecked
class Linear(eqx.Module):
    weight: Float[Array, "o i"]
    bias: Float[Array, " o"] | None
    scale: Float[Array, ""] = eqx.field(converter=jnp.asarray, default=1.0)

    def __call__(self, x: Float[Array, " i"]) -> Float[Array, " {self.weight.shape[0]}"]:
        return self.weight @ x * self.scale

    @staticmethod
    def zeros(size: int) -> Float[Array, " n"]:
        return jnp.zeros(size)


def test_modules():
    layer = Linear(jnp.ones((3, 2)), None, 2.0)
    assert layer(jnp.ones(2)).shape == (3,)
    assert jax.vmap(layer)(jnp.ones((5, 2))).shape == (5, 3)
    assert Linear.zeros(2).shape == (2,)
    with pytest.raises(ShapeError, match="axis 'o' has two sizes"):
        Linear(jnp.ones((3, 2)), jnp.ones(2))
    with pytest.raises(ShapeError, match="weight is None"):
        Linear(None, None)
    with pytest.raises(ShapeError, match="x has 2 axes"):
        layer(jnp.ones((5, 2)))
    jax.tree.map(lambda leaf: None, layer)  # rebuilding runs no constructor
    assert jax.grad(lambda layer: layer(jnp.ones(2)).sum())(layer).weight.shape == (3, 2)


def test_a_module_with_a_constructor_and_invariants():
    order = []

    @typechecked
    class Model(eqx.Module):
        w: Float[Array, "n n"]

        def __init__(self, size: int, wrong: bool = False):
            self.w = jnp.ones((size, size + wrong))

        def __check_init__(self):
            order.append(self.w.shape)

    Model(3)
    assert order == [(3, 3)]
    for arguments, where in (((3, True), "axis 'n' has two sizes"), (("3",), "size is '3', a str")):
        with pytest.raises(ShapeError, match=where):
            Model(*arguments)


def test_a_filtered_module_passes_an_annotation():
    """`None` is the hole that `eqx.partition` leaves."""

    @typechecked
    def loss(trained: Linear, rest: Linear, x: Float[Array, " i"]) -> Scalar:
        return eqx.combine(trained, rest)(x).sum()

    trained, rest = eqx.partition(Linear(jnp.ones((3, 2)), None), lambda leaf: leaf.ndim == 2)
    assert loss(trained, rest, jnp.ones(2)) == 6


def test_dataclass_defaults_and_inheritance():
    @typechecked
    @dataclasses.dataclass
    class Base:
        a: Float[Array, " n"]
        b: Float[Array, " n"] = None

    @dataclasses.dataclass
    class Derived(Base):
        c: int = 0

    assert Base(jnp.ones(2)).b is None  # its default is its own business
    assert Derived(jnp.ones(2)).c == 0
    with pytest.raises(ShapeError, match="c is 'x'"):
        typechecked(Derived)(jnp.ones(2), c="x")


def test_config_classes():
    @typechecked
    @ek.config.config
    class Opt:
        rate: float = 0.1
        steps: int = 3

        def at(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
            return x * self.rate

    assert Opt(rate=1).rate == 1.0
    assert jax.jit(lambda opt: opt.at(jnp.ones(2)))(Opt()).shape == (2,)
    with pytest.raises(ShapeError, match="x has 0 axes"):
        Opt().at(jnp.ones(()))


def test_other_callables():
    @typechecked
    @jax.jit
    def jitted(x: Float[Array, " n"]) -> Float[Array, " n"]:
        return x

    assert jitted(jnp.ones(2)).shape == (2,)
    with pytest.raises(ShapeError):
        jitted(jnp.ones((2, 2)))
    partial = typechecked(functools.partial(scaled, by=0.5))
    assert partial(jnp.ones(2)).shape == (2,)


def test_unhashable_annotations():
    @typechecked
    def f(x: typing.Annotated[int, []], y: typing.Annotated[Float[Array, " n"], []]) -> None: ...

    f(1, jnp.ones(2))
    for bad in (("1", jnp.ones(2)), (1, jnp.ones((2, 2)))):
        with pytest.raises(ShapeError):
            f(*bad)


@pytest.mark.parametrize(("text", "is_on"), [(word, False) for word in ("0", "false", "False", "0 ", "no", "off")]
                         + [(word, True) for word in ("1", "true", "TRUE", "", "yes", "on")])  # fmt: skip
def test_the_words_of_the_switch(monkeypatch, text, is_on):
    monkeypatch.setenv("EQUIKD_TYPECHECK", text)
    if is_on:
        with pytest.raises(ShapeError):
            scaled(jnp.ones((2, 2)), 0.5)
    else:
        scaled(jnp.ones((2, 2)), 0.5)


def test_another_word_of_the_switch(monkeypatch):
    monkeypatch.setenv("EQUIKD_TYPECHECK", "maybe")
    with pytest.raises(ValueError, match="EQUIKD_TYPECHECK='maybe' says neither on nor off"):
        scaled(jnp.ones(2), 0.5)


def test_names_of_a_call_are_known_to_jaxtyping_in_its_body():
    @typechecked
    async def waits(x: Float[Array, " n"]) -> bool:
        return isinstance(jnp.ones(3), Float[Array, " n"])

    @typechecked
    def plain(x: Float[Array, " n"]) -> bool:
        return isinstance(jnp.ones(3), Float[Array, " n"])

    assert (asyncio.run(waits(jnp.ones(3))), plain(jnp.ones(3))) == (True, True)
    assert (asyncio.run(waits(jnp.ones(7))), plain(jnp.ones(7))) == (False, False)
