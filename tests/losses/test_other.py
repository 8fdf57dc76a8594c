"""Losses of vectors, distributions, pairs, parameters and key paths, on cases by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import TypeCheckError

from equikd.config import override, resolve, validate
from equikd.errors import ConfigError, WiringError
from equikd.losses import Contrastive, Cosine, KLDivergence, ParameterL2, SoftmaxCrossEntropy, Value
from equikd.wiring import Context

COSINE = Cosine(preds="preds", targets="batch")
DIVERGENCE = KLDivergence(logits="preds", targets="batch")
CONTRAST = Contrastive(queries="preds.q", keys="preds.k", temperature=0.5)
ALL = np.ones(5, bool)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class TestCosine:
    def test_angles(self):
        preds = jnp.array([[2.0, 0.0], [0.0, 3.0], [-0.1, 0.0], [1.0, 1.0]])
        expected = [0, 1, 2, 1 - 0.5**0.5]
        np.testing.assert_allclose(COSINE.values(preds, jnp.tile(jnp.array([5.0, 0.0]), (4, 1))), expected, atol=1e-6)

    def test_equals_optax_and_takes_tokens(self):
        preds, targets = normal(2, 3, 4), normal(2, 3, 4, seed=1)
        np.testing.assert_allclose(COSINE.values(preds, targets), optax.cosine_distance(preds, targets), rtol=1e-5)

    def test_zeros_have_a_value_and_a_gradient(self):
        for preds, targets in [(jnp.zeros((1, 3)), jnp.ones((1, 3))), (jnp.zeros((1, 3)), jnp.zeros((1, 3)))]:
            value, gradient = jax.value_and_grad(lambda p, y: COSINE.values(p, y).sum())(preds, targets)
            assert value == 1
            assert np.isfinite(gradient).all()

    def test_epsilon_is_above_0(self):
        with pytest.raises(ConfigError, match="epsilon must be above 0"):
            validate(override(COSINE, {"epsilon": 0.0}))


class TestKLDivergence:
    targets = jnp.array([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]])

    def test_is_0_where_both_are_the_same(self):
        targets = jax.nn.softmax(normal(3, 4))
        for logits in (jnp.log(targets), jnp.log(targets) + 7):  # normalised or not
            np.testing.assert_allclose(DIVERGENCE.values(logits, targets), 0, atol=1e-5)

    def test_equals_optax_and_is_cross_entropy_less_entropy(self):
        logits = normal(2, 4)
        log_preds = jax.nn.log_softmax(logits)
        values = DIVERGENCE.values(logits, self.targets)
        np.testing.assert_allclose(values, optax.kl_divergence(log_preds, self.targets), rtol=1e-5)
        entropy = SoftmaxCrossEntropy("preds", "batch")
        np.testing.assert_allclose(
            jax.grad(lambda x: DIVERGENCE.values(x, self.targets).sum())(logits),
            jax.grad(lambda x: entropy.values(x, self.targets).sum())(logits),
            atol=1e-6,
        )

    def test_targets_and_predictions_of_0(self):
        logits = jnp.array([[0.0, 0.0, 0.0, -jnp.inf], [1.0, -jnp.inf, 1.0, -jnp.inf]])
        value, gradients = jax.value_and_grad(lambda x, t: DIVERGENCE.values(x, t).sum(), argnums=(0, 1))(
            logits, self.targets
        )
        np.testing.assert_allclose(value, np.log(3) - 1.5 * np.log(2) + np.log(2), rtol=1e-5)
        assert all(np.isfinite(gradient).all() for gradient in gradients)
        assert DIVERGENCE.values(logits, self.targets[::-1]).tolist()[1] == np.inf  # 1/4 where it was ruled out


class TestContrastive:
    q, k = normal(5, 3), normal(5, 3, seed=1)

    def test_vectors_of_any_length_are_compared_by_angle(self):
        longer = CONTRAST.values(7 * self.q, self.k / 9, ALL)
        np.testing.assert_allclose(CONTRAST.values(self.q, self.k, ALL), longer, rtol=1e-4)
        plain = override(CONTRAST, {"normalize": False, "temperature": 1.0})
        expected = -np.diag(jax.nn.log_softmax(self.q @ self.k.T))
        np.testing.assert_allclose(plain.values(self.q, self.k, ALL), expected, rtol=1e-4)

    def test_ntxent_of_optax_has_both_views_of_the_others_as_negatives(self):
        a, b = jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 1.0]])
        views = jnp.concatenate([a, b, a, b])
        with jax.numpy_dtype_promotion("standard"):
            theirs = optax.ntxent(views, jnp.array([0, 1, 0, 1]), temperature=0.5)
        ours = CONTRAST.values(views[:2], views[2:], np.ones(2, bool))
        np.testing.assert_allclose(theirs, np.log(1 + 2 * np.exp(-2.0)), rtol=1e-5)
        np.testing.assert_allclose(ours, np.log(1 + np.exp(-2.0)), rtol=1e-5)

    def test_both_ways(self):
        both = override(CONTRAST, {"symmetric": True}).values(self.q, self.k, ALL)
        ways = CONTRAST.values(self.q, self.k, ALL), CONTRAST.values(self.k, self.q, ALL)
        np.testing.assert_allclose(both, (ways[0] + ways[1]) / 2, rtol=1e-5)

    def test_keys_that_do_not_count_are_no_negatives(self):
        mask = np.array([True, False, True, True, False])
        subset = CONTRAST.values(self.q[mask], self.k[mask], ALL[mask])
        np.testing.assert_allclose(CONTRAST.values(self.q, self.k, mask)[mask], subset, rtol=1e-5)
        assert (subset < CONTRAST.values(self.q, self.k, ALL)[mask]).all()

    def test_a_lone_row_has_nothing_to_be_told_from(self):
        def loss(q):
            return CONTRAST.values(q, jnp.asarray(self.k), np.arange(5) == 2).at[2].get()

        value, gradient = jax.value_and_grad(loss)(jnp.asarray(self.q))
        assert value == 0
        np.testing.assert_allclose(gradient, 0, atol=1e-6)

    def test_vectors_of_zeros_have_a_gradient(self):
        loss = jax.grad(lambda q: CONTRAST.values(q, jnp.asarray(self.k), ALL).sum())
        assert np.isfinite(loss(jnp.zeros((5, 3)))).all()

    def test_one_program_serves_all_temperatures(self, compilations):
        run = jax.jit(lambda loss: resolve(loss).values(self.q, self.k, jnp.asarray(ALL)).sum())
        run(CONTRAST)
        compilations.clear()
        cold, warm = (run(override(CONTRAST, {"temperature": t})) for t in (0.07, 2.0))
        assert compilations.names == []
        assert cold != warm

    def test_temperature_is_above_0(self):
        with pytest.raises(ConfigError, match="temperature must be above 0"):
            validate(override(CONTRAST, {"temperature": 0.0}))

    def test_a_mask_of_tokens_does_not_fit(self):
        where = Context(preds={"q": self.q, "k": self.k}, mask=ALL, batch=np.ones((5, 2), bool))
        with pytest.raises(TypeCheckError, match="mask"):
            override(CONTRAST, {"mask": "batch"}).from_context(where)


class TestParameterL2:
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    context = Context(params=eqx.filter(model, eqx.is_inexact_array), model=model, mask=np.array([True, False]))

    def l2(self, params="params"):
        return ParameterL2(params).from_context(self.context)

    def test_the_patterns_choose(self):
        weights = sum(np.sum(np.square(layer.weight)) for layer in self.model.layers)
        biases = sum(np.sum(np.square(layer.bias)) for layer in self.model.layers)
        np.testing.assert_allclose(self.l2("params.**.weight").compute(), weights, rtol=1e-6)
        np.testing.assert_allclose(self.l2("params.layers[*].bias").compute(), biases, rtol=1e-6)
        for all_of_them in ("params", "params.**", "model", "model.**"):
            np.testing.assert_allclose(self.l2(all_of_them).compute(), weights + biases, rtol=1e-6)
        first = np.sum(np.square(self.model.layers[0].weight))
        np.testing.assert_allclose(self.l2("params.layers[0].weight").compute(), first, rtol=1e-6)

    def test_it_counts_once_however_many_rows_there_are(self):
        state = self.l2()
        assert state.count == 1
        assert (state | state).mean() == state.mean()

    def test_its_gradient_is_twice_the_parameter(self):
        def loss(params):
            return ParameterL2("params.**.weight").from_context(Context(params=params)).mean()

        gradient = jax.grad(loss)(self.context.params)
        np.testing.assert_allclose(gradient.layers[0].weight, 2 * self.model.layers[0].weight, rtol=1e-6)
        assert (gradient.layers[0].bias == 0).all()

    def test_dtypes_are_summed_in_float32_and_complex_ones_by_modulus(self):
        half = Context(params={"a": jnp.full(1000, 0.1, jnp.bfloat16), "b": jnp.ones(2), "n": jnp.ones(3, int)})
        value = ParameterL2().from_context(half).compute()
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, 1000 * float(jnp.bfloat16(0.1)) ** 2 + 2, rtol=1e-5)
        assert ParameterL2().from_context(Context(params={"a": jnp.array([3 + 4j])})).compute() == 25

    def test_patterns_that_fit_nothing(self, snapshot):
        for name, pattern in {
            "pattern_misspelt": "params.**.wieght",
            "pattern_too_short": "params.*.weight",
            "pattern_without_a_name": "**.weight",
        }.items():
            with pytest.raises(WiringError) as error:
                self.l2(pattern)
            snapshot(name, str(error.value))
        with pytest.raises(WiringError, match="no arrays of floats"):
            ParameterL2().from_context(Context(params={}))
        with pytest.raises(WiringError, match="is not a path"):
            self.l2("params.a..b")


class TestValue:
    def test_a_value_for_each_row_or_element(self):
        where = Context(preds={"a": jnp.array([1.0, 3.0, jnp.nan]), "b": jnp.ones((3, 2))}, mask=np.arange(3) < 2)
        assert Value("preds.a").from_context(where).compute() == 2
        assert Value("preds.b").from_context(where).compute() == 1

    def test_a_scalar_has_no_mask(self):
        where = Context(preds={"balance": jnp.float32(3.0)}, mask=np.ones(2, bool))
        assert Value("preds.balance", mask=None).from_context(where).compute() == 3
        with pytest.raises(WiringError, match="mask=None"):
            Value("preds.balance").from_context(where)

    def test_ints_have_no_gradient_and_are_refused(self):
        with pytest.raises(TypeCheckError):
            Value("preds").from_context(Context(preds=jnp.arange(2), mask=np.ones(2, bool)))
