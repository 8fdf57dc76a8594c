"""Metrics: wiring, masks, shape checks, and a user's own metric as the docs write it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import equikd as ek
from equikd.config import from_json, override, to_json
from equikd.errors import WiringError
from equikd.metrics import Accuracy, Average, Mean, Metric, empty_state
from equikd.typing import Array, Bool, Float, Int
from equikd.wiring import Context


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@ek.config.config
class MyError(ek.metrics.Metric):
    preds: ek.KeyPath
    targets: ek.KeyPath

    class State(ek.metrics.State):
        total: Float[Array, ""] = ek.metrics.sum_field()
        count: Int[Array, ""] = ek.metrics.sum_field()

        def compute(self):
            return self.total / self.count

    def from_values(self, preds: Float[Array, " b"], targets: Float[Array, " b"], mask: Bool[Array, " b"]) -> State:
        error = jnp.abs(preds - targets)
        return self.State(total=jnp.where(mask, error, 0).sum(), count=mask.sum(dtype=jnp.int32))


@ek.config.config
class Unmasked(Metric):
    x: ek.KeyPath

    def from_values(self, x: Float[Array, " b"]) -> Average:
        return Average.of(x)


def context(rows=4, real=3):
    x = np.arange(rows, dtype=np.float32)
    x[real:] = np.nan
    keep = np.arange(rows) % 2 == 0
    return Context(
        step=0, preds=jnp.asarray(x), mask=np.arange(rows) < real, batch={"y": np.zeros_like(x), "keep": keep}
    )


def test_a_users_metric():
    metric = MyError("preds", "batch.y")
    assert metric.mask == "mask"
    assert metric.takes_mask
    state = jax.jit(lambda: metric.from_context(context()))()
    assert type(state) is MyError.State
    both = state | empty_state(jax.eval_shape(lambda: state))
    assert jax.device_get(both).compute() == 1
    with jax.numpy_dtype_promotion("standard"):  # the user divides by an int
        assert jax.jit(lambda metric, x: metric.from_values(x, x, x > 0).compute())(metric, jnp.ones(2)) == 0
    assert from_json(to_json(Mean("preds", mask="batch.keep"))) == Mean("preds", mask="batch.keep")
    assert override(metric, {"preds": "preds.x"}).preds == "preds.x"


def test_padding_is_left_out_of_a_mask_of_ones_own():
    assert Mean("preds", mask="batch.keep").from_context(context()).compute() == 1  # rows 0 and 2
    assert Mean("preds", mask="batch.keep").from_context(context(rows=6, real=5)).compute() == 2


def test_a_mask_of_elements_is_narrowed_by_the_rows():
    tokens = jnp.array([[1.0, 2.0], [3.0, jnp.nan], [jnp.nan, jnp.nan]])
    keep = jnp.array([[True, True], [True, False], [True, True]])
    full = Context(preds=tokens, batch={"keep": keep}, mask=jnp.array([True, True, False]))
    assert Mean("preds", mask="batch.keep").from_context(full).compute() == 2
    assert (
        Mean("preds", mask="batch.keep").from_context(Context(preds=tokens[:2], batch={"keep": keep[:2]})).compute()
        == 2
    )


def test_without_a_mask_all_rows_count():
    metric = Mean("preds", mask=None)
    assert not metric.takes_mask
    state = metric.from_context(Context(preds=jnp.array([1.0, 3.0]), mask=jnp.array([True, False])))
    assert (state.compute(), state.count) == (2, 2)
    assert Mean("preds", mask=None).from_context(Context(preds=jnp.float32(7))).compute() == 7


def test_a_metric_without_a_mask_argument_says_so():
    assert not Unmasked("preds").takes_mask
    assert Unmasked("preds").from_context(Context(preds=jnp.ones(3))).count == 3


def test_padding_equals_the_unpadded_batch_to_the_bit():  # case 25
    values = jax.random.normal(jax.random.key(0), (13,))
    real = Mean("preds").from_context(Context(preds=values, mask=jnp.ones(13, bool)))
    padded = jnp.concatenate([values, jnp.full(3, jnp.nan)])
    state = Mean("preds").from_context(Context(preds=padded, mask=jnp.arange(16) < 13))
    assert (state.total, state.count) == (real.total, real.count)


def test_wrong_key_paths_are_reported_together(snapshot):
    with pytest.raises(WiringError) as error:
        MyError("pred", "batch.z", mask="batch.kept").from_context(context())
    snapshot("wrong_key_paths", str(error.value))


def test_an_argument_that_no_field_fills(snapshot):
    @ek.config.config
    class Lost(Metric):
        x: ek.KeyPath

        def from_values(self, x, scale, mask):
            return Average.of(x * scale, mask)

    with pytest.raises(WiringError) as error:
        Lost("preds").connect(context())
    snapshot("argument_not_filled", str(error.value).replace(Lost.__qualname__, "Lost"))


def test_a_mask_that_does_not_fit_names_key_paths_and_shapes(snapshot):  # case 19
    values = Context(preds={"x": jnp.ones((2, 3))}, batch={"keep": jnp.ones(3, bool), "score": jnp.ones(2)})
    texts = []
    for metric, where in [
        (Mean("preds.x", mask="batch.keep"), values),
        (Mean("preds.x", mask="batch.keep"), values.replace(mask=jnp.ones(2, bool))),
        (Mean("preds.x", mask="batch.score"), values.replace(mask=jnp.ones(2, bool))),
        (Mean("preds.x", mask="batch"), values),
    ]:
        with pytest.raises(WiringError) as error:
            metric.from_context(where)
        texts.append(str(error.value))
    snapshot("mask_does_not_fit", "\n\n".join(texts))


def test_shapes_are_checked_without_a_decorator():
    bad = context().replace(preds=jnp.ones((4, 2)))
    with pytest.raises(TypeCheckError) as error:
        MyError("preds", "batch.y").from_context(bad)
    rows = [line for line in str(error.value).splitlines() if "  from " in line]
    assert [row.partition("  from ")[2] for row in rows] == [
        "MyError.preds = 'preds'",
        "MyError.targets = 'batch.y'",
        "MyError.mask = 'mask'",
    ]
    with pytest.raises(TypeCheckError):
        MyError("preds", "batch.y").from_values(jnp.ones(3), jnp.ones(4), jnp.ones(4, bool))


def test_a_metric_has_from_values():
    @ek.config.config
    class Nothing(Metric):
        x: ek.KeyPath

    with pytest.raises(TypeError, match="from_values"):
        Nothing("preds")


def test_accuracy_under_vmap_of_members():
    preds = jnp.stack([jnp.eye(3), jnp.eye(3)[::-1]])
    metric = Accuracy(preds="preds", labels="batch")
    states = jax.vmap(lambda p: metric.from_context(Context(preds=p, batch=jnp.arange(3), mask=jnp.ones(3, bool))))(
        preds
    )
    np.testing.assert_allclose(states.total / states.count.astype(jnp.float32), [1, 1 / 3])
