"""`check_loss` on the shipped losses, and on losses that break one law each."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

import equikd as ek
from equikd.config import config
from equikd.losses import Loss
from equikd.testing import DrawError
from equikd.testing._losses import check_loss
from equikd.typing import Array, Bool, Float, Num
from equikd.wiring import KeyPath

b_axis = {"b": st.sampled_from([3, 4])}
unit = lambda random, shape: random.random(shape)


def test_a_class_is_drawn():
    check_loss(ek.losses.SquaredError, axes=b_axis, examples=1)


@config
class OfRows(Loss):
    x: KeyPath = "preds"


@config
class SubtractsTheMean(OfRows):
    """Couples the rows, and does not say so."""

    def values(self, x: Float[Array, " b"]) -> Float[Array, " b"]:
        return (x - x.mean()) ** 2


@config
class Coupled(OfRows):
    """Couples the rows that count, and says so."""

    depends_on = "batch"

    def values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Float[Array, " b"]:
        return (x - jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1)) ** 2


@config
class CoupledToPadding(OfRows):
    depends_on = "batch"

    def values(self, x: Float[Array, " b"]) -> Float[Array, " b"]:
        return (x - x.mean()) ** 2


@config
class SteepAtZero(OfRows):
    """0 / 0 in the gradient of |x|, written as a root."""

    def values(self, x: Float[Array, " b"]) -> Float[Array, " b"]:
        return jnp.sqrt(x * x)


@config
class StopsNothing(OfRows):
    """A gradient that depends on the number of rows in the batch, padding included."""

    def values(self, x: Float[Array, " b"]) -> Float[Array, " b"]:
        still = jax.lax.stop_gradient(x)
        return still + (x - still) * x.shape[0]


@config
class DividesByItsOwnRows(OfRows):
    """A gradient that depends on how many rows of this batch count, as a mean inside of `values` would."""

    def values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Float[Array, " b"]:
        still = jax.lax.stop_gradient(x)
        return still + (x - still) * mask.sum()


@config
class DividesByNone(OfRows):
    """0 * nan in the gradient by what all rows share, where a batch holds no row that counts."""

    scale: KeyPath = "params"

    def values(self, x: Float[Array, " b"], scale: Float[Array, ""], mask: Bool[Array, " b"]) -> Float[Array, " b"]:
        return x * scale * (mask.sum() / mask.sum())


@config
class WeighsByPosition(OfRows):
    def values(self, x: Float[Array, " b"]) -> Float[Array, " b"]:
        return x * x * jnp.arange(1.0, 1 + x.shape[0])


@pytest.mark.parametrize(
    ("loss", "law"),
    [
        (SubtractsTheMean, r"masked rows count|of\(a \+\+ b\) is not of\(a\) \| of\(b\)|rows of padding change"),
        (CoupledToPadding, "masked rows count|rows of padding change|not that of the rows that count"),
        (SteepAtZero, "the gradient by x is not finite"),
        (StopsNothing, "the gradient by x is not that of the rows that count alone"),
        (DividesByItsOwnRows, "the gradient by x, added over micro-batches, is not that of the whole"),
        (DividesByNone, "the gradient by scale(, added over micro-batches,)? is not"),
        (WeighsByPosition, r"masked rows count|of\(a \+\+ b\) is not of\(a\) \| of\(b\)"),
    ],
)
def test_a_broken_law_is_found(loss, law):
    options = {"values": {"x": lambda random, shape: random.integers(0, 2, shape)}} if loss is SteepAtZero else {}
    with pytest.raises(AssertionError, match=law) as caught:
        check_loss(loss(), axes=b_axis, examples=4, **options)
    assert f"{loss.__name__}.values" in str(caught.value)
    assert "mask=[" in str(caught.value)


def test_a_loss_that_couples_the_rows_that_count_and_says_so():
    check_loss(Coupled(), axes=b_axis, examples=3)


@pytest.mark.slow
def test_floats_and_ints_in_turn():
    """Programs are compiled for the arrays by which gradients are taken, floats alone."""

    @config
    class Squares(OfRows):
        def values(self, x: Num[Array, " b"]) -> Float[Array, " b"]:
            seen.add(jnp.issubdtype(x.dtype, jnp.floating))
            return x.astype(jnp.float32) ** 2

    seen = set()
    check_loss(Squares(), axes=b_axis, examples=6)
    assert seen == {True, False}


def test_what_is_no_loss_is_told():
    with pytest.raises(DrawError, match="checks a loss"):
        check_loss(ek.metrics.Mean(values="preds"))
    with pytest.raises(DrawError, match="'y'"):
        check_loss(Coupled(), values={"y": unit})
