"""What gradient accumulation refuses: all that would come out differently than on the whole batch."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import equikd as ek
from equikd.errors import ConfigError, WiringError
from tests.train._parts import Unmasked, make, rows_of, stepped
from tests.train._small import CLASSES, FEATURES


@pytest.mark.parametrize("count", [0, -1, True])
def test_a_number_of_micro_batches_is_an_int_of_at_least_one(count: Any) -> None:
    with pytest.raises(ConfigError, match="accumulate"):
        make(count).init()


def test_more_micro_batches_than_rows_are_refused(snapshot: Any) -> None:
    with pytest.raises(WiringError) as error:
        make(9, 8).init()
    snapshot("too_many", str(error.value))
    with pytest.raises(WiringError, match="at most 3"):
        stepped(make(4, 8), rows_of(3))


@ek.config.config
class Spread(ek.losses.Loss):
    """One number of all rows, without saying so."""

    preds: ek.KeyPath
    mask: ek.KeyPath | None = None

    def values(self, preds: Any) -> Any:
        return preds.std()


@ek.config.config
class Noisy(ek.losses.Loss):
    preds: ek.KeyPath
    key: ek.KeyPath = "key"

    def values(self, preds: Any, key: Any) -> Any:
        return (preds + jax.random.normal(key, preds.shape)).mean(-1)


@ek.config.config
class Both(ek.metrics.Metric):
    preds: ek.KeyPath
    grads: ek.KeyPath

    def from_values(self, preds: Any, grads: Any, mask: Any) -> Any:
        return ek.metrics.Average.of(preds[:, 0] * jnp.square(grads).sum(), mask)


WRONG = {
    "losses": {
        "contrast": ek.losses.Contrastive(queries="preds.a", keys="preds.b"),
        "own_mask": ek.losses.Value(value="preds.a", mask="preds.sure"),
        "noisy": Noisy(preds="preds.a"),
        "spread": Spread(preds="preds.a"),
        "first": ek.losses.Value(value="preds.a[0, 0]", mask=None),
    },
    "metrics": {
        "both": Both(preds="preds.a", grads="grads.weight"),
        "norm": ek.metrics.Norm(tree="preds.a"),
        "unmasked": Unmasked(preds="preds.a"),
        "wrapped": ek.metrics.SkipIfMissing(ek.metrics.Norm(tree="preds.a"), missing="preds.a"),
        "some": ek.metrics.Mean(values="preds.a[:3]", mask=None),
    },
}


class Many(eqx.Module):
    weight: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        self.weight = jax.random.normal(key, (FEATURES, CLASSES))

    def __call__(self, x: jax.Array) -> Any:
        out = x @ self.weight
        return {"a": out, "b": -out, "sure": out[0] > 0}


def test_what_would_come_out_differently_is_refused_all_at_once(snapshot: Any) -> None:
    metrics = {name: metric for name, metric in WRONG["metrics"].items() if name != "some"}
    with pytest.raises(WiringError) as error:
        make(3, 8, model=ek.lazy(Many)(), losses=WRONG["losses"], metrics=metrics).init()
    snapshot("refused", str(error.value))


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, owners in WRONG.items() for name in owners])
def test_each_is_refused_alone_and_runs_without_accumulation(part: str, name: str) -> None:
    fields = {"losses": {"ok": ek.losses.Value(value="preds.b")}} | {part: {name: WRONG[part][name]}}
    trainer = make(4 if name == "some" else 3, 8, model=ek.lazy(Many)(), **fields)
    state = ek.override(trainer, {"accumulate": 1}).init()
    with pytest.raises(WiringError, match=rf"{part}\.{name}"):
        trainer.init()
    with pytest.raises(WiringError, match=rf"{part}\.{name}"):  # by whatever door
        jax.eval_shape(lambda: ek.train.loss_and_gradients(trainer.in_step, state, rows_of(8)).grads)
