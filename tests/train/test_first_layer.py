"""A run that stops at a number that is not finite says where in the model it arose."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.train import _layers
from tests.train._small import BATCH, CLASSES, FEATURES, arrays, quick

BAD_ROW = 1e4


class Net(eqx.Module):
    """Stacked blocks; a large number goes wrong in the second one's power."""

    stem: eqx.nn.Linear
    blocks: "Block"
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        first, second, third = jax.random.split(key, 3)
        self.stem = eqx.nn.Linear(FEATURES, FEATURES, use_bias=False, key=first)
        self.blocks = eqx.filter_vmap(lambda key: Block(key=key))(jax.random.split(second, 3))
        self.head = eqx.nn.Linear(FEATURES, CLASSES, key=third)

    def __call__(self, x: jax.Array) -> jax.Array:
        parts, static = eqx.partition(self.blocks, eqx.is_array)
        h = jax.lax.scan(lambda h, part: (eqx.combine(part, static)(h), None), self.stem(x), parts)[0]
        return self.head(jnp.tanh(h))


class Block(eqx.Module):
    before: eqx.nn.Linear
    power: "Power"
    after: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        self.before, self.after = (eqx.nn.Linear(FEATURES, FEATURES, key=each) for each in jax.random.split(key))
        self.power = Power()

    def __call__(self, h: jax.Array) -> jax.Array:
        return self.after(self.power(self.before(h)))


class Power(eqx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.where(jnp.abs(x) > 1, x**8, x)


def data(**changed: Any) -> Any:
    columns = arrays(4 * BATCH)
    for name, (row, value) in changed.items():
        columns[name] = columns[name].copy()
        columns[name][row] = value
    return ek.data.InMemory(columns, batch_size=BATCH, shuffle=False)


def make(**fields: Any) -> ek.Trainer:
    made: dict[str, Any] = {
        "model": ek.lazy(Net)(),
        "train_data": data(x=(2 * BATCH + 3, BAD_ROW)),
        "optimizer": ek.lazy(optax.sgd)(1e-3),
        "metrics": {},
        "num_steps": 8,
        "log_every": 2,
    }
    return quick(**made | fields)


def stopped(trainer: ek.Trainer, *args: Any) -> str:
    with pytest.raises(ek.errors.NonFiniteError) as caught:
        trainer.train(*args)
    assert caught.value.step == 3
    return str(caught.value)


@pytest.mark.slow
def test_the_first_layer_and_its_iteration_are_named(snapshot: Any) -> None:
    text = stopped(make())
    snapshot("layer", text)
    assert "interms.blocks.power[1] is the first" in text


def test_data_that_is_not_finite_is_named_instead(snapshot: Any) -> None:
    snapshot("batch", stopped(make(train_data=data(x=(2 * BATCH + 3, np.nan)))))


def test_finite_layers_point_at_the_loss(snapshot: Any) -> None:
    @ek.config.config
    class Log(ek.losses.Loss):
        x: ek.KeyPath

        def values(self, x: jax.Array) -> jax.Array:
            return jnp.log(jnp.where(x[:, 0] > 1e3, -1.0, 1.0))

    losses = {"log": Log(x="batch.x"), "ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label")}
    wide = ek.lazy(eqx.nn.Linear)(FEATURES, CLASSES)
    snapshot("finite", stopped(make(model=wide, losses=losses)))


class Masked(eqx.Module):
    """A mask of -inf that is meant, and a logarithm that goes wrong for the bad row."""

    mask: "Mask"
    log: "Log"
    head: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        self.mask, self.log, self.head = Mask(), Log(), eqx.nn.Linear(FEATURES, CLASSES, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jax.nn.softmax(self.mask(x)) * self.log(x))


class Mask(eqx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x.at[1:].set(-jnp.inf)


class Log(eqx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.log(1 + BAD_ROW / 2 - x)


def test_infinite_numbers_that_are_meant_are_not_blamed_alone() -> None:
    text = stopped(make(model=ek.lazy(Masked)()))
    assert "interms.mask is the first that returns inf, interms.log is the first that returns nan" in text


class Repeated(eqx.Module):
    """In each iteration of a scan: a layer, one that goes wrong, and the first one again."""

    outer: eqx.nn.Linear
    wrong: "Wrong"

    def __init__(self, *, key: jax.Array) -> None:
        self.outer, self.wrong = eqx.nn.Linear(FEATURES, FEATURES, key=key), Wrong()

    def __call__(self, x: jax.Array) -> jax.Array:
        step = lambda h, _: (self.outer(self.wrong(jnp.tanh(self.outer(h)), x)), None)
        return jax.lax.scan(step, x, None, length=2)[0][:CLASSES]


class Wrong(eqx.Module):
    def __call__(self, h: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(x > BAD_ROW / 2, jnp.nan, h)


def test_calls_within_one_iteration_come_in_their_order() -> None:
    assert "interms.wrong[0] is the first that returns nan" in stopped(make(model=ek.lazy(Repeated)()))


def test_parameters_that_are_bad_name_no_layer() -> None:
    trainer = make(optimizer=ek.lazy(optax.sgd)(float("inf")), train_data=data())
    with pytest.raises(ek.errors.NonFiniteError) as caught:
        trainer.train()
    assert caught.value.path.startswith("params")
    assert "layer:" not in str(caught.value)


def test_in_a_run_directory_and_after_returns(tmp_path: Any) -> None:
    trainer = make(guard=ek.train.RollBack(max_returns=1))
    text = stopped(trainer, tmp_path / "run")
    assert "after 1 returns" in text
    assert "interms.blocks.power[1] is the first" in text
    assert str(tmp_path) in text


def test_what_cannot_be_read_again_or_run_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no second time")

    with_layer = stopped(make())
    monkeypatch.setattr(_layers, "statistics", fails)
    without = stopped(make())
    assert without == "\n".join(line for line in with_layer.splitlines() if "layer:" not in line)


def test_good_runs_make_no_further_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("looked at layers")

    monkeypatch.setattr(_layers, "statistics", never)
    make(train_data=data()).train()
