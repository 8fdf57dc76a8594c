"""What a run reports, over an interval and in an eval, is the metric of all those rows at once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.data import Batch, InMemory
from equikd.tree import named_leaves
from tests.train._small import CLASSES, arrays, quick

PREDS = {"preds": "preds", "labels": "batch.label"}
LOGITS = {"logits": "preds", "labels": "batch.label"}
ERRORS = {"preds": "preds", "targets": "batch.y"}
METRICS = {
    "accuracy": ek.metrics.Accuracy(**PREDS),
    "top2": ek.metrics.TopKAccuracy(**PREDS, k=2),
    "f1": ek.metrics.F1(**PREDS),
    "perplexity": ek.metrics.Perplexity(**LOGITS),
    "calibration": ek.metrics.ExpectedCalibrationError(**LOGITS),
    "rmse": ek.metrics.RootMeanSquaredError(**ERRORS),
    "r2": ek.metrics.R2(**ERRORS),
    "mean": ek.metrics.Mean("preds"),
    "std": ek.metrics.Std(values="preds"),
    "max": ek.metrics.Max("preds"),
    "sum": ek.metrics.Sum("preds"),
}
SOME = {name: METRICS[name] for name in ("accuracy", "std", "max")}  # of which steps compile in a second
SETS = pytest.mark.parametrize("metrics", [SOME, pytest.param(METRICS, marks=pytest.mark.slow)], ids=["some", "all"])
ROWS, BATCH = 90, 16  # the last batch of an epoch holds 10 rows


def data(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(seed + 1).normal(100, 1, (rows, CLASSES))
    return arrays(rows, seed) | {"y": noise.astype(np.float32)}


def make(metrics, **fields):
    train = InMemory(data(), batch_size=BATCH, drop_remainder=False)
    made = {"metrics": metrics, "train_data": train, "num_steps": 12, "log_every": 5}
    return quick(**made | fields)


def at_once(metrics, preds, rows):
    """Each metric, and the loss, of rows without padding, by result name."""
    context = ek.wiring.Context(preds=jnp.asarray(preds), batch=rows, mask=jnp.ones(len(preds), bool))
    states = {name: metric.from_context(context) for name, metric in metrics.items()}
    states["losses/ce"] = ek.losses.SoftmaxCrossEntropy(**LOGITS).from_context(context)
    results = {}
    for name, state in states.items():
        value = state.finalize().compute()
        parts = {f"{name}/{part}": leaf for part, leaf in named_leaves(value).items()}
        results |= parts if isinstance(value, dict) else {name: value}
    return results


def assert_equal(got, expected):
    assert set(expected) <= set(got)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def replayed(trainer, record_steps):
    """Step by step, by hand: for each interval the predictions and rows that counted, and how many did not."""
    state, seen, padded = trainer.init(), [], 0
    batches = trainer.batches(state)
    for number in range(1, record_steps[-1] + 1):
        batch = next(batches)
        mask = np.asarray(batch.mask)
        padded += (~mask).sum()
        preds = ek.train.predict(trainer, state, batch)  # of the parameters before the update; there is no dropout
        seen.append(jax.tree.map(lambda x, m=mask: np.asarray(x)[m], (preds, batch.data)))
        state, _ = ek.train.step(trainer, state, batch)
        if number in record_steps:
            yield (*jax.tree.map(lambda *parts: np.concatenate(parts), *seen), padded)
            seen, padded = [], 0


@SETS
def test_a_training_interval_is_its_batches_concatenated(metrics):  # case 17
    ends, sizes = ((5, 10, 12), [(80, 0), (74, 6), (26, 6)]) if metrics is METRICS else ((6, 12), [(90, 6)] * 2)
    trainer = make(metrics, log_every=ends[0])
    records = trainer.train().history
    assert [(record.split, record.step) for record in records] == [("train", end) for end in ends]
    for record, size, (preds, rows, padded) in zip(records, sizes, replayed(trainer, ends), strict=True):
        assert (len(preds), padded) == size
        assert_equal(record.metrics, at_once(metrics, preds, rows))


@SETS
def test_steps_without_rows_leave_no_trace(metrics):  # case 22
    """Every second batch is padding that holds nan: losses, gradients and metrics are those of the others."""

    def read():
        rows = data()
        nothing = {name: np.full_like(x[:BATCH], 99 if name == "label" else np.nan) for name, x in rows.items()}
        for start in range(0, 64, BATCH):
            yield Batch({name: column[start : start + BATCH] for name, column in rows.items()}, np.ones(BATCH, bool))
            yield Batch(nothing, np.zeros(BATCH, bool))

    trainer = make(metrics, train_data=read, num_steps=8, log_every=8)
    (record,) = trainer.train().history
    ((preds, rows, padded),) = replayed(trainer, (8,))
    assert (len(preds), padded) == (64, 64)
    assert np.isfinite(list(record.metrics.values())).all()
    assert_equal(record.metrics, at_once(metrics, preds, rows))


@SETS
def test_an_eval_is_that_of_all_rows_whatever_the_batch_size(metrics):  # case 25
    test, sizes = data(130, seed=7), (1, 7, 64, 130) if metrics is METRICS else (7,)
    evals = {str(size): ek.evals.Eval(data=InMemory(test, batch_size=size)) for size in sizes}
    result = make(metrics, evals=evals, num_steps=3).train()
    expected = at_once(metrics, result.predict(test), jax.tree.map(jnp.asarray, test))
    for size in evals:
        got = {name.removeprefix(f"{size}/"): value for name, value in result.metrics.items()}
        assert_equal(got, expected)


def test_a_step_in_which_nothing_counts_is_no_part_of_the_mean():  # case 22
    """Not even of `loss`, which over an interval is the mean of the steps' totals."""
    rows = {"x": np.ones((8, 2), np.float32), "y": np.zeros((8, 2), np.float32), "keep": np.arange(8) < 4}
    trainer = ek.Trainer(
        model=ek.lazy(eqx.nn.Linear)(2, 2),
        inputs={"x": "batch.x"},
        losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.y", mask="batch.keep", weight=2.0)},
        optimizer=ek.lazy(optax.sgd)(0.0),
        train_data=ek.data.InMemory(rows, batch_size=4, shuffle=False),
        num_steps=2,
        log_every=2,
        writers=(),
    )
    metrics = trainer.train().metrics
    assert metrics["train/losses/mse"] > 0
    assert metrics["train/loss"] == metrics["train/weighted/mse"] == 2 * metrics["train/losses/mse"]
