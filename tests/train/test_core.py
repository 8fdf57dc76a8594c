"""The functional core, and the laws that the public step, the stepper and the loop obey."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.data import as_batch
from equikd.errors import ConfigError
from tests.train._small import (
    BATCH,
    BatchNormed,
    Dropping,
    Plain,
    arrays,
    assert_same,
    differs,
    evaluated,
    leaves,
    quick,
)

# --- the functional core --------------------------------------------------------------------------------------------


@ek.config.config
class Hyper:
    learning_rate: float = 0.1
    weight: float = 2.0
    power: int = 1


def loss(model: Any, batch: Any, hp: Hyper, key: Any) -> Any:
    del key
    logits = jax.vmap(model)(batch["x"])
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return hp.weight * value**hp.power, {"logits": logits, "kind": "cross entropy"}


init, step = ek.train.make_step(loss, optimizer=lambda hp: optax.sgd(hp.learning_rate))
BATCHES = [{name: array[i : i + BATCH] for name, array in arrays().items()} for i in range(0, 96, BATCH)]


@functools.cache
def first_state() -> Any:
    return init(Hyper(), Plain(key=jax.random.key(0)), jax.random.key(1))


def by_hand(hp: Hyper, steps: int) -> tuple[Any, list[float]]:
    """Gradient descent, written out."""
    params, rest = eqx.partition(first_state().model, eqx.is_inexact_array)
    losses = []
    for batch in BATCHES[:steps]:
        of = lambda params, batch=batch: loss(eqx.combine(params, rest), batch, hp, None)[0]
        value, grads = jax.value_and_grad(of)(params)
        params = jax.tree.map(lambda p, g: p - hp.learning_rate * g, params, grads)
        losses.append(float(value))
    return eqx.combine(params, rest), losses


def test_the_core_is_gradient_descent_on_the_loss() -> None:
    state, losses = first_state(), []
    for batch in BATCHES[:3]:
        state, aux = step(Hyper(), state, batch)
        losses.append(aux.loss)
        assert aux.aux["kind"] == "cross entropy"  # what is no array passes through
        assert aux.aux["logits"].shape == (BATCH, 3)
    model, expected = by_hand(Hyper(), 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for ours, theirs in zip(leaves(state.model), leaves(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert int(state.step) == 3


def test_new_floats_compile_nothing_and_new_ints_once(compilations: Any) -> None:
    before, _ = step(Hyper(), first_state(), BATCHES[0])
    compilations.clear()
    for changed in (Hyper(learning_rate=0.3), Hyper(weight=1), Hyper(weight=0.25, learning_rate=1e-3)):
        start = init(changed, Plain(key=jax.random.key(0)), jax.random.key(1))
        after, _ = step(changed, start, BATCHES[0])
        assert differs(before.model, after.model)
    assert compilations.names == []
    step(Hyper(power=2), first_state(), BATCHES[0])
    step(Hyper(power=2, weight=0.5), first_state(), BATCHES[0])
    assert len(compilations.names) == 1


def test_the_state_is_a_fixed_point_from_the_first_step_on(compilations: Any) -> None:
    init, step = ek.train.make_step(loss, optimizer=lambda hp: optax.adam(hp.learning_rate))
    state = init(Hyper(), Plain(key=jax.random.key(0)), jax.random.key(1))
    first, _ = step(Hyper(), state, BATCHES[0])
    compilations.clear()
    for batch in BATCHES:
        first, _ = step(Hyper(), first, batch)
    assert compilations.names == []
    assert jax.tree.map(jax.typeof, eqx.filter(first, eqx.is_array)) == jax.tree.map(
        jax.typeof, eqx.filter(state, eqx.is_array)
    )


def test_the_core_maps_over_hyperparameters_and_compiles_once_for_all(compilations: Any) -> None:
    rates = [0.01, 0.1, 0.5]

    @eqx.filter_jit
    def population(hp: Hyper) -> Any:
        return eqx.filter_vmap(lambda hp: step(hp, first_state(), BATCHES[0]))(hp)

    def stacked(rates: list[float]) -> Hyper:
        return jax.tree.map(lambda *x: jnp.stack(x), *[Hyper(learning_rate=rate) for rate in rates])

    states, aux = population(stacked(rates))
    compilations.clear()
    population(stacked([0.2, 0.3, 0.4]))
    assert compilations.names == []
    assert aux.loss.shape == (3,)
    for index, rate in enumerate(rates):
        alone, _ = step(Hyper(learning_rate=rate), first_state(), BATCHES[0])
        for ours, theirs in zip(leaves(states.model), leaves(alone.model), strict=True):
            np.testing.assert_allclose(ours[index], theirs, rtol=1e-5, atol=1e-6)


def test_hyperparameters_may_hold_nodes_and_schedules(compilations: Any) -> None:
    @ek.config.config
    class Nested:
        optimizer: Any
        rate: ek.optim.Schedule

    def make(b1: float, start: float) -> Nested:
        return Nested(ek.lazy(optax.scale_by_adam)(b1=b1), ek.optim.Linear(start, 0.0, transition_steps=5))

    def optimizer(hp: Nested) -> Any:
        return optax.chain(hp.optimizer, optax.scale_by_learning_rate(hp.rate))

    def cross_entropy(model: Any, batch: Any, hp: Nested, key: Any) -> Any:
        del hp, key
        logits = jax.vmap(model)(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    init, step = ek.train.make_step(cross_entropy, optimizer=optimizer)
    final = []
    for values in ((0.9, 0.1), (0.5, 0.1), (0.9, 0.3)):
        state = init(make(*values), Plain(key=jax.random.key(0)), jax.random.key(1))
        for batch in BATCHES[:3]:
            state, aux = step(make(*values), state, batch)
        final.append(float(aux.loss))
        if len(final) == 1:
            compilations.clear()
    assert compilations.names == []
    assert len(set(final)) == 3


def test_the_core_scans_over_batches() -> None:
    dynamic, static = eqx.partition(first_state(), eqx.is_array)

    def body(dynamic: Any, batch: Any) -> Any:
        state, aux = step(Hyper(), eqx.combine(dynamic, static), batch)
        return eqx.filter(state, eqx.is_array), aux.loss

    stack = jax.tree.map(lambda *x: np.stack(x), *BATCHES[:3])
    _, losses = jax.lax.scan(body, dynamic, stack)
    np.testing.assert_allclose(losses, by_hand(Hyper(), 3)[1], rtol=1e-6)


def test_gradients_flow_through_the_hyperparameters() -> None:
    def second_loss(hp: Hyper) -> Any:
        state, _ = step(hp, first_state(), BATCHES[0])
        return step(hp, state, BATCHES[1])[1].loss

    grads = jax.grad(second_loss)(Hyper())
    params, rest = eqx.partition(first_state().model, eqx.is_inexact_array)
    of = lambda p, batch: loss(eqx.combine(p, rest), batch, Hyper(), None)[0]
    first = jax.grad(of)(params, BATCHES[0])
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, first)
    second = jax.grad(of)(moved, BATCHES[1])
    inner = sum(float((a * b).sum()) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    np.testing.assert_allclose(grads.learning_rate, -inner, rtol=1e-4)
    # The weight scales both the loss and the step before it: L(w) = w l(p - lr w g), and first = w g.
    expected = float(of(moved, BATCHES[1])) / 2.0 - 0.1 / 2.0 * inner
    np.testing.assert_allclose(grads.weight, expected, rtol=1e-4)


def test_dropout_follows_the_key_of_the_step() -> None:
    def loss(model: Any, batch: Any, hp: Hyper, key: Any) -> Any:
        keys = jax.random.split(key, BATCH)
        return jnp.mean(jax.vmap(lambda x, k: model(x, key=k))(batch["x"], keys) ** 2)

    init, step = ek.train.make_step(loss, optimizer=lambda hp: optax.sgd(0.0 * hp.learning_rate))
    state = init(Hyper(), Dropping(0.5, key=jax.random.key(0)), jax.random.key(7))
    keys = [jax.random.fold_in(jax.random.key(7), i) for i in range(2)]
    expected = [float(loss(state.model, BATCHES[0], Hyper(), key)) for key in keys]
    assert state.model.dropout.p == 0.5  # of a live model, Python floats are part of the program
    for value in expected:
        state, aux = step(Hyper(), state, BATCHES[0])
        np.testing.assert_allclose(aux.loss, value, rtol=1e-5)


def test_one_array_at_two_paths_is_refused() -> None:
    model = eqx.nn.Sequential([eqx.nn.Linear(3, 3, key=jax.random.key(0))] * 2)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.weight and at layers\[1\]\.weight"):
        init(Hyper(), model, jax.random.key(0))


# --- the public step, the stepper, the loop -------------------------------------------------------------------------

MODELS = {"dropout": ek.lazy(Dropping)(rate=0.25), "batch norm": ek.lazy(BatchNormed)()}


def stepped(trainer: ek.Trainer, steps: int) -> tuple[Any, list[Any]]:
    state, auxes = trainer.init(), []
    for _, batch in zip(range(steps), trainer.batches(state), strict=False):
        state, aux = ek.train.step(trainer, state, batch)
        auxes.append(aux)
    return state, auxes


def ragged(model: Any = None, **fields: Any) -> ek.Trainer:
    """Batches of 20 of 96 rows: each fifth has 16 real rows."""
    return quick(model, train_data=ek.data.InMemory(arrays(), batch_size=20, drop_remainder=False), **fields)


@pytest.mark.parametrize("steps", [1, 5, 12, 13])
def test_exactly_num_steps_updates(steps: int) -> None:
    result = quick(num_steps=steps, evals=evaluated()).train()
    assert int(result.state.step) == steps
    assert int(optax.tree_utils.tree_get(result.state.opt_state, "count")) == steps
    assert_same(result.state, stepped(quick(), steps)[0])


@pytest.mark.parametrize("kind", MODELS)
def test_the_stepper_equals_the_public_step_to_the_bit(kind: str) -> None:
    trainer = ragged(MODELS[kind])
    state, auxes = stepped(trainer, 7)
    stepper = ek.train.Stepper(trainer, trainer.init())
    for _, batch in zip(range(7), trainer.batches(trainer.init()), strict=False):
        stepper.step(batch)
    assert_same(stepper.state, state)
    assert_same(stepper.swap(), functools.reduce(lambda a, b: a.merge(b), auxes))


def test_swap_hands_out_the_steps_since_the_last_one() -> None:
    trainer = ragged()
    _, auxes = stepped(trainer, 6)
    stepper = ek.train.Stepper(trainer, trainer.init())
    batches = trainer.batches(trainer.init())
    for _ in range(2):
        stepper.step(next(batches))
    first = stepper.swap()
    nothing = stepper.swap()
    for _ in range(4):
        stepper.step(next(batches))
    assert_same(first, auxes[0].merge(auxes[1]))
    assert_same(stepper.swap(), functools.reduce(lambda a, b: a.merge(b), auxes[2:]))
    assert int(nothing.metrics["accuracy"].count) == 0


def test_a_bare_pytree_is_a_batch_of_real_rows() -> None:
    trainer = quick()
    state = trainer.init()
    batch = next(trainer.batches(state))
    assert_same(ek.train.step(trainer, state, batch.data), ek.train.step(trainer, state, batch))
    stepper = ek.train.Stepper(trainer, state)
    stepper.step(batch.data)
    assert_same(stepper.state, ek.train.step(trainer, state, batch)[0])


def test_the_stepper_takes_batches_of_another_size() -> None:
    trainer = quick()
    sizes = [16, 16, 8, 8, 16]
    batches = [{name: x[:size] for name, x in arrays().items()} for size in sizes]
    stepper, state = ek.train.Stepper(trainer, trainer.init()), trainer.init()
    for batch in batches:
        stepper.step(batch)
        state, _ = ek.train.step(trainer, state, batch)
    assert_same(stepper.state, state)
    assert int(stepper.swap().metrics["accuracy"].count) == sum(sizes)


def test_results_of_an_interval_are_those_over_all_its_rows() -> None:
    trainer = ragged(num_steps=5, log_every=5)
    result = trainer.train()
    state, rows, right, totals = trainer.init(), [], [], []
    for _, batch in zip(range(5), trainer.batches(state), strict=False):
        logits = np.asarray(jax.vmap(state.model)(batch.data["x"]))[batch.mask]
        labels = batch.data["label"][batch.mask]
        values = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
        rows.append(values)
        totals.append(values.mean())
        right.append(logits.argmax(-1) == labels)
        state, _ = ek.train.step(trainer, state, batch)
    assert [len(values) for values in rows] == [20, 20, 20, 20, 16]
    metrics = {name.removeprefix("train/"): value for name, value in result.metrics.items()}
    np.testing.assert_allclose(metrics["losses/ce"], np.concatenate(rows).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], np.concatenate(right).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], np.mean(totals), rtol=1e-6)
    np.testing.assert_allclose(metrics["weighted/ce"], np.mean(totals), rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7, 20, 50, 64])
def test_an_eval_is_the_same_at_every_batch_size(batch_size: int) -> None:
    trainer = quick(evals=evaluated(None, batch_size), num_steps=3)
    result = trainer.train()
    data = arrays(50, seed=1)
    logits = jax.vmap(eqx.nn.inference_mode(result.model))(data["x"])
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, data["label"]).mean()
    np.testing.assert_allclose(result.metrics["test/loss"], expected, rtol=1e-6)
    accuracy = (logits.argmax(-1) == data["label"]).mean()
    np.testing.assert_allclose(result.metrics["test/accuracy"], accuracy, rtol=1e-6)


@pytest.mark.slow
def test_padding_changes_neither_loss_nor_gradient() -> None:
    trainer = quick()
    state = trainer.init()
    rows = {name: x[:12] for name, x in arrays().items()}
    padding = {"x": np.full((4, 6), np.nan, np.float32), "label": np.zeros(4, np.int32)}
    padded = {name: np.concatenate([rows[name], padding[name]]) for name in rows}
    mask = np.arange(16) < 12
    one, aux = ek.train.step(trainer, state, as_batch(rows))
    other, padded_aux = ek.train.step(trainer, state, ek.data.Batch(padded, mask))
    np.testing.assert_allclose(padded_aux.loss, aux.loss, rtol=1e-6)
    for ours, theirs in zip(leaves(other.model), leaves(one.model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# --- vmap and grad through the public step --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_public_step_maps_over_the_floats_of_the_experiment(compilations: Any) -> None:
    changes = [
        {"optimizer.learning_rate": rate, "model.rate": dropout, "losses.ce.weight": weight}
        for rate, dropout, weight in ((1e-3, 0.1, 1.0), (1e-2, 0.4, 0.5), (0.1, 0.7, 2.0))
    ]
    base = quick(ek.lazy(Dropping)(rate=0.25))
    trainers = [ek.override(base, change) for change in changes]
    state = base.init()
    batch = next(base.batches(state))

    @eqx.filter_jit
    def population(config: Any, states: Any) -> Any:
        return eqx.filter_vmap(ek.train.step, in_axes=(0, eqx.if_array(0), None))(config, states, batch)

    def stacked(trainers: list[ek.Trainer]) -> Any:
        return jax.tree.map(lambda *x: jnp.stack(x), *[trainer.in_step for trainer in trainers])

    states = jax.tree.map(lambda x: jnp.stack([x] * 3) if eqx.is_array(x) else x, state)
    states, _ = population(stacked(trainers), states)
    compilations.clear()
    states, aux = population(stacked(trainers), states)
    population(stacked(trainers[::-1]), states)
    assert compilations.names == []
    losses = eqx.filter_vmap(lambda aux: aux.loss)(aux)
    two_steps = lambda config: ek.train.step(config, ek.train.step(config, state, batch)[0], batch)[1].loss
    np.testing.assert_allclose(jax.jit(jax.vmap(two_steps))(stacked(trainers)), losses, rtol=1e-5)
    for index, trainer in enumerate(trainers):
        alone, solo_aux = ek.train.step(trainer, ek.train.step(trainer, state, batch)[0], batch)
        np.testing.assert_allclose(losses[index], solo_aux.loss, rtol=1e-5)
        for ours, theirs in zip(leaves(states.model), leaves(alone.model), strict=True):
            np.testing.assert_allclose(ours[index], theirs, rtol=1e-4, atol=1e-5)


def test_the_public_step_inside_a_jit_that_traces_none_of_its_arguments() -> None:
    trainer = quick()
    state = trainer.init()
    batch = next(trainer.batches(state))
    inside = jax.jit(lambda: ek.train.step(trainer, state, batch)[1].loss)()
    np.testing.assert_allclose(inside, ek.train.step(trainer, state, batch)[1].loss, rtol=1e-6)


@pytest.mark.slow
def test_the_public_step_is_differentiated_in_the_floats_of_the_experiment() -> None:
    trainer = quick(optimizer=ek.lazy(optax.sgd)(learning_rate=0.1))
    state = trainer.init()
    batches = trainer.batches(state)
    one, two = next(batches), next(batches)

    def second_loss(config: Any) -> Any:
        after, _ = ek.train.step(config, state, one)
        return ek.train.step(config, after, two)[1].loss

    def of(model: Any, batch: Any) -> Any:
        logits = jax.vmap(model)(batch.data["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.data["label"]).mean()

    grads = jax.grad(second_loss)(trainer.in_step)
    first = eqx.filter_grad(of)(state.model, one)
    moved = eqx.apply_updates(state.model, jax.tree.map(lambda g: -0.1 * g, first))
    second = eqx.filter_grad(of)(moved, two)
    inner = sum(float((a * b).sum()) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    np.testing.assert_allclose(grads.optimizer.learning_rate, -inner, rtol=1e-4)
    np.testing.assert_allclose(grads.losses["ce"].weight, float(of(moved, two)) - 0.1 * inner, rtol=1e-4)
    # The same under jit.
    np.testing.assert_allclose(
        jax.jit(jax.grad(second_loss))(trainer.in_step).optimizer.learning_rate, -inner, rtol=1e-4
    )


def test_a_built_optimizer_is_refused(snapshot):
    with pytest.raises(ConfigError) as error:
        ek.train.make_step(lambda model, batch, hp, key: 0.0, optimizer=optax.adam(1e-3))  # pyright: ignore
    snapshot("built_optimizer", str(error.value))
