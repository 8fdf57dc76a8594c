"""A metric without a mask is refused on padded data, and only there."""

import equinox as eqx
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import WiringError
from equikd.typing import Array, Float


@ek.config.config
class Unmasked(ek.metrics.Metric):
    preds: ek.KeyPath

    def from_values(self, preds: Float[Array, "b d"]) -> ek.metrics.Average:
        return ek.metrics.Average.of(preds.mean(-1))


def rows(count):
    return {"x": np.ones((count, 2), np.float32)}


def make(train_data, eval_data=None):
    return ek.Trainer(
        model=ek.lazy(eqx.nn.Linear)(2, 2),
        inputs={"x": "batch.x"},
        losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        metrics={"plain": Unmasked(preds="preds")},
        optimizer=ek.lazy(optax.sgd)(0.1),
        train_data=train_data,
        num_steps=3,
        evals={} if eval_data is None else {"test": ek.evals.Eval(data=eval_data)},
        writers=(),
    )


def padded_in_the_second():
    for real in (4, 2, 4):
        yield ek.data.Batch(rows(4), np.arange(4) < real)


def test_refused_where_padding_is_known_beforehand(snapshot, tmp_path):
    whole = ek.data.InMemory(rows(8), batch_size=4)
    ragged = ek.data.InMemory(rows(10), batch_size=4)
    make(whole, whole).train()
    make(ragged).train()  # the ragged end is dropped
    texts = []
    for trainer in (make(whole, ragged), make(ek.override(ragged, {"drop_remainder": False}))):
        with pytest.raises(WiringError) as error:
            trainer.train(tmp_path / "run")
        texts.append(str(error.value))
    assert not (tmp_path / "run").exists()
    snapshot("known", "\n".join(texts))


def test_refused_when_a_batch_shows_it(snapshot):
    with pytest.raises(WiringError) as error:
        make(padded_in_the_second).train()
    snapshot("shown", str(error.value))
