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
from equikd.typing import Array, Bool, Float
from equikd.wiring import KeyPath

b_axis = {"b": st.sampled_from([3, 4])}
unit = lambda random, shape: random.random(shape)
params = st.just({"w": jax.ShapeDtypeStruct((3, 2), "float32")})

SHIPPED = [
    (ek.losses.SquaredError(preds="preds", targets="batch.y"), {}),
    (ek.losses.AbsoluteError(preds="preds", targets="batch.y"), {}),
    (ek.losses.Huber(preds="preds", targets="batch.y"), {}),
    (ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.y", label_smoothing=0.1), {}),
    (ek.losses.SigmoidBinaryCrossEntropy(logits="preds", labels="batch.y"), {}),
    (ek.losses.Focal(logits="preds", labels="batch.y"), {"values": {"labels": unit}}),
    (ek.losses.Cosine(preds="preds", targets="batch.y"), {}),
    (ek.losses.KLDivergence(logits="preds", targets="batch.y"), {"values": {"targets": unit}}),
    (ek.losses.Contrastive(queries="preds.a", keys="preds.b"), {}),
    (ek.losses.Value("preds"), {}),
    (ek.losses.ParameterL2(), {"shared": ["params"], "given": {"params": params}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "options"), SHIPPED, ids=lambda one: type(one).__name__)
def test_shipped_losses(loss, options):
    check_loss(loss, examples=2, **options)


def test_no_loss_is_left_out():
    classes = {one for one in vars(ek.losses).values() if isinstance(one, type) and issubclass(one, Loss)}
    assert classes - {Loss} == {type(loss) for loss, _ in SHIPPED}


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


def test_what_is_no_loss_is_told():
    with pytest.raises(DrawError, match="checks a loss"):
        check_loss(ek.metrics.Mean(values="preds"))
    with pytest.raises(DrawError, match="'y'"):
        check_loss(Coupled(), values={"y": unit})
