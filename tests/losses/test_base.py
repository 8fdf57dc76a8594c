"""Losses: values against hand cases and optax, masks in value and gradient, weights, and bits against a plain loop."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

import equikd as ek
from equikd.config import from_json, lazy, override, resolve, to_json
from equikd.errors import ConfigError, WiringError
from equikd.losses import Loss, LossState, SoftmaxCrossEntropy, SquaredError, replace_masked
from equikd.metrics import empty_state
from equikd.optim import Linear, Schedule, WarmupCosine
from equikd.typing import Array, Float
from equikd.wiring import Context

ENTROPY = SoftmaxCrossEntropy(logits="preds", labels="batch.label")
SQUARE = SquaredError(preds="preds", targets="batch.y")


@ek.config.config
class Norm(Loss):
    """A user's loss whose gradient is not finite everywhere, with a traced float of its own."""

    x: ek.KeyPath
    scale: float = 1.0

    def values(self, x: Float[Array, "b n"]) -> Float[Array, " b"]:
        return self.scale * jnp.log(jnp.linalg.norm(x, axis=-1))


@ek.config.config
class Contrast(Loss):
    """A loss that couples rows."""

    depends_on = "batch"

    x: ek.KeyPath

    def values(self, x: Float[Array, " b"], mask) -> Float[Array, " b"]:
        return jnp.where(mask, x, 0) - x.sum()


@ek.config.config
class Penalty(Loss):
    """A loss without a batch axis."""

    weights: ek.KeyPath

    def values(self, weights) -> Float[Array, ""]:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(weights))


def context(preds, y=None, mask=None, **batch):
    batch = batch if y is None else {"y": y, **batch}
    rows = jax.tree.leaves(preds)[0].shape[0]
    return Context(step=0, preds=preds, batch=batch, mask=jnp.ones(rows, bool) if mask is None else mask)


@jax.jit
def values(loss, *args):
    return resolve(loss).values(*args)


@jax.jit
def mean_and_gradient(loss, preds, rest):
    return jax.value_and_grad(lambda p: resolve(loss).from_context(context(p, **rest)).mean())(preds)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


numbers = st.lists(st.integers(-9, 9), min_size=1, max_size=4)


@settings(max_examples=20)
@given(numbers, numbers)
def test_the_state_of_all_rows_is_the_merged_state(first, second):
    state = jax.jit(lambda x: SQUARE.from_context(context(x, jnp.zeros_like(x))))
    states = [state(np.array(x, np.float32)) for x in (first, second)]
    whole = state(np.array(first + second, np.float32))
    merged = functools.reduce(LossState.merge, states, empty_state(jax.eval_shape(lambda: whole)))
    assert (merged.total, merged.count) == (whole.total, whole.count)


LOSSES = {"entropy": ENTROPY, "square": SQUARE, "norm": Norm("preds")}


def by_name(name, preds, y, label, mask):
    return mean_and_gradient(LOSSES[name], preds, {"y": y, "label": label, "mask": mask})


@settings(max_examples=20)
@given(
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from([np.nan, np.inf, -np.inf, 1e38]),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_masked_rows_change_neither_value_nor_gradient(name, junk, mask):  # case 23
    mask = np.array(mask)
    preds, y = normal(2, 5, 3)
    label = np.array([0, 1, 2, 0, 1])
    value, gradient = by_name(name, preds, y, label, mask)
    broken, broken_y = (np.where(mask[:, None], x, np.float32(junk)) for x in (preds, y))
    same, same_gradient = by_name(name, broken, broken_y, np.where(mask, label, -7), mask)
    assert same == value
    np.testing.assert_array_equal(same_gradient, gradient)
    np.testing.assert_array_equal(gradient[~mask], 0)


@pytest.mark.parametrize("name", LOSSES)
def test_a_mask_equals_the_rows_that_it_keeps(name):
    preds = normal(6, 3)
    mask, label = np.arange(6) < 4, np.array([0, 1, 2, 0, -1, 99])
    value, gradient = by_name(name, preds, jnp.ones((6, 3)), label, mask)
    expected, expected_gradient = by_name(name, preds[:4], jnp.ones((4, 3)), label[:4], mask[:4])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient[:4], expected_gradient, rtol=1e-6)


def test_masked_tokens_of_real_rows_change_nothing_either():
    logits = normal(2, 3, 4)
    keep = np.array([[True, True, False], [True, False, False]])
    labels = np.array([[0, 1, -100], [2, -100, -100]])
    broken = np.where(keep[..., None], logits, np.float32(np.nan))
    loss = override(ENTROPY, {"mask": "batch.keep"})
    value, gradient = mean_and_gradient(loss, broken, {"label": labels, "keep": keep})
    expected = values(ENTROPY, logits[keep], labels[keep]).mean()
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert np.isfinite(gradient).all()
    assert (gradient[~keep] == 0).all()


def test_the_gradient_of_a_losss_own_float_is_finite_too():
    x = jnp.array([[3.0, 4.0], [jnp.nan, 0.0], [0.0, 0.0]])
    mask = jnp.array([True, False, False])
    slope = jax.grad(lambda scale: Norm("preds", scale=scale).from_context(context(x, mask=mask)).mean())
    np.testing.assert_allclose(slope(jnp.float32(1.0)), np.log(5), rtol=1e-6)


@pytest.mark.parametrize("loss", [ENTROPY, SQUARE, Norm("preds")])
def test_a_batch_without_rows_contributes_nothing(loss):  # case 22
    preds = np.full((2, 3), np.nan, np.float32)
    value, gradient = mean_and_gradient(loss, preds, {"y": preds, "label": np.zeros(2, int), "mask": np.zeros(2, bool)})
    assert value == 0
    assert (gradient == 0).all()
    real = SQUARE.from_context(context(jnp.ones(3), jnp.zeros(3)))
    nothing = SQUARE.from_context(context(jnp.full(2, jnp.nan), jnp.zeros(2), jnp.zeros(2, bool)))
    assert (real | nothing).mean() == 1
    assert np.isnan(jax.device_get(nothing).compute())


def test_only_padding_is_replaced_where_rows_are_coupled():
    rest = {"mask": jnp.arange(3) < 2, "keep": jnp.array([True, False, True])}
    value, gradient = mean_and_gradient(Contrast("preds", mask="batch.keep"), jnp.array([1.0, 2.0, jnp.nan]), rest)
    assert value == 1 - (1 + 2 + 0.5)
    assert gradient.tolist() == [0, -1, 0]
    with pytest.raises(ConfigError, match="depends_on"):

        class Typo(Loss):
            depends_on: Literal["rows"] = "rows"


def test_normalize_by_values_counts_every_real_row():
    rest = {"y": jnp.zeros(4), "keep": jnp.array([True, False, True, True]), "mask": jnp.arange(4) < 3}
    errors = jnp.array([1.0, 2.0, 3.0, jnp.nan])
    by_mask = override(SQUARE, {"mask": "batch.keep"})
    by_values = override(by_mask, {"normalize_by": "values"})
    assert by_mask.from_context(context(errors, **rest)).mean() == 10 / 2
    np.testing.assert_allclose(by_values.from_context(context(errors, **rest)).mean(), 10 / 3, rtol=1e-6)
    tokens = {
        "y": jnp.zeros((2, 2)),
        "keep": jnp.array([[True, False], [True, True]]),
        "mask": jnp.array([True, False]),
    }
    assert by_values.from_context(context(jnp.ones((2, 2)), **tokens)).mean() == 0.5


def test_without_a_mask_of_its_own_a_loss_still_skips_padding():
    state = override(SQUARE, {"mask": None}).from_context(
        context(jnp.array([1.0, jnp.nan]), jnp.zeros(2), jnp.array([True, False]))
    )
    assert (state.mean(), state.count) == (1, 1)
    no_batch = Context(preds=jnp.ones(3), batch={"y": jnp.zeros(3)})
    assert override(SQUARE, {"mask": None}).from_context(no_batch).count == 3


def test_a_penalty_on_parameters():
    weights = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([2.0])}  # as many rows as the batch, but none of it
    where = Context(params=weights, mask=jnp.array([True, False]))
    loss = Penalty("params", mask=None, weight=0.5)
    assert loss.weight_at(0) * loss.from_context(where).mean() == 4.5
    with pytest.raises(WiringError, match="the mask does not fit"):
        Penalty("params").from_context(where)


class TestWeight:
    def test_a_float_or_a_schedule(self):
        assert ENTROPY.weight_at(7) == 1.0
        loss = override(ENTROPY, {"weight": Linear(0.0, 1.0, 10)})
        assert isinstance(loss.weight, Schedule)
        assert [float(loss.weight_at(step)) for step in (0, 5, 99)] == [0, 0.5, 1]
        run = jax.jit(lambda loss, step: resolve(loss).weight_at(step))
        assert run(loss, jnp.int32(5)) == 0.5

    def test_a_node_that_makes_a_function(self):
        loss = SQUARE.__class__("preds", "batch.y", weight=lazy(optax.linear_schedule)(0.0, 1.0, 10))
        assert loss.weight_at(5) == 0.5
        assert resolve(loss).weight_at(5) == 0.5

    def test_its_numbers_are_leaves(self):
        loss = SquaredError(preds="preds", targets="batch.y", weight=WarmupCosine(0.0, 1.0, 10, 100))
        assert len(jax.tree.leaves(loss)) == 6
        assert len(jax.tree.leaves(SQUARE)) == 1
        assert from_json(to_json(loss)) == loss
        assert override(loss, {"weight.peak_value": 0.5}).weight_at(10) == 0.5

    def test_what_is_no_weight_is_refused(self):
        with pytest.raises(ConfigError, match="weight"):
            override(SQUARE, {"weight": "high"})


def test_wrong_key_paths_are_reported_together_with_the_masks(snapshot):
    loss = SoftmaxCrossEntropy(logits="pred.logits", labels="batch.labels", mask="batch.masks")
    with pytest.raises(WiringError) as error:
        loss.from_context(context(jnp.ones((2, 3)), label=jnp.zeros(2, jnp.int32), mask=jnp.ones(2, bool)))
    snapshot("loss_wrong_key_paths", str(error.value))


def test_values_that_the_mask_does_not_fit(snapshot):
    @ek.config.config
    class Summed(Loss):
        x: ek.KeyPath

        def values(self, x):
            return x.sum()

    with pytest.raises(WiringError) as error:
        Summed("preds").from_context(context(jnp.ones((2, 3))))
    snapshot("loss_mask_does_not_fit", str(error.value).replace(Summed.__qualname__, "Summed"))


def test_a_shape_error_says_where_the_arguments_come_from():
    with pytest.raises(TypeCheckError) as error:
        Norm("preds").from_context(context(jnp.ones(3)))
    assert "f32[3]  from Norm.x = 'preds'" in str(error.value)


def test_replace_masked_leaves_what_has_no_batch_axis():
    tree = {
        "x": jnp.ones((2, 2)),
        "n": jnp.ones(2, int),
        "other": jnp.zeros(3),
        "keys": jax.random.split(jax.random.key(0)),
    }
    replaced = replace_masked(tree, jnp.array([[True, False], [False, False]]))
    assert replaced["x"].tolist() == [[1, 1], [0.5, 0.5]]
    assert replaced["n"].tolist() == [1, 0]
    assert replaced["other"] is tree["other"]
    assert replaced["keys"] is tree["keys"]
    elements = replace_masked(tree, jnp.array([[True, False], [False, False]]), elements=True)
    assert elements["x"].tolist() == [[1, 0.5], [0.5, 0.5]]


def test_value_and_gradient_equal_a_plain_loop_to_the_bit():
    """The oracle of the trainer's tests: adding masks, weights and smoothing as traced numbers moves no bit."""
    weights = [normal(64, 32) / 8, normal(32, 10) / 8]
    x, labels = normal(45, 64), np.arange(45) % 10
    mask = jnp.arange(45) < 41

    def logits(weights):
        return jax.nn.relu(x @ weights[0]) @ weights[1]

    def plain(weights, mask):
        values = optax.softmax_cross_entropy_with_integer_labels(logits(weights), labels)
        return jnp.where(mask, values, 0).sum() / mask.sum()

    def ours(weights, mask, loss):
        loss = resolve(loss)
        return loss.weight_at(0) * loss.from_context(context(logits(weights), mask=mask, label=labels)).mean()

    with jax.numpy_dtype_promotion("standard"):
        expected = jax.jit(jax.value_and_grad(plain))(weights, mask)
    actual = jax.jit(jax.value_and_grad(ours))(weights, mask, ENTROPY)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
