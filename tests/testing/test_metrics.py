"""`check_metric` on sound metrics, and on metrics that break one law each."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import equikd as ek
from equikd.config import config
from equikd.metrics import Average, Metric, State, max_field, min_field, state_field, sum_field
from equikd.metrics._rows import Rows
from equikd.metrics._state import concat_field, truncate_field
from equikd.metrics._sums import TwoFloat, exact_sum
from equikd.testing import DrawError
from equikd.testing._metrics import check_metric
from equikd.typing import Array, Bool, Float, Int
from equikd.wiring import KeyPath

b_axis = {"b": st.sampled_from([3, 4])}


@config
class OfRows(Metric):
    x: KeyPath = "preds"


class Everything(State):
    total: TwoFloat = sum_field(exact=True)
    low: Float[Array, ""] = min_field()
    high: Float[Array, ""] = max_field()
    first: Rows = truncate_field(2)
    rows: Rows = concat_field()
    average: Average = state_field()

    def compute(self):
        first = jnp.where(self.first.valid, self.first.values, 0).sum()
        rows = jnp.where(self.rows.valid, self.rows.values, 0)
        squares = (rows * rows).sum()
        return {"total": self.total.value, "range": self.high - self.low, "first": first, "squares": squares}


@config
class Sound(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Everything:
        low = jnp.where(mask, x, jnp.inf).min(initial=jnp.inf)
        high = jnp.where(mask, x, -jnp.inf).max(initial=-jnp.inf)
        return Everything(exact_sum(x, mask), low, high, Rows(x, mask), Rows(x, mask), Average.of(x, mask))


@pytest.mark.slow
def test_a_state_with_all_kinds_of_fields_is_sound():
    check_metric(Sound(), axes=b_axis, examples=2)


class Total(State):
    value: Float[Array, ""] = sum_field()

    def compute(self):
        return self.value


@config
class MultipliesByMask(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Total:
        keep = mask.astype(x.dtype)  # in one operation, XLA makes a `where` of it
        return Total((x * keep).sum())


@config
class IgnoresMask(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Total:
        return Total(x.sum())


class MeanOfMeans(State):
    value: Float[Array, ""] = sum_field()
    batches: Int[Array, ""] = sum_field()

    def compute(self):
        return self.value / self.batches


@config
class AveragesBatches(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> MeanOfMeans:
        mean = jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1)
        return MeanOfMeans(mean, mask.any().astype(jnp.int32))


@config
class CountsEmptyBatches(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Total:
        return Total(jnp.where(mask, x, 0).sum() + (~mask.any()))


@config
class WeighsByPosition(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Total:
        return Total(jnp.where(mask, x * jnp.arange(1, 1 + x.shape[0]), 0).sum())


class Reflected(State):
    """Sums where a minimum is meant: the identity is not that of what is computed."""

    low: Float[Array, ""] = sum_field()

    def compute(self):
        return jnp.where(self.low == 0, jnp.inf, self.low)


@config
class SumsMinima(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Reflected:
        return Reflected(jnp.where(mask, x, jnp.inf).min(initial=jnp.inf))


def rule(merge, empty):
    from equikd.metrics._fields import Rule

    return eqx.field(metadata={"merge": Rule(merge, empty)})


def zeros(shapes):
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


class Halves(State):
    """The mean of two is not associative."""

    value: Float[Array, ""] = rule(lambda a, b: jnp.where(a == 0, b, jnp.where(b == 0, a, (a + b) / 2)), zeros)

    def compute(self):
        return self.value


@config
class MergesByMean(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Halves:
        return Halves(jnp.where(mask, x, 0).sum())


class StartsAtOne(State):
    value: Float[Array, ""] = rule(jnp.add, lambda shapes: np.ones(shapes.shape, shapes.dtype))

    def compute(self):
        return self.value


@config
class HasNoIdentity(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> StartsAtOne:
        return StartsAtOne(jnp.where(mask, x, 0).sum())


class KeepsLeft(State):
    """An associative merge with an identity whose order counts, though its rule does not say so."""

    value: Float[Array, ""] = rule(
        lambda a, b: jnp.where(jnp.isnan(a), b, a), lambda s: np.full(s.shape, np.nan, s.dtype)
    )

    def compute(self):
        return self.value


@config
class TakesFirst(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> KeepsLeft:
        return KeepsLeft(jnp.where(mask.any(), jnp.where(mask, x, 0)[jnp.argmax(mask)], jnp.nan))


class Traced(State):
    value: Float[Array, ""] = sum_field()

    def compute(self):
        return self.value


@config
class DiffersInTraces(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Traced:
        total = jnp.where(mask, x, 0).sum()
        return Traced(total + isinstance(total, jax.core.Tracer) * mask.sum())


@config
class RaisesOnFew(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Total:
        if x.shape[0] < 3:
            raise IndexError("three rows at least")
        return Total(jnp.where(mask, x, 0).sum())


class Count(State):
    value: Int[Array, ""] = sum_field()

    def compute(self):
        return self.value


@config
class CountsInBytes(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Count:
        return Count(mask.sum(dtype=jnp.int8))


@config
class CountsToAHundred(OfRows):
    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Count:
        return Count(jnp.minimum(mask.sum(dtype=jnp.int32), 100))


@pytest.mark.parametrize(
    ("metric", "law"),
    [
        (CountsInBytes, "raises OverflowError"),
        (CountsToAHundred, "for a large batch"),
        (MultipliesByMask, "rows of padding change|mask is False changes"),
        (IgnoresMask, "rows of padding change|mask is False changes|masked rows count"),
        (AveragesBatches, r"of\(a \+\+ b\) is not of\(a\) \| of\(b\)"),
        (CountsEmptyBatches, "a batch of padding alone"),
        (WeighsByPosition, r"of\(a \+\+ b\) is not|masked rows count"),
        (SumsMinima, "a batch of padding alone|of.a .. b. is not"),
        (MergesByMean, "not associative"),
        (HasNoIdentity, "the empty state, merged"),
        (TakesFirst, "another order of the rows|merging depends on the order"),
        (DiffersInTraces, "(vmap and reduce|scan) gives? another value"),
        (RaisesOnFew, "raises IndexError where all arguments fit"),
    ],
)
def test_a_broken_law_is_found(metric, law):
    with pytest.raises(AssertionError, match=law) as caught:
        check_metric(metric(), axes=b_axis, examples=4)
    assert f"{metric.__name__}.from_values" in str(caught.value)
    assert "mask=[" in str(caught.value)


@config
class AveragesDevices(OfRows):
    """The mean of the devices' means, where the rows can be spread over them."""

    def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Average:
        devices = len(jax.devices())
        if x.shape[0] % devices:
            return Average.of(x, mask)
        values, kept = jnp.where(mask, x, 0).reshape(devices, -1), mask.reshape(devices, -1)
        means = values.sum(axis=1) / jnp.maximum(kept.sum(axis=1), 1)
        return Average(TwoFloat.of(means.mean() * mask.sum()), mask.sum(dtype=jnp.int32))


@pytest.mark.slow
def test_a_mean_of_the_means_of_devices_is_found(monkeypatch):
    with pytest.raises(AssertionError, match="automatic sharding over several devices gives another value") as caught:
        check_metric(AveragesDevices(), axes=b_axis, examples=3)
    assert "rows over 8 devices, " in str(caught.value)
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: one)
    check_metric(AveragesDevices(), axes=b_axis, examples=1)  # on one device there is nothing to see


def test_rows_are_spread_over_all_devices():
    seen = []

    @config
    class Seen(OfRows):
        def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Total:
            jax.debug.inspect_array_sharding(x, callback=lambda sharding: seen.append(len(sharding.device_set)))
            return Total(jnp.where(mask, x, 0).sum())

    check_metric(Seen(), axes=b_axis, examples=1)
    assert seen.count(8) == 1


@pytest.mark.slow
def test_values_can_be_given():
    seen = []

    @config
    class Probabilities(OfRows):
        def from_values(self, x: Float[Array, " b"], mask: Bool[Array, " b"]) -> Average:
            seen.append(bool(((x >= 0) & (x <= 1))[mask].all()) if not isinstance(x, jax.core.Tracer) else True)
            return Average.of(x, mask)

    check_metric(Probabilities(), axes=b_axis, values={"x": lambda random, shape: random.random(shape)}, examples=2)
    assert len(seen) > 10
    assert all(seen)


def test_an_unknown_option_is_told(snapshot):
    texts = []
    for check in (check_metric, ek.testing.check_loss):
        with pytest.raises(TypeError) as caught:
            check(Sound(), axis=b_axis)
        texts.append(str(caught.value))
    snapshot("unknown_option", "\n".join(texts))


def test_what_is_no_metric_or_no_argument_is_told():
    with pytest.raises(DrawError, match="checks a metric"):
        check_metric(lambda x: x)
    for option in ({"values": {"y": None}}, {"shared": ["y"]}, {"axes": {"y": None}}):
        with pytest.raises(DrawError, match="'y'"):
            check_metric(Sound(), **option)
