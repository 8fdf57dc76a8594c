"""`ek.testing.check_shapes` on what the library ships, on masks and keys, and on sizes that results cannot have."""

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from jaxtyping import UInt32, jaxtyped

import equikd as ek
from equikd.config import config
from equikd.testing import DrawError, arguments, check_shapes, violations
from equikd.typing import Array, Bool, Float, Int, PRNGKeyArray
from equikd.wiring import KeyPath, key_paths

quick = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def concrete(module, base):
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, base)]
    return [one for one in found if not one.__abstractmethods__]


SHIPPED = [*concrete(ek.losses, ek.losses.Loss), *concrete(ek.metrics, ek.metrics.Metric)]
SHIPPED.remove(ek.losses.ParameterL2)  # it takes any tree, so it has no shape rules
AXES = {ek.metrics.SSIM: {"h": st.integers(11, 13), "w": st.integers(11, 13)}}  # a window has to fit in


@pytest.mark.slow
@pytest.mark.parametrize("cls", SHIPPED)
def test_every_loss_and_metric_as_a_class(cls):
    check_shapes(cls, axes=AXES.get(cls))


@pytest.mark.slow
@pytest.mark.parametrize("cls", SHIPPED)
def test_every_loss_and_metric_as_an_instance(cls):
    instance = find(ek.testing.configs(cls), lambda one: True)
    assert set(key_paths(instance)) - {"mask"}
    check_shapes(instance, axes=AXES.get(cls))
    method = instance.values if isinstance(instance, ek.losses.Loss) else instance.from_values
    check_shapes(method, axes=AXES.get(cls))


def test_all_are_found():
    assert {ek.losses.SquaredError, ek.losses.SoftmaxCrossEntropy, ek.metrics.Mean, ek.metrics.Accuracy} <= {*SHIPPED}


@config
class Rows(ek.metrics.Metric):
    """Masks that annotations say in several ways."""

    x: KeyPath


@config
class Named(Rows):
    def from_values(self, x: Float[Array, " b *n"], mask: Bool[Array, " b *n"]) -> ek.metrics.Average:
        return ek.metrics.Average.of(x, mask)


@config
class Grouped(Rows):
    def from_values(self, x: Float[Array, "*m d"], mask: Bool[Array, "*m"]) -> ek.metrics.Average:
        return ek.metrics.Average.of(x, mask)


@config
class Unsaid(Rows):
    def from_values(self, x: Float[Array, " b *n"], mask) -> ek.metrics.Average:
        return ek.metrics.Average.of(x, mask)


@config
class Loose(Rows):
    def from_values(self, x: Float[Array, " b *n"], mask: Array) -> ek.metrics.Average:
        return ek.metrics.Average.of(x, mask)


@config
class Optional(Rows):
    def from_values(self, x: Float[Array, " b *n"], mask: Bool[Array, "b ..."] | None = None) -> ek.metrics.Average:
        return ek.metrics.Average.of(x, mask)


@config
class Tokens(Rows):
    def from_values(self, x: Float[Array, "b t d"], mask: Bool[Array, "b t"]) -> ek.metrics.Average:
        return ek.metrics.Average.of(x, mask)


def masks(cls, **options):
    """All pairs of shapes that are drawn."""
    found = set()

    @quick
    @given(arguments(cls(x="preds").from_values, **options))
    def collect(call):
        mask = call.kwargs["mask"]
        found.add((call.kwargs["x"].shape, None if mask is None else mask.shape))

    collect()
    return found


@pytest.mark.parametrize("cls", [Named, Grouped, Unsaid, Loose, Optional])
def test_a_mask_has_one_bool_for_each_row(cls):
    found = masks(cls)
    assert {mask for _, mask in found} - {None}
    assert all(mask is None or mask == x[:1] for x, mask in found)
    check_shapes(cls, examples=20)


def test_a_mask_whose_annotation_says_its_axes_has_these():
    assert all(mask == x[:2] for x, mask in masks(Tokens))
    check_shapes(Tokens, examples=20)


def test_another_mask_can_be_given():
    found = masks(Named, axes={"*n": st.just((2, 3))})
    assert found
    assert all(mask == x and x[1:] == (2, 3) for x, mask in found)
    found = masks(Unsaid, given={"mask": st.just(jax.ShapeDtypeStruct((7, 1), bool))})
    assert {mask for _, mask in found} == {(7, 1)}


def test_a_mask_elsewhere_is_as_annotated():
    @ek.typechecked
    def masked(x: Float[Array, " b *n"], mask: Bool[Array, "b ..."]) -> Float[Array, " b *n"]:
        return x

    assert find(arguments(masked), lambda call: call.kwargs["mask"].ndim == 2)


# Jitted methods


class Jitted(eqx.Module):
    dim: int = eqx.field(static=True)

    @eqx.filter_jit
    @ek.typechecked
    def __call__(self, x: Float[Array, "t {self.dim}"]) -> Float[Array, "t {self.dim}"]:
        return x

    @eqx.filter_jit
    @ek.typechecked
    def twice(self, x: Float[Array, "t {self.dim}"]) -> Float[Array, "t 2*{self.dim}"]:
        return jnp.concatenate([x, x], axis=1)

    @eqx.filter_jit
    @ek.typechecked
    def wrong(self, x: Float[Array, "t {self.dim}"]) -> Float[Array, "t 3*{self.dim}"]:
        return jnp.concatenate([x, x], axis=1)

    @staticmethod
    @ek.typechecked
    def still(x: Float[Array, "t t"]) -> Float[Array, " t"]:
        return x[0]

    @classmethod
    @ek.typechecked
    def made(cls, x: Float[Array, "t t"]) -> Float[Array, " t"]:
        return x[0]


@pytest.mark.parametrize("method", [None, "twice", "still", "made"])
def test_jitted_static_and_class_methods_of_a_class(method):
    check_shapes(Jitted, method=method, examples=20)
    check_shapes(Jitted(4), method=method, examples=20)


def test_jitted_methods_that_are_wrong_or_bound():
    check_shapes(Jitted(4).twice, examples=20)
    for target, method in ((Jitted, "wrong"), (Jitted(4), "wrong"), (Jitted(4).wrong, None)):
        with pytest.raises(AssertionError, match="the result does not fit"):
            check_shapes(target, method=method, examples=20)


def test_a_decorator_through_which_annotations_say_nothing_is_told():
    @jax.vmap
    def mapped(x: Float[Array, " d"]) -> Float[Array, ""]:
        return x.sum()

    with pytest.raises(DrawError, match="wrapped by another decorator"):
        check_shapes(mapped)


# Keys


@ek.typechecked
def noise(x: Float[Array, "b d"], rng: PRNGKeyArray) -> Float[Array, "b d"]:
    return x * jax.random.normal(rng, x.shape)


def dtypes_of_keys(**options):
    found = set()

    @quick
    @given(arguments(noise, **options))
    def collect(call):
        found.add((str(call.kwargs["rng"].dtype), call.kwargs["rng"].shape))

    collect()
    return found


def test_keys_of_any_name_are_typed_and_raw_ones_drawn_on_request():
    typed = (str(jax.random.key(0).dtype), ())
    assert dtypes_of_keys() == {typed}
    assert dtypes_of_keys(dtypes="all") == {typed, ("uint32", jax.random.PRNGKey(0).shape)}
    check_shapes(noise)
    check_shapes(noise, dtypes="all")


def test_a_raw_key_alone_is_drawn_as_annotated():
    @ek.typechecked
    def raw(x: Float[Array, " d"], key: UInt32[Array, "2"]) -> Float[Array, " d"]:
        return x * jax.random.normal(key, x.shape)

    check_shapes(raw, examples=20)


# Sizes that a result cannot have


@ek.typechecked
def without_first(x: Float[Array, "t d"], k: int) -> Float[Array, "t-{k} d"]:
    return x[k:]


@ek.typechecked
def convolve(x: Float[Array, " t"], w: Float[Array, " k"]) -> Float[Array, " t-k+1"]:
    return jnp.convolve(x, w, mode="valid")


@ek.typechecked
def halves(x: Float[Array, " t"]) -> tuple[Float[Array, " t/2"], Float[Array, " t/2"]] | Int[Array, " t/2"]:
    return x[::2], x[1::2]


@pytest.mark.parametrize("function", [without_first, convolve, halves])
def test_calls_whose_result_has_no_size_are_not_drawn(function):
    check_shapes(function)


def test_a_result_that_never_has_a_size_is_told():
    @ek.typechecked
    def never(x: Float[Array, " t"]) -> Float[Array, " t-7"]:
        return x

    with pytest.raises(DrawError, match="no arguments can be drawn"):
        check_shapes(never)


@ek.typechecked
def forgets_nothing(x: Float[Array, "t d"]) -> Float[Array, "t d"]:
    return x if x.shape[0] != 0 else jnp.ones((1, x.shape[1]))


def test_no_size_is_0_unless_asked_for():
    check_shapes(forgets_nothing)
    with pytest.raises(AssertionError, match=r"forgets_nothing\(x=f32\[0,1\]\): the result"):
        check_shapes(forgets_nothing, axes={"t": st.integers(0, 3)})
    options = {"settings": settings(quick, max_examples=300)}
    empty = lambda call: call.sizes["t"] == call.kwargs["k"]
    with pytest.raises(NoSuchExample):
        find(arguments(without_first), empty, **options)
    assert find(arguments(without_first, axes={"t": st.integers(0, 3)}), empty, **options)


# Options


UNKNOWN = {
    "kind": lambda: violations(noise, kinds=["axs"]),
    "second_kind": lambda: violations(noise, kinds=["rank", "dtypes"]),
    "dtypes_of_violations": lambda: violations(noise, dtypes="al"),
    "dtypes_of_arguments": lambda: arguments(noise, dtypes="al"),
    "dtypes_of_checks": lambda: check_shapes(noise, dtypes="al"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_choice_is_told_with_the_nearest(name):
    with pytest.raises(DrawError) as caught:
        UNKNOWN[name]()
    assert "there is no" in str(caught.value)
    assert "nearest:" in str(caught.value)


def test_one_kind_is_a_text():
    assert hypothesis.find(violations(forgets_nothing, kinds="rank"), lambda call: True).kind == "rank"


@jaxtyped(typechecker=None)
def stock(x: Float[Array, "a b"], y: Float[Array, " b"]) -> Float[Array, " b"]:
    return x @ y


def test_the_result_of_a_function_in_jaxtyped_is_checked():
    with pytest.raises(AssertionError, match="the result does not fit its annotation"):
        check_shapes(stock)
