"""Axis names of a step: `b` and those of a typed batch are shared by model, losses and metrics; others are local."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equikd as ek
from equikd.errors import WiringError
from equikd.typing import Array, Bool, Float, Int, typechecked
from tests.train._small import BATCH, CLASSES, FEATURES, ROWS, arrays, quick


class Halving(eqx.Module):
    """Takes whole batches, and loses every other row."""

    linear: eqx.nn.Linear
    keep: int = eqx.field(static=True)

    def __init__(self, keep: int, *, key: jax.Array) -> None:
        self.linear, self.keep = eqx.nn.Linear(FEATURES, CLASSES, key=key), keep

    @typechecked
    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, "rows k"]:
        return jax.vmap(self.linear)(x)[:: self.keep]


@ek.config.config
class Distance(ek.losses.Loss):
    """Mean square of what it is given."""

    x: ek.KeyPath

    def values(self, x: Float[Array, " b *n"]) -> Float[Array, " b"]:
        return (x**2).reshape(x.shape[0], -1).sum(1)


def test_a_model_that_loses_rows_is_told_the_size_of_the_batch(snapshot: Any) -> None:
    def make(keep: int) -> ek.Trainer:
        model = ek.lazy(Halving)(keep)
        return quick(model, per_example=False, losses={"a": Distance(x="preds")}, metrics={}, num_steps=2)

    make(1).train()
    with pytest.raises(WiringError) as error:
        make(2).train()
    snapshot("rows_are_lost", str(error.value))


class Sequences(eqx.Module):
    """A typed batch."""

    tokens: Float[Array, "b t d"]
    label: Int[Array, " b"]
    real: Bool[Array, "b t"]


def sequences(length: int = 5, real: int | None = None) -> Sequences:
    draw = np.random.default_rng(0)
    return Sequences(
        draw.normal(size=(ROWS, length, FEATURES)).astype(np.float32),
        draw.integers(0, CLASSES, ROWS).astype(np.int32),
        np.ones((ROWS, real or length), bool),
    )


class Pooled(eqx.Module):
    """One example: a sequence in, scores and rows out, fewer of them with `shorten`."""

    inner: eqx.nn.Linear
    outer: eqx.nn.Linear
    shorten: int = eqx.field(static=True, default=0)

    def __init__(self, shorten: int = 0, *, key: jax.Array) -> None:
        self.inner, self.outer = eqx.nn.Linear(FEATURES, 7, key=key), eqx.nn.Linear(7, CLASSES, key=key)
        self.shorten = shorten

    @typechecked
    def __call__(self, x: Float[Array, "n i"], real: Bool[Array, " n"]) -> dict[str, Array]:
        x = self.layer(self.inner, x)
        x = self.layer(self.outer, x)  # `t` and `d` are other sizes in these calls than in the batch
        return {"scores": x.mean(0) * real.any(), "rows": x[self.shorten :]}

    @typechecked
    def layer(self, f: Any, x: Float[Array, "t d"]) -> Float[Array, "t b"]:
        return jax.vmap(f)(x)


@ek.config.config
class EachToken(ek.losses.Loss):
    """Mean square of something for each token."""

    x: ek.KeyPath

    def values(self, x: Float[Array, "b t d2"]) -> Float[Array, " b"]:
        return (x**2).mean((1, 2))


def typed(model: Any, data: Sequences, **fields: Any) -> ek.Trainer:
    fields = {"inputs": {"x": "batch.tokens", "real": "batch.real"}, "num_steps": 2, "metrics": {}} | fields
    fields["losses"] = {"each": EachToken(x="preds.rows"), "scores": Distance(x="preds.scores")}
    return quick(model, train_data=ek.data.InMemory(data, batch_size=BATCH), **fields)


def test_a_typed_batch_shares_its_names_with_model_and_losses(snapshot: Any) -> None:
    typed(ek.lazy(Pooled)(), sequences()).train()
    with pytest.raises(WiringError) as error:
        typed(ek.lazy(Pooled)(shorten=2), sequences()).train()
    snapshot("length_in_a_loss", str(error.value))


def test_a_batch_that_does_not_fit_its_annotations(snapshot: Any) -> None:
    with pytest.raises(WiringError) as error:
        typed(ek.lazy(Pooled)(), sequences(real=4)).train()
    snapshot("batch_against_itself", str(error.value))


class OwnLetters(eqx.Module):
    """A model for one example may use the letter `b` for what it likes: it does not see the batch axis."""

    linear: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(FEATURES, CLASSES + 2, key=key)

    @typechecked
    def __call__(self, x: Float[Array, " b"]) -> tuple[Float[Array, " k"], Float[Array, " n"]]:
        both = self.linear(x)
        return both[:CLASSES], both[CLASSES:]


@ek.config.config
class WeightNorm(ek.losses.Loss):
    """A penalty: what it is given has no batch axis, and its letters mean what it likes."""

    x: ek.KeyPath

    def values(self, x: Float[Array, "b d"]) -> Float[Array, ""]:
        return (x**2).sum()


def test_a_penalty_does_not_see_the_batch_axis() -> None:
    losses = {"a": Distance(x="preds"), "b": WeightNorm(x="model.first.weight", mask=None)}
    quick(losses=losses, metrics={}, num_steps=1).train()


def test_letters_are_local_to_a_call() -> None:
    losses = {"ten": Distance(x="preds[0]"), "five": Distance(x="preds[1]")}
    metrics = {"norm": ek.metrics.Mean(values="preds[1]")}
    result = quick(ek.lazy(OwnLetters)(), losses=losses, metrics=metrics, num_steps=2).train()
    assert np.isfinite(result.metrics["train/loss"])


def test_checks_can_be_switched_off(monkeypatch: Any) -> None:
    monkeypatch.setenv("EQUIKD_TYPECHECK", "0")
    data = arrays() | {"extra": np.ones((ROWS, 3, 2), np.float32)}

    @ek.config.config
    class Wrong(ek.losses.Loss):
        x: ek.KeyPath

        def values(self, x: Float[Array, "b n n"]) -> Float[Array, " b"]:
            return jnp.sum(x, axis=(1, 2))

    losses = {"a": Wrong(x="batch.extra"), "b": Distance(x="preds")}
    trainer = quick(losses=losses, metrics={}, train_data=ek.data.InMemory(data, batch_size=BATCH), num_steps=1)
    assert trainer.train().metrics["train/losses/a"] == 6.0
