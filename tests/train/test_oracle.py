"""Every float leaf may change: nothing compiles, the result changes, and it is what a loop written by hand gives."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.examples.digits import Classifier, Digits, get_config, load
from equikd.losses import SoftmaxCrossEntropy, SquaredError
from equikd.optim import Linear, WarmupCosine
from equikd.tree import get, named_leaves
from tests.train import _oracle

STEPS, BATCH = 50, 32
CLOSE = 1e-5

# --- the digits example, its defaults spelled out -------------------------------------------------------------------

# Path of each float leaf -> (its name in the oracle, another value).
DIGITS = {
    "model.dropout": ("dropout", 0.3),
    "losses.ce.weight": ("weight", 0.7),
    "losses.ce.label_smoothing": ("label_smoothing", 0.1),
    "optimizer.learning_rate": ("learning_rate", 1e-3),
    "optimizer.b1": ("b1", 0.8),
    "optimizer.b2": ("b2", 0.97),
    "optimizer.eps": ("eps", 1e-3),
    "optimizer.eps_root": ("eps_root", 1e-4),
    "optimizer.weight_decay": ("weight_decay", 0.3),
}


@functools.cache
def digits() -> ek.Trainer:
    cfg = get_config(Digits(width=16, depth=1, batch_size=BATCH, num_steps=STEPS))
    return ek.override(ek.with_defaults(cfg), {"writers": (), "log_every": STEPS, "evals.test.every": STEPS})


def make_classifier(dropout: Any, key: Any) -> Classifier:
    return Classifier(64, 10, 16, 1, dropout, key=key)


def values_of(trainer: ek.Trainer, names: dict[str, tuple[str, float]]) -> dict[str, float]:
    return {name: get(trainer, path) for path, (name, _) in names.items()}


@functools.cache
def digits_oracle(trainer: ek.Trainer, exact: bool = False) -> _oracle.Outcome:
    data = {"train": load("train"), "test": load("test")}
    values = values_of(trainer, DIGITS)
    return _oracle.digits(make_classifier, values, batch_size=BATCH, steps=STEPS, exact=exact, **data)


@functools.cache
def trained(trainer: ek.Trainer) -> Any:
    return trainer.train()


def stepped(trainer: ek.Trainer, steps: int = STEPS) -> tuple[np.ndarray, Any]:
    """The loss of each step and the last state, through the public step."""
    state, losses = trainer.init(), []
    for _, batch in zip(range(steps), trainer.batches(state), strict=False):
        state, aux = ek.train.step(trainer, state, batch)
        losses.append(aux.loss)
    return np.array(losses), state


def parameters(model: Any) -> list[np.ndarray]:
    """Arrays of a model, the scalars among them (hyperparameters) left out: the oracle's are constants."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)) if leaf.ndim]


def test_the_digits_example_has_these_float_leaves() -> None:
    assert set(named_leaves(digits().in_step)) == set(DIGITS)


@pytest.mark.slow
@pytest.mark.parametrize("path", [None, *DIGITS])
def test_digits_any_float_leaf_changes_the_result_and_compiles_nothing(path: str | None, compilations: Any) -> None:
    before = trained(digits()).metrics
    stepped(digits(), 1)
    after = digits() if path is None else ek.override(digits(), {path: DIGITS[path][1]})
    compilations.clear()
    metrics = trained(after).metrics
    losses, _ = stepped(after)
    assert compilations.names == []
    if path is not None:
        assert metrics["train/loss"] != before["train/loss"]
        assert metrics["test/loss"] != before["test/loss"]
    oracle = digits_oracle(after)
    np.testing.assert_allclose(losses, oracle.losses, rtol=CLOSE)
    np.testing.assert_allclose(metrics["train/loss"], oracle.losses.mean(), rtol=CLOSE)
    np.testing.assert_allclose(metrics["test/loss"], oracle.test_loss, rtol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [3e-3, 1e-3])
def test_to_the_bit_where_only_the_learning_rate_is_traced(learning_rate: float, compilations: Any) -> None:
    narrow = ek.override(digits(), {"trace": ("optimizer.learning_rate",)})
    assert list(named_leaves(narrow.in_step)) == ["optimizer.learning_rate"]
    trained(narrow)
    after = ek.override(narrow, {"optimizer.learning_rate": learning_rate})
    compilations.clear()
    result = trained(after)
    assert compilations.names == []
    oracle = digits_oracle(after, exact=True)
    losses, state = stepped(after)
    np.testing.assert_array_equal(losses, oracle.losses)
    for model in (result.model, state.model):
        for ours, theirs in zip(parameters(model), parameters(oracle.model), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    adam = [leaf for leaf in jax.tree.leaves(result.state.opt_state) if eqx.is_array(leaf)]
    for ours, theirs in zip(adam, jax.tree.leaves(oracle.opt_state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- a second experiment: schedules, two losses, a chain of optimizers ----------------------------------------------

ROWS = 96
_random = np.random.default_rng(5)
DATA = {
    "x": _random.normal(size=(ROWS, 6)).astype(np.float32),
    "label": _random.integers(0, 3, ROWS).astype(np.int32),
    "code": _random.normal(size=(ROWS, 2)).astype(np.float32),
}

SCHEDULED = {
    "model.dropout": ("dropout", 0.4),
    "losses.ce.weight": ("weight", 0.4),
    "losses.ce.label_smoothing": ("label_smoothing", 0.2),
    "losses.code.weight.init_value": ("fall.init", 2.0),
    "losses.code.weight.end_value": ("fall.end", 0.5),
    "losses.code.weight.transition_begin": ("fall.begin", 10),
    "optimizer[0].max_norm": ("max_norm", 0.1),
    "optimizer[1].b1": ("b1", 0.8),
    "optimizer[1].b2": ("b2", 0.97),
    "optimizer[1].eps": ("eps", 1e-2),
    "optimizer[1].eps_root": ("eps_root", 1e-3),
    "optimizer[2].decay": ("momentum", 0.2),
    "optimizer[3].weight_decay": ("weight_decay", 0.4),
    "optimizer[4].learning_rate.init_value": ("init", 2e-3),
    "optimizer[4].learning_rate.peak_value": ("peak", 2e-2),
    "optimizer[4].learning_rate.end_value": ("end", 1e-3),
    "optimizer[4].learning_rate.exponent": ("exponent", 2.0),
    "optimizer[4].learning_rate.warmup_steps": ("warmup", 20),
}


class TwoHeads(eqx.Module):
    body: eqx.nn.Linear
    heads: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, dropout: float, *, key: Any) -> None:
        body, heads = jax.random.split(key)
        self.body = eqx.nn.Linear(6, 8, key=body)
        self.heads = eqx.nn.Linear(8, 5, key=heads)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(self, x: Any, *, key: Any = None) -> dict[str, Any]:
        out = self.heads(self.dropout(jnp.tanh(self.body(x)), key=key))
        return {"logits": out[:3], "code": out[3:]}


@functools.cache
def scheduled() -> ek.Trainer:
    rate = WarmupCosine(1e-4, 1e-2, warmup_steps=10, decay_steps=ek.ref("num_steps"), end_value=1e-4)
    return ek.Trainer(
        model=ek.lazy(TwoHeads)(dropout=0.0),
        inputs={"x": "batch.x"},
        losses={
            "ce": SoftmaxCrossEntropy(logits="preds.logits", labels="batch.label", weight=0.9, label_smoothing=0.05),
            "code": SquaredError(
                preds="preds.code", targets="batch.code", weight=Linear(1.0, 0.1, transition_steps=ek.ref("num_steps"))
            ),
        },
        optimizer=ek.lazy(optax.chain)(
            ek.lazy(optax.clip_by_global_norm)(max_norm=0.5),
            ek.lazy(optax.scale_by_adam)(b1=0.9, b2=0.99, eps=1e-4, eps_root=1e-6),
            ek.lazy(optax.trace)(decay=0.5),
            ek.lazy(optax.add_decayed_weights)(weight_decay=0.01),
            ek.lazy(optax.scale_by_learning_rate)(learning_rate=rate),
        ),
        train_data=ek.data.InMemory(DATA, batch_size=BATCH),
        num_steps=STEPS,
        log_every=STEPS,
        writers=(),
    )


def scheduled_oracle(trainer: ek.Trainer) -> _oracle.Outcome:
    values = values_of(trainer, SCHEDULED)
    return _oracle.scheduled(TwoHeads, values, data=DATA, batch_size=BATCH, steps=trainer.num_steps)


def test_the_second_experiment_has_these_leaves() -> None:
    read_num_steps = {"optimizer[4].learning_rate.decay_steps", "losses.code.weight.transition_steps"}
    assert set(named_leaves(scheduled().in_step)) == {*SCHEDULED, *read_num_steps}


@pytest.mark.slow
@pytest.mark.parametrize("path", [None, *SCHEDULED, "num_steps"])
def test_any_leaf_of_a_schedule_or_chain_changes_the_result_and_compiles_nothing(
    path: str | None, compilations: Any
) -> None:
    before = trained(scheduled())
    stepped(scheduled(), 1)
    new = {} if path is None else {path: 40 if path == "num_steps" else SCHEDULED[path][1]}
    after = ek.override(scheduled(), new)
    compilations.clear()
    result = trained(after)
    losses, _ = stepped(after, after.num_steps)
    assert compilations.names == []
    if path is not None:
        assert result.metrics["train/loss"] != before.metrics["train/loss"]
    oracle = scheduled_oracle(after)
    assert int(result.state.step) == len(oracle.losses)
    np.testing.assert_allclose(losses, oracle.losses, rtol=CLOSE)
    np.testing.assert_allclose(result.metrics["train/loss"], oracle.losses.mean(), rtol=CLOSE)


# --- the functional core --------------------------------------------------------------------------------------------


@ek.config.config
class Hyper:
    dropout: float = 0.1
    weight: float = 1.0
    label_smoothing: float = 0.0
    learning_rate: float = 3e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 1e-4


def core_loss(model: Any, batch: Any, hp: Hyper, key: Any) -> Any:
    def logits(x: Any, key: Any) -> Any:
        features, keys = x.reshape(-1), jax.random.split(key, len(model.hidden))
        for layer, layer_key in zip(model.hidden, keys, strict=True):
            features = eqx.nn.Dropout(hp.dropout)(jax.nn.relu(layer(features)), key=layer_key)
        return model.output(features)

    scores = jax.vmap(logits)(batch["image"], jax.random.split(key, BATCH))
    targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), hp.label_smoothing)
    return hp.weight * optax.softmax_cross_entropy(scores, targets).mean()


def core_optimizer(hp: Hyper) -> Any:
    rest = {name: getattr(hp, name) for name in ("b1", "b2", "eps", "eps_root", "weight_decay")}
    return optax.adamw(hp.learning_rate, **rest)


core_init, core_step = ek.train.make_step(core_loss, optimizer=core_optimizer)


def core_losses(hp: Hyper, steps: int = STEPS) -> np.ndarray:
    model_key, run_key = _oracle.keys(0)
    state, losses = core_init(hp, make_classifier(0.0, model_key), run_key), []
    for _, batch in zip(range(steps), _oracle.batches(load("train"), BATCH, 0), strict=False):
        state, aux = core_step(hp, state, batch)
        losses.append(aux.loss)
    return np.array(losses)


@pytest.mark.parametrize("path", [None, *DIGITS])
def test_the_functional_core_does_the_same(path: str | None, compilations: Any) -> None:
    core_losses(Hyper(), 2)
    changed = {} if path is None else {DIGITS[path][0]: DIGITS[path][1]}
    compilations.clear()
    losses = core_losses(Hyper(**changed))
    assert compilations.names == []
    after = digits() if path is None else ek.override(digits(), {path: DIGITS[path][1]})
    np.testing.assert_allclose(losses, digits_oracle(after).losses, rtol=CLOSE)
