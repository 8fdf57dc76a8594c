"""Which member of a union is meant: found wherever there is an answer, and said where there is none."""

import itertools

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equikd.typing import Array, Bool, Float, Int, Integer, Num, PyTree, ShapeError, dim, typechecked

A, B, C = Float[Array, " a"], Float[Array, " b"], Float[Array, " c"]


def f(*sizes):
    return jnp.ones(sizes)


def test_alternatives_inside_of_a_member():
    @typechecked
    def g(x: tuple[A | B, A] | tuple[A, C], y: A) -> None: ...

    g((f(3), f(2)), f(2))  # x[0] is a `b`
    g((f(3), f(2)), f(3))  # x[1] is a `c`
    with pytest.raises(ShapeError):
        g((f(3), f(2)), f(4))


def test_alternatives_in_a_list():
    @typechecked
    def g(x: list[A | B], y: A, z: B) -> None: ...

    for count in (1, 9, 100):
        g([f(3)] * count + [f(2)] * count, f(2), f(3))
        g([f(3), f(2)] * count, f(2), f(3))
        with pytest.raises(ShapeError):
            g([f(3)] * count + [f(4)], f(2), f(3))


@given(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4), st.integers(2, 4), st.integers(2, 4))
def test_the_search_finds_what_trying_everything_finds(sizes, a, b):
    @typechecked
    def g(x: list[A | tuple[A, B] | B], y: A, z: B) -> None: ...

    fits = all(size in (a, b) for size in sizes)
    values = [f(size) for size in sizes]
    if fits:
        g(values, f(a), f(b))
    else:
        with pytest.raises(ShapeError):
            g(values, f(a), f(b))


def test_arguments_that_choose_together():
    @typechecked
    def g(x: A | B | C, y: A | B | C, z: A | B | C, p: A, q: B, r: C) -> tuple[int, ...]:
        return dim("a"), dim("b"), dim("c")

    for sizes in itertools.permutations((2, 3, 4)):
        assert g(f(2), f(3), f(4), *map(f, sizes)) == sizes


def test_leaves_with_names_of_their_own():
    @typechecked
    def g(
        x: PyTree[Float[Array, " ?a"] | Float[Array, " ?b"], " T"],
        y: PyTree[Float[Array, " ?a"], " T"],
        z: PyTree[Float[Array, " ?b"], " T"],
    ) -> None: ...

    g([f(2), f(2)], [f(2), f(3)], [f(3), f(2)])


def test_a_search_that_gives_up_says_so():
    @typechecked
    def g(x: list[Float[Array, "_ ..."] | Float[Array, "... _"]], y: A, z: A) -> None: ...

    with pytest.raises(ShapeError, match="500 other choices of members of unions do not fit, and there are more"):
        g([f(size) for size in range(3, 30)], f(1), f(2))
    with pytest.raises(ShapeError) as error:
        g([f(3), f(4)], f(1), f(2))
    assert "there are more" not in str(error.value)


@typechecked
def listed(xs: list[Float[Array, "a b"] | Float[Array, "c d"]]) -> None: ...


def test_the_message_marks_the_item_that_fits_no_member():
    values = [f(2, 3)] * 600 + [f(3, 4)] * 399 + [f(5, 6)]
    with pytest.raises(ShapeError) as error:
        listed(values)
    marked = [line for line in str(error.value).splitlines() if line.lstrip().startswith(">")]
    assert [line.split()[1] for line in marked] == ["xs[999]"]
    assert "two sizes, 2 and 5" in str(error.value) or "two sizes, 3 and 5" in str(error.value)


@typechecked
def loss(
    preds: Float[Array, "b *n classes"],
    labels: Integer[Array, "b *n"] | Num[Array, "b *n classes"] | Bool[Array, "b *n classes"],  # noqa: F821
) -> None: ...


def test_the_message_shows_all_members_and_the_dtype_that_would_fit(snapshot):
    with pytest.raises(ShapeError) as error:
        loss(f(4, 10), f(4))
    snapshot("labels", str(error.value))
    assert "labels.astype('int32')" in str(error.value)
    assert 'Integer[Array, "b *n"] | Num[Array, "b *n classes"] | Bool' in str(error.value)


def test_the_message_shows_all_members_where_one_fits_by_its_dtype(snapshot):
    @typechecked
    def g(x: Float[Array, "b d"], y: Int[Array, " b"] | Float[Array, "b d"]) -> None: ...

    with pytest.raises(ShapeError) as error:
        g(f(2, 3), jnp.ones(3, int))
    snapshot("one_member", str(error.value))
    assert 'Int[Array, "b"] | Float[Array, "b d"]' in str(error.value)


def test_broadcasting_groups_blame_who_disagrees_with_all(snapshot):
    @typechecked
    def g(x: Float[Array, "*#b d"], y: Float[Array, "*#b d"]) -> Float[Array, "*b d"]:
        return x

    with pytest.raises(ShapeError) as error:
        g(f(1, 3, 4), f(5, 1, 4))
    snapshot("broadcasting", str(error.value))
    marked = [line for line in str(error.value).splitlines() if line.lstrip().startswith(">")]
    assert [line.split()[1] for line in marked] == ["result"]
    assert g(f(5, 3, 4), f(5, 1, 4)).shape == (5, 3, 4)
