"""`Scope`: declared names are one size in all calls inside; `disabled`; `provenance`."""

import dataclasses
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from equikd.typing import (
    Array,
    Float,
    Int,
    Scope,
    ShapeError,
    check,
    declared,
    dim,
    disabled,
    provenance,
    shape,
    typechecked,
)


@typechecked
def model(x: Float[Array, "b d"]) -> Float[Array, "b k"]:
    return x[:, :2]


@typechecked
def loss(preds: Float[Array, "b k"], labels: Int[Array, " b"]) -> Float[Array, " b"]:
    return preds[:, 0]


def f(*sizes):
    return jnp.ones(sizes)


def test_declared_names_are_shared():
    with Scope("b") as scope:
        model(f(2, 3))
        loss(f(2, 5), jnp.ones(2, int))  # k is another size here
        assert scope.sizes == {"b": 2}
        assert "x of model" in scope.binders["b"]
        with pytest.raises(ShapeError, match="axis 'b' has two sizes, 2 and 3"):
            loss(f(3, 5), jnp.ones(3, int))
    loss(f(3, 5), jnp.ones(3, int))


def test_both_binders_are_named():
    with Scope("b"):
        model(f(2, 3))
        with pytest.raises(ShapeError) as error:
            loss(f(3, 5), jnp.ones(3, int))
    assert "x of model" in str(error.value)
    assert "loss" in str(error.value)
    assert "preds" in str(error.value)


def test_sizes_from_the_start():
    with Scope(b=2, k=5) as scope:
        loss(f(2, 5), jnp.ones(2, int))
        assert (dim("b"), shape("k b")) == (2, (5, 2))
        with pytest.raises(ShapeError, match=r"3 and 2|2 and 3"):
            model(f(3, 3))
    assert scope.sizes == {"b": 2, "k": 5}


def test_groups():
    with Scope("*s") as scope:
        check(f(2, 3, 4), Float[Array, "*s d"])
        assert scope.sizes == {"*s": (2, 3)}
        check(f(2, 3, 9), Float[Array, "*s d"])
        with pytest.raises(ShapeError, match=r"axes '\*s' differ"):
            check(f(3, 3, 9), Float[Array, "*s d"])


def test_a_refused_call_binds_nothing():
    with Scope("b") as scope:
        with pytest.raises(ShapeError):
            loss(f(3, 5), jnp.ones(2, int))
        assert scope.sizes == {}
        model(f(2, 3))


def test_a_result_may_bind():
    @typechecked
    def make(size: int) -> Float[Array, " b"]:
        return f(size)

    with Scope("b"):
        make(3)
        with pytest.raises(ShapeError):
            make(4)


def test_scopes_nest():
    with Scope("b", "d"):
        model(f(2, 3))
        with Scope("b"):
            model(f(4, 3))  # a b of its own, the outer d
            with pytest.raises(ShapeError, match="axis 'd'"):
                model(f(4, 9))
        with pytest.raises(ShapeError, match="axis 'b'"):
            model(f(4, 3))


def test_a_scope_reaches_into_dataclasses():
    @dataclasses.dataclass
    class Batch:
        x: Float[Array, "b d"]

    @typechecked
    def use(batch: Batch, d: Float[Array, " d"]) -> None: ...

    with Scope("b") as scope:
        use(Batch(f(2, 3)), f(9))  # d is the instance's own
        assert scope.sizes == {"b": 2}
        with pytest.raises(ShapeError, match="axis 'b'"):
            use(Batch(f(3, 3)), f(9))


def test_a_scope_can_be_entered_again_but_not_twice():
    scope = Scope("b")
    for size in (2, 3):
        with scope:
            model(f(size, 3))
    with scope, pytest.raises(RuntimeError, match="open already"):
        scope.__enter__()


def test_a_name_must_be_a_name():
    with pytest.raises(ValueError, match="not the name of an axis"):
        Scope("b d")


def test_another_thread_has_no_scope():
    sizes = []

    def work():
        model(f(7, 3))
        sizes.append(7)

    with Scope(b=2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert sizes == [7]


def test_dim_outside_of_a_call():
    with pytest.raises(ShapeError, match="no checked call is running"):
        dim("b")


def test_dim_of_an_unbound_name():
    @typechecked
    def g(batch: Float[Array, "batch d"]) -> int:
        return dim("bath")

    with pytest.raises(ShapeError, match=r"no argument has an axis 'bath'") as error:
        g(f(2, 3))
    assert "'batch'" in str(error.value)


def test_disabled():
    with disabled():
        assert model(f(2, 3, 4)).shape == (2, 2, 4)
        assert check("no array", Float[Array, " b"]) == "no array"
        with Scope(b=2):
            model(f(5, 5))
    with pytest.raises(ShapeError):
        model(f(2, 3, 4))


def test_provenance_is_for_the_call_made_inside():
    @typechecked
    def layer(x: Float[Array, "n n"]) -> None: ...

    @typechecked
    def outer(x: Float[Array, "b d"]) -> None:
        layer(x)

    sources = provenance({"x": "inputs.x = batch.image"})
    with sources, pytest.raises(ShapeError, match=r"from inputs\.x = batch\.image"):
        outer(f(2))
    with provenance({"x": "inputs.x = batch.image"}), pytest.raises(ShapeError) as error:
        outer(f(2, 3))  # refused in layer, whose x is another
    assert "inputs" not in str(error.value)
    with provenance({"x": "inputs.x = batch.image"}, model), pytest.raises(ShapeError) as error:
        outer(f(2))
    assert "inputs" not in str(error.value)
    with provenance({"x": "inputs.x = batch.image"}, model), pytest.raises(ShapeError, match="inputs"):
        model(f(2))


def test_provenance_of_an_object_that_is_called():
    class Model:
        @typechecked
        def __call__(self, x: Float[Array, "b d"]) -> None: ...

    for function in (Model(), Model().__call__, Model.__call__):
        with provenance({"x": "inputs.x"}, function), pytest.raises(ShapeError, match=r"from inputs\.x"):
            Model()(f(2))


# A scope of one function.


def test_a_scope_of_one_function_is_for_its_direct_calls():
    @typechecked
    def helper(x: Float[Array, "b d"]) -> int:
        return dim("b")

    @typechecked
    def outer(x: Float[Array, "b d"]) -> int:
        return helper(x.T)  # a b of its own

    with Scope(b=2, of=outer) as scope:
        assert outer(f(2, 3)) == 3
        assert helper(f(7, 3)) == 7  # another function
        check(f(9, 9), Float[Array, "b b"])
        with pytest.raises(ShapeError, match="that of the open Scope"):
            outer(f(4, 3))
    assert scope.sizes == {"b": 2}


def test_a_scope_of_one_function_learns_from_it_alone():
    with Scope("b", of=model) as scope:
        loss(f(5, 5), jnp.ones(5, int))
        assert scope.sizes == {}
        model(f(2, 3))
        assert scope.sizes == {"b": 2}
        assert "x of model" in scope.binders["b"]
        loss(f(5, 5), jnp.ones(5, int))
        with pytest.raises(ShapeError):
            model(f(3, 3))


def test_a_scope_of_one_function_is_not_for_its_recursion():
    @typechecked
    def rest(x: Float[Array, " b"]) -> int:
        return dim("b") + (rest(x[1:]) if x.shape[0] > 1 else 0)

    with Scope(b=3, of=rest):
        assert rest(f(3)) == 6
        with pytest.raises(ShapeError):
            rest(f(2))


def test_a_check_in_the_body_belongs_to_the_call_of_the_scope():
    @typechecked
    def body(x: Float[Array, " n"]) -> None:
        check(x, Float[Array, " b"])

    with Scope("b", of=body) as scope:
        body(f(4))
        assert scope.sizes == {"b": 4}
        with pytest.raises(ShapeError, match="axis 'b'"):
            body(f(5))


def test_scopes_of_functions_nest_with_others():
    with Scope("b") as outside:
        loss(f(3, 5), jnp.ones(3, int))
        with Scope("b", of=model):
            model(f(2, 3))  # its own b
            with pytest.raises(ShapeError):
                loss(f(2, 5), jnp.ones(2, int))  # that of the outer scope
    assert outside.sizes == {"b": 3}


def test_a_scope_of_an_object_or_a_method():
    class Loss:
        @typechecked
        def __call__(self, x: Float[Array, "b d"]) -> int:
            return loss(x[1:], jnp.ones(x.shape[0] - 1, int)).shape[0]

    one = Loss()
    for function in (one, one.__call__, Loss.__call__, jax.jit(one.__call__)):
        with Scope(b=4, of=function):
            assert one(f(4, 2)) == 3
            with pytest.raises(ShapeError):
                one(f(5, 2))


def test_a_scope_of_a_function_while_checks_are_off():
    @typechecked
    def helper(x: Float[Array, "b d"]) -> int:
        return dim("b")

    @typechecked
    def outer(x: Float[Array, "c d"]) -> tuple[int, int]:
        return dim("b"), helper(x)

    with Scope(b=2, of=outer), disabled():
        assert outer(f(4, 3)) == (2, 4)
    with Scope(b=2, of=outer):
        assert outer(f(4, 3)) == (2, 4)
        assert dim("b") == 2


def test_any_name_may_be_shared_and_groups_too():
    class Batch(NamedTuple):
        x: Float[Array, " of *n"]

    sizes = declared(Batch(jnp.ones((4, 2, 3))))
    assert sizes == {"of": 4, "*n": (2, 3)}
    with Scope(sizes=sizes) as scope:
        assert scope.sizes == sizes
        check(jnp.ones((2, 3)), Float[Array, "*n"])
        with pytest.raises(ShapeError, match="axes '\\*n' differ"):
            check(jnp.ones((2, 4)), Float[Array, "*n"])
