"""Losses of labels against scikit-learn and optax, at extreme logits, and with labels that are no class."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import TypeCheckError
from sklearn.metrics import log_loss

from equikd.config import override, resolve, validate
from equikd.errors import ConfigError
from equikd.losses import Focal, SigmoidBinaryCrossEntropy, SoftmaxCrossEntropy
from equikd.wiring import Context

ENTROPY = SoftmaxCrossEntropy(logits="preds", labels="batch.label")
SIGMOID = SigmoidBinaryCrossEntropy(logits="preds", labels="batch.label")
FOCAL = Focal(logits="preds", labels="batch.label")


def context(preds, label):
    return Context(preds=preds, batch={"label": label}, mask=jnp.ones(preds.shape[0], bool))


@jax.jit
def values(loss, *args):
    return resolve(loss).values(*args)


@jax.jit
def mean_and_gradient(loss, preds, rest):
    return jax.value_and_grad(lambda p: resolve(loss).from_context(context(p, **rest)).mean())(preds)


class TestSoftmaxCrossEntropy:
    logits = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    labels = np.array([0, 1, 2, 3, 0, 1], np.int32)

    @pytest.mark.parametrize("label_dtype", [np.int32, np.uint8])
    def test_equals_sklearn(self, label_dtype):
        state = ENTROPY.from_context(context(self.logits, label=self.labels.astype(label_dtype)))
        odds = np.exp(self.logits.astype(np.float64))
        expected = log_loss(self.labels, odds / odds.sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(state.compute(), expected, rtol=1e-6)

    @pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
    def test_smoothing_equals_optax_for_integer_and_one_hot_labels(self, smoothing):
        one_hot = jax.nn.one_hot(self.labels, 4)
        expected = optax.softmax_cross_entropy(self.logits, optax.smooth_labels(one_hot, smoothing))
        loss = override(ENTROPY, {"label_smoothing": smoothing})
        for labels in (self.labels, one_hot, one_hot > 0, one_hot.astype(int)):
            np.testing.assert_allclose(values(loss, self.logits, labels), expected, rtol=2e-6)

    def test_probabilities_and_tokens(self):
        labels = jax.nn.softmax(self.logits[::-1])
        tokens = values(ENTROPY, self.logits.reshape(2, 3, 4), labels.reshape(2, 3, 4))
        np.testing.assert_allclose(tokens.ravel(), optax.softmax_cross_entropy(self.logits, labels), rtol=1e-6)

    def test_one_program_serves_all_smoothings_and_weights(self, compilations):
        run = jax.jit(
            lambda loss, logits: resolve(loss).weight_at(0) * resolve(loss).values(logits, self.labels).mean()
        )
        run(ENTROPY, self.logits)
        compilations.clear()
        results = [
            float(run(override(ENTROPY, {"label_smoothing": s, "weight": w}), self.logits))
            for s, w in [(0.0, 1.0), (0.2, 1.0), (0.2, 0.5)]
        ]
        assert compilations.names == []
        assert len(set(results)) == 3
        np.testing.assert_allclose(results[2], results[1] / 2, rtol=1e-6)

    def test_the_gradient_of_the_smoothing_is_right_at_0(self):
        logits, labels = self.logits, self.labels
        slope = jax.grad(lambda s: override(ENTROPY, {"label_smoothing": s}).values(logits, labels).sum())
        even = -jax.nn.log_softmax(logits).mean(-1)
        expected = (even - ENTROPY.values(logits, labels)).sum()
        np.testing.assert_allclose(slope(jnp.float32(0.0)), expected, rtol=1e-5)

    def test_classes_that_are_ruled_out(self):
        logits = jnp.array([[0.0, -jnp.inf, 0.0]])
        for labels in (jnp.array([2]), jnp.array([[0.0, 0.0, 1.0]])):
            value, gradient = mean_and_gradient(ENTROPY, logits, {"label": labels})
            np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
            np.testing.assert_allclose(gradient, [[0.5, 0, -0.5]], atol=1e-6)

    def test_bf16_is_computed_in_float32(self):
        logits = jnp.asarray(self.logits, jnp.bfloat16)
        value, gradient = mean_and_gradient(ENTROPY, logits, {"label": self.labels})
        exact, _ = mean_and_gradient(ENTROPY, logits.astype(jnp.float32), {"label": self.labels})
        assert (value.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
        assert value == exact

    def test_smoothing_is_a_share(self):
        with pytest.raises(ConfigError, match="label_smoothing must be between 0 and 1"):
            validate(override(ENTROPY, {"label_smoothing": 1.5}))

    def test_wrong_shapes_are_refused(self):
        for labels in (jnp.zeros(5, jnp.int32), jnp.zeros((6, 3)), jnp.zeros(6)):
            with pytest.raises(TypeCheckError):
                ENTROPY.values(jnp.asarray(self.logits), labels)


class TestLabelsThatAreNoClass:
    """A value of nan, which says so; and the gradients of the other rows, which are right."""

    @pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.uint32])
    @pytest.mark.parametrize("classes", [3, 200, 300])  # 200 and 300 are no int8, 300 is no uint8
    def test_softmax(self, dtype, classes):
        logits = np.random.default_rng(0).normal(size=(4, classes)).astype(np.float32)
        last = min(classes - 1, np.iinfo(dtype).max)
        labels = np.array([0, 2, last, 1]).astype(dtype)
        expected = optax.softmax_cross_entropy(logits, np.eye(classes, dtype=np.float32)[labels])
        np.testing.assert_allclose(values(ENTROPY, logits, labels), expected, rtol=1e-5)
        for wrong in (-1, -classes, classes, np.iinfo(dtype).max, np.iinfo(dtype).min):
            fits = np.iinfo(dtype).min <= wrong <= np.iinfo(dtype).max
            if fits and not 0 <= wrong < classes:
                labels[1] = wrong
                assert np.isnan(values(ENTROPY, logits, labels)).tolist() == [False, True, False, False]

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("wrong", [-1, -4, 4, 99])
    def test_the_gradient_is_that_of_the_other_rows(self, smoothing, wrong):
        loss = override(ENTROPY, {"label_smoothing": smoothing})
        logits = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
        value, gradient = mean_and_gradient(loss, logits, {"label": np.array([0, wrong, 3])})
        _, right = mean_and_gradient(loss, logits, {"label": np.array([0, 1, 3])})
        assert np.isnan(value)
        np.testing.assert_array_equal(gradient[::2], right[::2])
        assert (gradient[1] == 0).all()

    @pytest.mark.parametrize("loss", [SIGMOID, FOCAL])
    @pytest.mark.parametrize("wrong", [-1, 2, -100])
    def test_two_classes(self, loss, wrong):
        logits = np.array([0.5, -1.0, 2.0], np.float32)
        value, gradient = mean_and_gradient(loss, logits, {"label": np.array([0, wrong, 1])})
        _, right = mean_and_gradient(loss, logits, {"label": np.array([0, 1, 1])})
        assert np.isnan(value)
        np.testing.assert_array_equal(gradient, np.where([True, False, True], right, 0))

    def test_where_the_mask_leaves_them_out_they_are_not_looked_at(self):
        masked = override(ENTROPY, {"mask": "batch.keep"})
        logits = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
        labels = np.array([0, -100, 3])
        where = Context(preds=logits, batch={"label": labels, "keep": labels != -100}, mask=np.ones(3, bool))
        kept = ENTROPY.values(logits[::2], labels[::2])
        np.testing.assert_allclose(masked.from_context(where).mean(), kept.mean(), rtol=1e-6)


class TestTwoClasses:
    logits = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32) * 3
    labels = np.random.default_rng(1).integers(0, 2, (6, 3))

    def test_sigmoid_equals_sklearn(self):
        ours = SIGMOID.from_context(context(self.logits, self.labels)).compute()
        odds = 1 / (1 + np.exp(-self.logits.astype(np.float64)))
        np.testing.assert_allclose(ours, log_loss(self.labels.ravel(), odds.ravel()), rtol=1e-5)

    def test_it_is_softmax_over_two_classes(self):
        two = np.stack([np.zeros_like(self.logits), self.logits], axis=-1)
        both = values(SIGMOID, self.logits, self.labels), values(ENTROPY, two, self.labels)
        np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("dtype", [np.int32, np.uint8, bool, np.float32])
    @pytest.mark.parametrize("loss", [SIGMOID, FOCAL, override(FOCAL, {"alpha": 0.25})])
    def test_labels_of_all_kinds(self, loss, dtype):
        labels = self.labels.astype(dtype)
        if isinstance(loss, Focal):
            expected = optax.sigmoid_focal_loss(self.logits, self.labels, alpha=loss.alpha, gamma=2.0)
        else:
            expected = optax.sigmoid_binary_cross_entropy(self.logits, self.labels)
        np.testing.assert_allclose(values(loss, self.logits, labels), expected, rtol=1e-4, atol=1e-6)

    def test_probabilities_as_labels(self):
        mixed = 0.3 * values(SIGMOID, self.logits, self.labels) + 0.7 * values(SIGMOID, self.logits, 1 - self.labels)
        labels = (0.3 * self.labels + 0.7 * (1 - self.labels)).astype(np.float32)
        np.testing.assert_allclose(values(SIGMOID, self.logits, labels), mixed, rtol=1e-4)

    def test_focal_without_focus_is_the_cross_entropy(self):
        plain, half = override(FOCAL, {"gamma": 0.0}), override(FOCAL, {"gamma": 0.0, "alpha": 0.5})
        expected = values(SIGMOID, self.logits, self.labels)
        np.testing.assert_allclose(values(plain, self.logits, self.labels), expected, rtol=1e-5)
        np.testing.assert_allclose(values(half, self.logits, self.labels), expected / 2, rtol=1e-5)

    @pytest.mark.parametrize("loss", [SIGMOID, FOCAL, override(FOCAL, {"gamma": 0.5})])
    @pytest.mark.parametrize("label", [0, 1])
    def test_extreme_logits(self, loss, label):
        logits = np.array([-300.0, -50.0, 50.0, 300.0], np.float32)
        right = logits > 0 if label else logits < 0
        value, gradient = jax.vmap(jax.value_and_grad(lambda x: loss.values(x[None], jnp.array([label]))[0]))(logits)
        np.testing.assert_allclose(value, np.where(right, 0, abs(logits)), atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(gradient, np.where(right, 0, 1 - 2 * label), atol=1e-6, rtol=1e-5)

    def test_one_program_serves_all_gammas_and_alphas(self, compilations):
        values(override(FOCAL, {"alpha": 0.1}), self.logits, self.labels)
        compilations.clear()
        given = [{"gamma": g, "alpha": a} for g, a in [(0.0, 0.2), (3.0, 0.2), (3.0, 0.9)]]
        results = {np.asarray(values(override(FOCAL, one), self.logits, self.labels)).sum() for one in given}
        assert compilations.names == []
        assert len(results) == 3

    @pytest.mark.parametrize("wrong", [{"gamma": -1.0}, {"alpha": 1.5}])
    def test_settings_that_make_no_sense(self, wrong):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            validate(override(FOCAL, wrong))
        validate(override(FOCAL, {"alpha": 0.25}))
