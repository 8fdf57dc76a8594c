"""`ek.testing.arguments`: what is drawn fits, in every kind of container, and says what it is."""

import collections
import dataclasses
import enum
import inspect
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxtyping import BFloat16, Float32, Int8, Key

import equikd as ek
from equikd.testing import DrawError, arguments
from equikd.typing import Array, ArrayLike, Bool, Float, Inexact, Int, Num, PRNGKeyArray, PyTree, Scalar, Shaped, UInt

quick = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Pair(typing.NamedTuple):
    x: Float[Array, "a b"]
    y: Float[Array, " a"]


class Options(typing.TypedDict):
    x: Float[Array, "a b"]
    y: NotRequired[Int[Array, " b"]]


@dataclasses.dataclass
class Plain:
    """No pytree: `eval_shape` does not look into it."""

    w: Float[Array, "a b"]
    b: Float[Array, " b"]
    n: int = 3


class Weights(eqx.Module):
    w: Float[Array, "{self.dim} b"]
    b: Float[Array, " b"]
    inner: "Pair | None"
    dim: int = eqx.field(static=True)


class Tree(eqx.Module):
    value: Float[Array, " d"]
    rest: "Tree | None"


def flat(x: Float[Array, "b t d"], w: Float[Array, "d n"]): ...
def groups(x: Float[Array, "*b t d"], mask: Bool[Array, "*b t"], w: Float[Array, "d h"]): ...
def symbols(
    h: Int[Array, " h"], w: Float[Array, "h+1 2*h"], u: Num[Array, "h-1 n=3"], v: Float[Array, "1 min(h,2)"]
): ...
def alone(x: Float[Array, " 2*h"], y: Float[Array, " 2*h"]): ...
def broadcast(x: Float[Array, "*#b #t d"], y: Float[Array, "*#b t #d"], z: Float[Array, "#4"]): ...
def loose(x: Float[Array, "a _ ..."], y: Float[Array, "... a"], z: Shaped[Array, "*_"]): ...
def braces(x: Float[Array, "{n} d"], n: int, y: Float[Array, "d {n}+1 {p.x.shape[0]}"], p: Pair): ...
def families(
    a: Float[Array, " n"], b: Int[Array, " n"], c: UInt[Array, " n"], d: Bool[Array, " n"], e: Num[Array, " n"]
): ...
def more_families(a: Inexact[Array, " n"], b: Shaped[Array, " n"], c: Int8[Array, " n"], d: BFloat16[Array, " n"]): ...
def keys(k: PRNGKeyArray, several: Key[Array, " n"], key, x: Float[Array, " n"]): ...
def scalars(a: float, b: int, c: bool, d: str, e: complex, f: Scalar, g: None, x: Float[Array, " n"]): ...
def statics(a: Mode, b: Literal["p", 3], c: tuple[int, ...], d: dict[str, float], e: int | None, f: list[bool]): ...
def numpy_too(x: Float[np.ndarray, "a b"], y: Float[Array, " a"], z: Float[ArrayLike, " b"]): ...
def anything(x: Float[Any, "a b"], y: Float[Array, " a"]): ...
def optional(x: Float[Array, "a b"] | None, y: Int[Array, " a"] | Float[Array, "a b"] | float): ...
def lists(x: list[Float[Array, "a b"]], y: Sequence[Float[Array, " b"]], z: collections.deque[Float[Array, " a"]]): ...
def tuples(x: tuple[Float[Array, " a"], Int[Array, " b"]], y: tuple[Float[Array, "a b"], ...]): ...
def mappings(
    x: dict[str, Float[Array, "a b"]], y: Mapping[int, list[Float[Array, " a"]]], z: dict[Mode, Float[Array, " b"]]
): ...
def ordered(
    x: collections.OrderedDict[str, Float[Array, " a"]], y: collections.defaultdict[str, Float[Array, " a"]]
): ...
def typed(x: Options, y: Pair, z: Float[Array, " a"]): ...
def classes(x: Plain, y: Weights, z: Tree, a: Float[Array, " a"], b: Float[Array, " a"]): ...
def trees(
    x: PyTree[Float[Array, "?q b"], " T"], y: PyTree[Float[Array, " ?q"], " T"], z: PyTree[Float[Array, " b"]]
): ...
def composed(
    x: PyTree[Int[Array, ""], " S"],
    y: PyTree[Float[Array, " b"], " T"],
    z: PyTree[float, "S T"],
    u: PyTree[bool, "... T"],
    v: PyTree[bool, "T ..."],
): ...
def nested(x: dict[str, list[tuple[Pair, Options]]], y: list[Weights], z: Float[Array, "a b"]): ...
def variable(x: Float[Array, " a"], *xs: Float[Array, "a b"], y: Float[Array, " b"], **rest: Float[Array, " a"]): ...
def positional(x: Float[Array, " a"], /, y: Float[Array, " a"]): ...
def defaults(
    x: Float[Array, " a"], axis: int = -1, name: str = "same", f: Callable = abs, y: Float[Array, " a"] | None = None
): ...
def annotated(x: Annotated[Float[Array, " a"], "said of it"], y: Annotated[int, "too"], z: Float[Array, " a"]): ...


FUNCTIONS = [one for one in list(globals().values()) if inspect.isfunction(one) and one.__module__ == __name__]


def find(strategy):
    return hypothesis.find(strategy, lambda call: True, settings=quick)


@pytest.mark.parametrize("dtypes", ["usual", "all"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_what_is_drawn_fits(function, dtypes):
    checked, calls = ek.typechecked(function), 0

    @quick
    @given(arguments(function, dtypes=dtypes))
    def fits(call):
        nonlocal calls
        calls += 1
        call.eval_shape(checked)

    fits()
    assert calls >= 1


@pytest.mark.parametrize(
    "function", [flat, broadcast, families, keys, numpy_too, classes, nested], ids=lambda f: f.__name__
)
def test_values_on_request(function):
    checked = ek.typechecked(function)

    @settings(quick, max_examples=10)
    @given(arguments(function, values=True))
    def fits(call):
        checked(*call.args, **call.kwargs)
        assert not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((call.args, call.kwargs)))

    fits()


def test_shapes_are_the_default_and_nothing_is_computed(compilations):
    call = find(arguments(flat))
    assert all(isinstance(value, jax.ShapeDtypeStruct) for value in call.kwargs.values())
    compilations.clear()
    assert call.eval_shape(lambda x, w: x @ w).shape == (call.sizes["b"], call.sizes["t"], call.sizes["n"])
    assert compilations.names == []


def test_small_and_different_sizes_come_first():
    assert repr(find(arguments(flat))) == "flat(x=f32[1,2,3], w=f32[3,4])"


def test_all_members_and_dtypes_are_drawn():
    kinds, dtypes = set(), set()

    @settings(quick, max_examples=200)
    @given(arguments(optional, dtypes="all"))
    def collect(call):
        kinds.add((type(call.kwargs["x"]).__name__, type(call.kwargs["y"]).__name__))
        dtypes.add(str(getattr(call.kwargs["x"], "dtype", None)))

    collect()
    assert len(kinds) == 4
    assert dtypes >= {"float32", "bfloat16", "float16", "None"}


def test_a_size_can_be_equal_to_another():
    assert find(arguments(flat).filter(lambda call: call.sizes["t"] == call.sizes["d"]))


def test_axes_and_where():
    def heads(x: Float[Array, "t d"], heads: int, y: Float[Array, "*b d"]): ...

    @quick
    @given(
        arguments(
            heads,
            axes={"d": st.sampled_from([8, 16]), "heads": st.integers(1, 4), "*b": st.just((7,))},
            where=lambda d, heads: d % heads == 0,
        )
    )
    def fits(call):
        assert call.sizes["d"] in (8, 16)
        assert call.kwargs["heads"] in (1, 2, 4)
        assert call.kwargs["y"].shape == (7, call.sizes["d"])

    fits()


def test_given():
    def f(act: Callable, x: Float[Array, " d"], state: Any): ...

    state = {"mean": jax.ShapeDtypeStruct((3,), "float32"), "n": 2}
    call = find(arguments(f, given={"act": st.just(jnp.tanh), "state": st.just(state)}))
    assert call.kwargs["act"] is jnp.tanh
    assert repr(call) == "f(act=tanh, x=f32[1], state={'mean': f32[3], 'n': 2})"
    assert call.eval_shape(lambda act, x, state: act(state["mean"]) * state["n"]).shape == (3,)


def test_methods_read_their_instance():
    class Layer(eqx.Module):
        dim: int = eqx.field(static=True)

        def __call__(self, x: Float[Array, "b {self.dim}"]): ...

        def encode(self, x: Float[Array, " 2*{self.dim}"]): ...

    assert find(arguments(Layer(5))).kwargs["x"].shape == (1, 5)
    assert find(arguments(Layer(5).encode)).kwargs["x"].shape == (10,)
    assert "dim" in find(arguments(Layer)).kwargs
    with pytest.raises(DrawError, match="needs its instance"):
        arguments(Layer.encode)


def test_positional_and_variable_arguments():
    call = find(arguments(positional))
    assert [len(call.args), list(call.kwargs)] == [1, ["y"]]
    call = hypothesis.find(arguments(variable), lambda call: len(call.args) == 3, settings=quick)
    assert call.args[1].shape == call.args[2].shape == (call.sizes["a"], call.sizes["b"])


def test_a_default_that_means_something_is_kept():
    @quick
    @given(arguments(defaults))
    def keeps(call):
        assert (call.kwargs["axis"], call.kwargs["name"], call.kwargs["f"]) == (-1, "same", abs)

    keeps()


@pytest.mark.parametrize(
    ("name", "draw"),
    {
        "unsupported": lambda: find(arguments(_unsupported)),
        "unsupported_field": lambda: find(arguments(_unsupported_field)),
        "two_unknowns": lambda: find(arguments(_two_unknowns)),
        "unknown_axis": lambda: arguments(flat, axes={"dd": st.just(1)}),
        "unknown_where": lambda: arguments(flat, where=lambda bb: True),
        "unknown_given": lambda: arguments(flat, given={"weight": st.just(1)}),
    }.items(),
)
def test_messages(name, draw, snapshot):
    with pytest.raises(DrawError) as caught:
        draw()
    snapshot(name, str(caught.value))


def _unsupported(x: Float[Array, " n"], layer: eqx.nn.Linear, act: Callable[[int], int], raw: jax.Array, bare): ...


class _Odd(eqx.Module):
    w: Float[Array, " n"]
    act: Callable


def _unsupported_field(models: tuple[_Odd, int]): ...


def _two_unknowns(x: Float[Array, " a*b"]): ...


def test_the_time_of_an_example(record_property):
    times = []

    @settings(quick, max_examples=50)
    @given(arguments(flat))
    def timed(call):
        start = time.perf_counter()
        call.eval_shape(lambda x, w: x @ w)
        times.append(time.perf_counter() - start)

    timed()
    record_property("median_ms", 1e3 * float(np.median(times)))


def test_float32_alone():
    def f(x: Float32[Array, " n"]): ...

    assert find(arguments(f, dtypes="all")).kwargs["x"].dtype == jnp.float32
