"""`typechecked` and other decorators: the innermost function is checked, or the decoration is refused."""

import contextlib
import functools
import importlib
import sys
import typing
from collections.abc import AsyncIterator, Generator, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import equikd as ek
from equikd.typing import Array, Float, Scope, ShapeError, dim, disabled, install_import_hook, shape, typechecked


def f(*sizes):
    return jnp.ones(sizes)


# What Python can take apart.


def test_methods_below_pythons_own_decorators():
    @typechecked
    class Model:
        def method(self, k: int, x: Float[Array, "n n"]) -> int:
            return k

        three = functools.partialmethod(method, 3)

        @functools.cached_property
        def gram(self) -> Float[Array, "n n"]:
            """Its doc."""
            return f(2, 3)

        @functools.cached_property
        def right(self) -> Float[Array, "n n"]:
            return f(2, 2)

        @functools.lru_cache(maxsize=7)  # noqa: B019
        def cached(self, k: int) -> Float[Array, "n n"]:
            return f(2, k)

        @staticmethod
        @functools.lru_cache
        def static(k: int) -> Float[Array, "n n"]:
            return f(2, k)

        @functools.singledispatchmethod
        def kind(self, x: object) -> str:
            return 1

        @kind.register
        def _(self, x: int) -> str:
            return 2

        @kind.register
        def _(self, x: str) -> str:
            return x

        @contextlib.contextmanager
        def opened(self, x: Float[Array, "n n"]) -> Iterator[int]:
            yield 1

    model = Model()
    assert (model.three(f(2, 2)), model.cached(2).shape, Model.static(2).shape) == (3, (2, 2), (2, 2))
    assert model.kind("a") == "a"
    assert model.right is model.right
    assert Model.cached.cache_parameters()["maxsize"] == 7
    assert Model.gram.__doc__ == "Its doc."
    with model.opened(f(2, 2)) as one:
        assert one == 1
    for refused in (
        lambda: model.three(f(2, 3)),
        lambda: model.gram,
        lambda: model.cached(3),
        lambda: model.cached("2"),
        lambda: Model.static(3),
        lambda: model.kind(1.0),
        lambda: model.kind(1),
        lambda: model.opened(f(2, 3)),
    ):
        with pytest.raises(ShapeError):
            refused()


def passes_on(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


TRANSFORMS = {
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "filter_vmap": eqx.filter_vmap(in_axes=(None, 0)),
    "filter_checkpoint": eqx.filter_checkpoint,
    "checkpoint": jax.checkpoint,
    "vmap": functools.partial(jax.vmap, in_axes=(None, 0)),
    "wraps": passes_on,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_method_below_a_transform_is_refused(name):
    class Model(eqx.Module):
        @TRANSFORMS[name]
        def __call__(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
            return x

    with pytest.raises(TypeError, match="wrapped by another decorator") as error:
        typechecked(Model)
    assert "put @ek.typechecked below that decorator" in str(error.value)
    assert "test_decorate.py" in str(error.value)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_method_that_is_checked_below_a_transform(name):
    @typechecked
    class Model(eqx.Module):
        @TRANSFORMS[name]
        @typechecked
        def __call__(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
            return x

        @TRANSFORMS[name]
        @typing.no_type_check
        def unchecked(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
            return x

        @TRANSFORMS[name]
        def unannotated(self, x):
            return x

    model = Model()
    mapped = "vmap" in name
    call = functools.partial(Model.__call__, model) if name != "jit" else lambda x: Model.__call__(Model(), x)
    good, bad = (f(4, 3), f(4, 3, 3)) if mapped else (f(3), f(3, 3))
    if name == "jit":
        return  # a module is no argument of it
    assert call(good).shape == good.shape
    with pytest.raises(ShapeError):
        call(bad)


@pytest.mark.parametrize("name", ["vmap", "filter_vmap", "checkpoint", "wraps"])
def test_a_function_below_a_transform_is_refused(name):
    def base(key, x: Float[Array, " n"]) -> Float[Array, " n"]:
        return x

    with pytest.raises(TypeError, match="base is wrapped by another decorator"):
        typechecked(TRANSFORMS[name](base))
    checked = TRANSFORMS[name](typechecked(base))
    assert typechecked(checked) is checked


@pytest.mark.parametrize("transform", [jax.jit, eqx.filter_jit, eqx.filter_checkpoint, jax.custom_jvp])
def test_a_function_below_what_keeps_shapes(transform):
    def base(x: Float[Array, " n"]) -> Float[Array, " n"]:
        return x

    with pytest.raises(ShapeError):
        typechecked(transform(base))(f(2, 2))


def test_a_new_wrapper_of_a_checked_function_is_no_checked_function():
    """`functools.wraps` copies what stands in the function's `__dict__`."""

    @typechecked
    def base(x: Float[Array, " n"]) -> Float[Array, " n"]:
        return x

    @functools.wraps(base)
    def outer(x: Float[Array, "n n"]) -> Float[Array, " n"]:
        return base(x[0])

    with pytest.raises(TypeError, match="wrapped by another decorator"):
        typechecked(outer)  # its own annotations are lost

    @functools.wraps(base, assigned=("__name__", "__qualname__", "__module__"))
    def kept(x: Float[Array, "n n"]) -> Float[Array, " n"]:
        return base(x[0])

    del kept.__wrapped__
    with pytest.raises(ShapeError):
        typechecked(kept)(f(2, 3))


def test_what_comes_from_elsewhere_is_left_alone():
    def function(x: Float[Array, " n"]) -> Float[Array, " n"]:
        return x

    @typechecked
    class Model:
        helper = staticmethod(jax.vmap(function))

    assert Model.helper(f(2, 3)).shape == (2, 3)


def test_not_callable():
    with pytest.raises(TypeError, match="None is not callable"):
        typechecked(None)


def test_records_are_refused():
    class Pair(typing.NamedTuple):
        x: Float[Array, " n"]

    class Batch(typing.TypedDict):
        x: Float[Array, " n"]

    for record in (Pair, Batch):
        with pytest.raises(TypeError, match="fields are not checked"):
            typechecked(record)


def test_the_hook_leaves_records_alone(tmp_path, monkeypatch):
    (tmp_path / "hooked_records.py").write_text(
        "import typing, functools, jax\nfrom jaxtyping import Array, Float\n"
        "class Pair(typing.NamedTuple):\n    x: Float[Array, 'n n']\n"
        "    def m(self, y: Float[Array, 'n n']): return 1\n"
        "class Model:\n    @functools.partial(jax.vmap, in_axes=(None, 0))\n"
        "    def v(self, x: Float[Array, 'n']): return x"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with install_import_hook("hooked_records"):
        module = importlib.import_module("hooked_records")
    monkeypatch.delitem(sys.modules, "hooked_records")
    pair = module.Pair(f(2, 3))
    assert pair.m(f(2, 2)) == 1
    with pytest.raises(ShapeError):
        pair.m(f(2, 3))
    assert module.Model.v(1, f(4, 3)).shape == (4, 3)
    with pytest.raises(ShapeError):
        module.Model.v(1, f(4, 3, 3))


# Generators.


def test_dim_in_a_generator_is_its_own():
    @typechecked
    def rows(x: Float[Array, " n"]) -> Generator[int, int, int]:
        got = yield dim("n")
        try:
            yield got + dim("n")
        except KeyError:
            yield dim("n") * 10
        finally:
            closed.append(dim("n"))
        return dim("n")

    @typechecked
    def outer(y: Float[Array, " n"]) -> list[int]:
        one, two = rows(f(3)), rows(f(4))
        sizes = [next(one), next(two), one.send(100), two.send(100), one.throw(KeyError), dim("n")]
        with pytest.raises(StopIteration) as end:
            next(one)
        two.close()
        return [*sizes, end.value.value, dim("n")]

    closed = []
    assert outer(f(5)) == [3, 4, 103, 104, 30, 5, 3, 5]
    assert closed == [3, 4]
    closed.clear()
    with disabled():
        assert outer(f(5)) == [3, 4, 103, 104, 30, 5, 3, 5]
    with pytest.raises(ShapeError, match="no checked call"):
        dim("n")


def test_dim_in_an_asynchronous_generator():
    import asyncio

    @typechecked
    async def rows(x: Float[Array, " n"]) -> AsyncIterator[int]:
        yield dim("n")
        await asyncio.sleep(0)
        yield dim("n")

    @typechecked
    async def outer(y: Float[Array, " n"]) -> list[int]:
        found = [size async for size in rows(f(3))]
        return [*found, *shape("n")]

    assert asyncio.run(outer(f(5))) == [3, 3, 5]
    with pytest.raises(ShapeError):
        rows(f(3, 3))


# Scopes, where the result decides which member of a union was meant.


def test_a_scope_learns_what_the_result_decides():
    @typechecked
    def either(x: Float[Array, " a"] | Float[Array, " b"], size: int) -> Float[Array, " a"]:
        return f(size)

    with Scope("a", "b") as scope:
        either(f(3), 4)  # as `a`, x would contradict the result
        assert scope.sizes == {"a": 4, "b": 3}
        assert "result of either" in scope.binders["a"]
        with pytest.raises(ShapeError):
            either(f(5), 6)
        assert scope.sizes == {"a": 4, "b": 3}
    with Scope("a", b=3) as scope:
        either(f(3), 4)
        assert scope.sizes == {"a": 4, "b": 3}
    with Scope("*s") as scope:

        @typechecked
        def groups(x: Float[Array, "*s"] | Float[Array, "*t"]) -> Float[Array, "*s"]:
            return f(4, 4)

        groups(f(3))
        assert scope.sizes == {"*s": (4, 4)}


def test_the_wrappers_of_the_library_hand_on_what_they_get():
    @typechecked
    class Total(ek.metrics.State):
        total: Float[Array, ""] = ek.metrics.sum_field()

        def compute(self) -> Float[Array, " n"]:
            return self.total

    with pytest.raises(ShapeError, match="result has 0 axes"):
        Total(jnp.ones(())).compute()

    @typechecked
    @ek.config.config
    class Own(ek.metrics.Metric):
        values: ek.KeyPath = "preds"

        def from_values(self, values: Float[Array, " n"]) -> Total:
            return Total(values.sum())

    assert Own().from_values(f(3)).total == 3
    with pytest.raises(ShapeError):
        Own().from_values(f(3, 3))
