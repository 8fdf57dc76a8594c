"""What every shipped loss keeps: masked rows change nothing, states add up, values equal a reference in float64."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from scipy.spatial import distance

import equikd as ek
from equikd.config import resolve
from equikd.losses import (
    AbsoluteError,
    Contrastive,
    Cosine,
    Focal,
    Huber,
    KLDivergence,
    Loss,
    ParameterL2,
    SigmoidBinaryCrossEntropy,
    SoftmaxCrossEntropy,
    SquaredError,
    Value,
)
from equikd.wiring import Context

ROWS = 6


def focal(logits, labels):
    p_true = np.where(labels == 1, special.expit(logits), special.expit(-logits))
    return -np.where(labels == 1, 0.25, 0.75) * (1 - p_true) ** 1.5 * np.log(p_true)


def cosine(preds, targets):
    return np.array([distance.cosine(a, b) for a, b in zip(preds, targets, strict=True)])


def info_nce(queries, keys):
    scores = queries @ keys.T / np.outer(np.linalg.norm(queries, axis=1), np.linalg.norm(keys, axis=1)) / 0.3
    return -np.diag(special.log_softmax(scores, axis=1))


def smoothed(logits, labels):
    target = 0.9 * (np.eye(4)[labels] if labels.ndim == 1 else labels) + 0.1 / 4
    return -(target * special.log_softmax(logits, axis=-1)).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss of `preds` (and `batch`), its data, and what its values are, in float64."""

    loss: Loss
    shape: tuple[int, ...]
    batch: Callable[[np.random.Generator, int], Any]
    reference: Callable[[Any, Any], Any]
    couples_rows: bool = False

    def draw(self, seed, rows=ROWS):
        generator = np.random.default_rng(seed)
        return generator.normal(size=(rows, *self.shape)).astype(np.float32), self.batch(generator, rows)


def numbers(*shape):
    return lambda generator, rows: generator.normal(size=(rows, *shape)).astype(np.float32)


def integers(stop, *shape):
    return lambda generator, rows: generator.integers(0, stop, (rows, *shape)).astype(np.int32)


def shares(generator, rows):
    shares = generator.dirichlet(np.ones(4), rows) * (generator.random((rows, 4)) > 0.3)  # some are 0
    return shares.astype(np.float32)


CASES = {
    "absolute": Case(AbsoluteError("preds", "batch"), (3,), numbers(3), lambda p, y: abs(p - y).mean(axis=1)),
    "squared": Case(SquaredError("preds", "batch"), (3,), numbers(3), lambda p, y: ((p - y) ** 2).mean(axis=1)),
    "huber": Case(
        Huber("preds", "batch", delta=0.7), (3,), numbers(3), lambda p, y: special.huber(0.7, p - y).mean(axis=1)
    ),
    "softmax": Case(SoftmaxCrossEntropy("preds", "batch", label_smoothing=0.1), (4,), integers(4), smoothed),
    "softmax_of_shares": Case(SoftmaxCrossEntropy("preds", "batch", label_smoothing=0.1), (4,), shares, smoothed),
    "sigmoid": Case(
        SigmoidBinaryCrossEntropy("preds", "batch"),
        (3,),
        integers(2, 3),
        lambda x, y: -np.where(y == 1, special.log_expit(x), special.log_expit(-x)).mean(axis=1),
    ),
    "focal": Case(
        Focal("preds", "batch", gamma=1.5, alpha=0.25), (3,), integers(2, 3), lambda x, y: focal(x, y).mean(axis=1)
    ),
    "cosine": Case(Cosine("preds", "batch"), (3,), numbers(3), cosine),
    "divergence": Case(
        KLDivergence("preds", "batch"),
        (4,),
        shares,
        lambda x, t: (special.xlogy(t, t) - t * special.log_softmax(x, axis=-1)).sum(axis=-1),
    ),
    "contrastive": Case(Contrastive("preds", "batch", temperature=0.3), (3,), numbers(3), info_nce, True),
    "contrastive_both_ways": Case(
        Contrastive("preds", "batch", temperature=0.3, symmetric=True),
        (3,),
        numbers(3),
        lambda q, k: (info_nce(q, k) + info_nce(k, q)) / 2,
        True,
    ),
    "value": Case(Value("preds"), (), numbers(), lambda p, _: p),
}
by_name = pytest.mark.parametrize("name", CASES)


@jax.jit
def state(loss, preds, batch, mask):
    return resolve(loss).from_context(Context(preds=preds, batch=batch, mask=mask))


@jax.jit
def mean_and_gradients(loss, preds, batch, mask):
    def mean(preds, floats):
        return state(loss, preds, batch if floats is None else floats, mask).mean()

    floats = batch if jnp.issubdtype(batch.dtype, jnp.floating) else None
    return jax.value_and_grad(mean, argnums=(0, 1))(preds, floats)


@by_name
def test_equals_its_reference_on_ragged_data(name):
    case = CASES[name]
    for seed in range(20):
        preds, batch = case.draw(seed)
        mask = np.random.default_rng(seed).random(ROWS) > 0.4
        mask[seed % ROWS] = True
        if batch.dtype == np.float32:
            batch = np.where(mask.reshape(-1, *[1] * (batch.ndim - 1)), batch, np.float32(np.nan))
        kept = (x[mask] if x.dtype == np.int32 else x[mask].astype(np.float64) for x in (preds, batch))
        values = case.reference(*kept)
        result = state(case.loss, preds, batch, mask)
        np.testing.assert_allclose(result.compute(), values.mean(), rtol=1e-5, atol=1e-6)
        assert result.count == mask.sum()


def spoilt(array, mask, junk, label):
    wrong = array.dtype.type(label if array.dtype == np.int32 else junk)
    return np.where(mask.reshape(-1, *[1] * (array.ndim - 1)), array, wrong)


@by_name
@settings(max_examples=10)
@given(
    seed=st.integers(0, 999),
    junk=st.sampled_from([np.nan, np.inf, -np.inf, 1e38, 0.0]),
    label=st.sampled_from([-1, -100, 99]),
    kept=st.sampled_from([1, 4]),
)
def test_masked_rows_change_neither_value_nor_gradient(name, seed, junk, label, kept):  # case 23
    case = CASES[name]
    preds, batch = case.draw(seed)
    mask = np.random.default_rng(seed).permutation(ROWS) < kept
    value, gradients = mean_and_gradients(case.loss, preds, batch, mask)
    broken = (spoilt(x, mask, junk, label) for x in (preds, batch))
    same, same_gradients = mean_and_gradients(case.loss, *broken, mask)
    assert same == value
    jax.tree.map(np.testing.assert_array_equal, same_gradients, gradients)

    expected, of_subset = mean_and_gradients(case.loss, preds[mask], batch[mask], np.ones(kept, bool))
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    for gradient, own in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_subset), strict=True):
        np.testing.assert_allclose(gradient[mask], own, rtol=1e-4, atol=1e-6)
        assert (np.asarray(gradient)[~mask] == 0).all()


@by_name
def test_rows_of_padding_and_rows_of_a_mask_of_its_own_are_the_same(name):
    case = CASES[name]
    preds, batch = case.draw(0)
    mask, real = np.arange(ROWS) % 3 > 0, np.arange(ROWS) < 5
    own = dataclasses.replace(case.loss, mask="extra")

    @jax.jit
    def mean_and_gradient(preds, batch):
        def mean(preds):
            return own.from_context(Context(preds=preds, batch=batch, mask=real, extra=mask)).mean()

        return jax.value_and_grad(mean)(preds)

    expected, (gradient, _) = mean_and_gradients(case.loss, preds, batch, mask & real)
    value, own_gradient = mean_and_gradient(*(spoilt(x, mask & real, np.nan, -1) for x in (preds, batch)))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(own_gradient, gradient, rtol=1e-5, atol=1e-7)


@by_name
def test_a_batch_without_rows_contributes_nothing(name):  # case 22
    case = CASES[name]
    preds, batch = (np.full_like(x, -1 if x.dtype == np.int32 else np.nan) for x in case.draw(0))
    none = np.zeros(ROWS, bool)
    value, gradients = mean_and_gradients(case.loss, preds, batch, none)
    assert value == 0
    assert all((gradient == 0).all() for gradient in jax.tree.leaves(gradients))
    some = state(case.loss, *case.draw(1), ~none)
    merged = some | state(case.loss, preds, batch, none)
    assert (merged.total, merged.count) == (some.total, some.count)


ADDITIVE = [name for name, case in CASES.items() if not case.couples_rows]


@pytest.mark.parametrize("name", ADDITIVE)
@settings(max_examples=10)
@given(seed=st.integers(0, 999), whole_numbers=st.booleans())
def test_the_state_of_all_rows_is_the_merged_state(name, seed, whole_numbers):
    case = CASES[name]
    preds, batch = case.draw(seed)
    exact = whole_numbers and name in ("absolute", "squared", "value")
    if exact:  # three elements of a row are averaged: multiples of 3
        preds, batch = np.round(preds * 4) * 3, np.round(batch * 4) * 3
    mask = np.random.default_rng(seed).random(ROWS) > 0.3
    whole = state(case.loss, preds, batch, mask)
    parts = [state(case.loss, preds[rows], batch[rows], mask[rows]) for rows in (slice(0, 2), slice(2, ROWS))]
    merged = functools.reduce(type(whole).merge, parts)
    assert merged.count == whole.count
    assert np.isclose(merged.total, whole.total, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("name", ADDITIVE)
def test_the_same_under_vmap_and_scan_of_micro_batches(name):
    case = CASES[name]
    mask = np.array([True, True, False, True, False, False])  # the last micro-batch has no rows
    data = (*case.draw(0), mask)
    whole = state(case.loss, *data)

    @jax.jit
    def both(loss, micro):
        def merge(so_far, one):
            return so_far.merge(state(loss, *one)), None

        first, rest = [x[0] for x in micro], [x[1:] for x in micro]
        return jax.vmap(state, (None, 0, 0, 0))(loss, *micro), jax.lax.scan(merge, state(loss, *first), rest)[0]

    mapped, scanned = both(case.loss, tuple(x.reshape(3, 2, *x.shape[1:]) for x in data))
    for total, count in [(mapped.total.sum(), mapped.count.sum()), (scanned.total, scanned.count)]:
        assert count == whole.count
        np.testing.assert_allclose(total, whole.total, rtol=1e-5)


@by_name
def test_the_same_on_eight_devices(name):
    case = CASES[name]
    data = (*case.draw(0, 8), np.arange(8) % 3 > 0)
    rows = jax.NamedSharding(jax.make_mesh((8,), ("b",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("b"))
    spread = state(case.loss, *jax.device_put(data, rows))
    alone = state(case.loss, *data)
    assert spread.count == alone.count
    np.testing.assert_allclose(spread.total, alone.total, rtol=1e-5)


def test_rows_that_are_coupled_do_not_add_up():
    """So that the cases above are not additive for want of coupling."""
    case = CASES["contrastive"]
    preds, batch = case.draw(0)
    whole = state(case.loss, preds, batch, np.ones(ROWS, bool))
    parts = [state(case.loss, preds[rows], batch[rows], np.ones(3, bool)) for rows in (slice(0, 3), slice(3, ROWS))]
    assert (parts[0] | parts[1]).mean() < whole.mean() - 0.1


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.loss.depends_on == "element"])
def test_masked_elements_of_real_rows_change_nothing(name):
    case = CASES[name]
    generator = np.random.default_rng(0)
    drawn = [case.draw(seed, 3) for seed in range(2)]
    preds, batch = (np.stack(parts) for parts in zip(*drawn, strict=True))  # two rows of three tokens
    keep = np.array([[True, False, True], [False, False, True]])
    flat = np.concatenate([preds[keep]]), np.concatenate([batch[keep]])
    expected, (gradient, _) = mean_and_gradients(case.loss, *flat, np.ones(3, bool))
    tokens = dataclasses.replace(case.loss, mask="extra")

    def mean(preds, batch):
        return tokens.from_context(Context(preds=preds, batch=batch, mask=np.ones(2, bool), extra=keep)).mean()

    def broken(x):
        wrong = x.dtype.type(-1 if x.dtype == np.int32 else generator.choice([np.nan, np.inf]))
        return np.where(keep.reshape(2, 3, *[1] * (x.ndim - 2)), x, wrong)

    value, own = jax.jit(jax.value_and_grad(mean))(broken(preds), broken(batch))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(own[keep], gradient, rtol=1e-4, atol=1e-6)
    assert (own[~keep] == 0).all()


@by_name
def test_a_half_precision_model_gets_a_float32_loss(name):
    case = CASES[name]
    preds, batch = case.draw(0)
    half = jnp.asarray(preds, jnp.bfloat16)
    result = state(case.loss, half, batch, np.ones(ROWS, bool))
    exact = state(case.loss, half.astype(jnp.float32), batch, np.ones(ROWS, bool))
    assert result.total.dtype == jnp.float32
    np.testing.assert_allclose(result.mean(), exact.mean(), rtol=1e-6)


CLASSES = [*dict.fromkeys(type(case.loss) for case in CASES.values()), ParameterL2]


@pytest.mark.parametrize("cls", CLASSES[:-1])  # parameters are any tree
def test_shape_rules(cls):
    ek.testing.check_shapes(cls, examples=15)


@pytest.mark.parametrize("cls", CLASSES)
def test_configs(cls):
    ek.testing.check_config(cls, examples=8)


def test_all_that_is_public_is_tested_here():
    public = {value for name, value in vars(ek.losses).items() if not name.startswith("_") and isinstance(value, type)}
    assert {cls for cls in public if issubclass(cls, Loss)} - {Loss} == set(CLASSES)
