"""Areas under curves of a whole run: scikit-learn's of all rows, over an interval and in an eval."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

import equikd as ek
from equikd.data import InMemory
from tests.train._small import CLASSES, arrays, quick

REFERENCES = {"auc": roc_auc_score, "ap": average_precision_score}
ROWS, BATCH = 90, 16  # the last batch of an epoch holds 10 rows


def data(rows=ROWS, seed=0):
    """With a label and a score with ties for each class."""
    made = arrays(rows, seed)
    positive = made["label"][:, None] == np.arange(CLASSES)
    score = np.random.default_rng(seed).normal(positive, 1).round(1).astype(np.float32)
    return made | {"positive": positive, "score": score}


def areas(preds, **options):
    places = {"preds": preds, "labels": "batch.positive", "bins": None}
    return {"auc": ek.metrics.RocAuc(**places, **options), "ap": ek.metrics.AveragePrecision(**places, **options)}


def make(**fields):
    train = InMemory(data(), batch_size=BATCH, drop_remainder=False)
    return quick(**{"metrics": {}, "train_data": train, "num_steps": 3, "log_every": 3} | fields)


@pytest.mark.parametrize("sizes", [(7,), pytest.param((1, 16, 130, 200), marks=pytest.mark.slow)], ids=["7", "more"])
def test_an_eval_is_sklearn_on_all_rows_whatever_the_batch_size(sizes):
    test = data(130, seed=7)
    metrics = {f"{name}{size}": one for size in (None, 390) for name, one in areas("batch.score", size=size).items()}
    evals = {str(n): ek.evals.Eval(data=InMemory(test, batch_size=n), metrics=metrics) for n in sizes}
    results = make(evals=evals).train().metrics
    for name, reference in REFERENCES.items():
        expected = reference(test["positive"].ravel(), test["score"].ravel())
        for split in evals:
            got = [results[f"{split}/{name}{size}"] for size in (None, 390)]
            np.testing.assert_allclose(got, [expected] * 2, rtol=1e-12, err_msg=f"{name} of {split}")


def test_a_training_interval_is_sklearn_on_its_rows():
    trainer = make(metrics=areas("preds", size=ROWS * CLASSES), num_steps=12, log_every=6)  # 12 batches are two epochs
    state, expected, labels, preds = trainer.init(), [], [], []
    batches = trainer.batches(state)
    for number in range(1, 13):
        batch = next(batches)
        mask = np.asarray(batch.mask)
        labels.append(np.asarray(batch.data["positive"])[mask])
        preds.append(np.asarray(ek.train.predict(trainer, state, batch))[mask])  # before the update; no dropout
        state, _ = ek.train.step(trainer, state, batch)
        if number % 6 == 0:
            rows = np.concatenate(labels).ravel(), np.concatenate(preds).ravel()
            assert len(rows[0]) == ROWS * CLASSES
            expected.append({name: reference(*rows) for name, reference in REFERENCES.items()})
            labels, preds = [], []
    records = trainer.train().history
    assert [record.step for record in records] == [6, 12]
    for record, values in zip(records, expected, strict=True):
        for name, value in values.items():
            # Two runs of a model may round apart, and so order two scores that are almost equal.
            np.testing.assert_allclose(record.metrics[name], value, rtol=2e-4, err_msg=name)


def test_one_score_too_many_ends_a_run():
    with pytest.raises(OverflowError, match=r"Scores\.rows: more rows have come than the 143 that fit"):
        make(metrics=areas("preds", size=3 * BATCH * CLASSES - 1)).train()
