"""The guard: what is not finite changes nothing, is never saved, and is told."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import ConfigError, NonFiniteError
from equikd.train import RollBack, SkipNonFinite, StopOnNonFinite, _failure, _output
from tests.train._runs import assert_same, rows

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def batches(bad: tuple[int, ...], value: float) -> Any:
    """Eight rows a batch, for ever; those with these numbers hold what is not finite."""
    number = 0
    while True:
        number += 1
        part = slice(8 * (number % 8), 8 * (number % 8) + 8)
        x = X[part].copy()
        x[2, 1] = value if number in bad else x[2, 1]
        yield {"x": x, "y": Y[part]}


def make(bad: tuple[int, ...] = (), value: float = np.nan, **fields: Any) -> ek.Trainer:
    """A trainer whose batches with these numbers are bad."""
    standard: dict[str, Any] = {
        "model": ek.lazy(eqx.nn.MLP)(4, 1, 8, 1),
        "inputs": {"x": "batch.x"},
        "losses": {"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        "optimizer": ek.lazy(optax.adam)(1e-2),
        "train_data": ek.data.Iterable(ek.lazy.partial(batches)(bad=bad, value=value)),
        "num_steps": 20,
        "log_every": 5,
        "writers": (),
        "checkpoints": ek.train.Checkpoints(every=4),
    }
    return ek.Trainer(**standard | fields)


def steps_in(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


class RootOfNothing(eqx.Module):
    """Its output is finite; where all inputs are zero its gradient is not."""

    weight: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        self.weight = jax.random.normal(key, (4,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum((self.weight * x) ** 2, keepdims=True))


# --- it stops ---------------------------------------------------------------------------------------------------------


def test_it_stops_with_the_state_before(snapshot):
    with pytest.raises(NonFiniteError) as caught:
        make((7,)).train()
    snapshot("a_bad_loss", str(caught.value))
    assert (caught.value.step, caught.value.path) == (7, "losses.mse")
    good = make(num_steps=6).train().state
    assert_same(caught.value.state.model, good.model)
    assert int(caught.value.state.step) == 6
    assert caught.value.state.opt_state is None  # which may be spoilt


def test_nothing_bad_is_saved_and_nothing_good_goes(tmp_path):
    trainer = make((7,), num_steps=2000, checkpoints=ek.train.Checkpoints(every=3, keep=2))
    with pytest.raises(NonFiniteError):
        trainer.train(tmp_path / "run")
    assert steps_in(tmp_path / "run") == [3, 6]
    assert [row["step"] for row in rows(tmp_path / "run")] == [5]
    for number in (3, 6):
        assert_same(trainer.restore(tmp_path / "run", number).model, make(num_steps=number).train().model)
    with pytest.raises(NonFiniteError) as again:  # the same command meets the same batch
        trainer.train(tmp_path / "run")
    assert again.value.step == 7
    assert steps_in(tmp_path / "run") == [3, 6]
    mended = ek.override(trainer, {"train_data": make().train_data, "num_steps": 20})
    assert_same(mended.train(tmp_path / "run").state.model, make().train().model)


def test_a_gradient_alone_is_told(snapshot):
    trainer = make(model=ek.lazy(RootOfNothing)(), num_steps=6)
    zero = make(model=ek.lazy(RootOfNothing)(), train_data=ek.data.InMemory({"x": X * 0, "y": Y}, batch_size=8))
    trainer.train()
    with pytest.raises(NonFiniteError) as caught:
        zero.train()
    snapshot("a_bad_gradient", str(caught.value))
    assert (caught.value.step, caught.value.path) == (1, "grads.weight")
    assert_same(caught.value.state.model, zero.init().model)


@pytest.mark.parametrize("workdir", [True, False], ids=["saved", "not saved"])
def test_parameters_that_the_update_breaks(tmp_path, snapshot, workdir):
    """Adam without eps divides nothing by nothing where a gradient is zero."""
    dead = make(
        model=ek.lazy(RootOfNothing)(),
        train_data=ek.data.InMemory({"x": X * np.array([1, 1, 0, 1], np.float32), "y": Y}, batch_size=8),
        optimizer=ek.lazy(optax.adam)(1e-2, eps=0.0),
        checkpoints=ek.train.Checkpoints(every=1),
        num_steps=1 if not workdir else 20,
    )
    with pytest.raises(NonFiniteError) as caught:
        dead.train(tmp_path / "run" if workdir else None)
    assert (caught.value.step, caught.value.path) == (1, "params.weight")
    if workdir:
        assert not (tmp_path / "run/checkpoints").exists()
        snapshot("bad_parameters", str(caught.value).replace(str(tmp_path), "FOLDER"))


def test_parameters_that_an_update_broke_are_blamed_on_it():
    """Where nothing was saved in between, the next step shows it, and the update before is named."""
    dead = make(
        model=ek.lazy(RootOfNothing)(),
        train_data=ek.data.InMemory({"x": X * np.array([1, 1, 0, 1], np.float32), "y": Y}, batch_size=8),
        optimizer=ek.lazy(optax.adam)(1e-2, eps=0.0),
    )
    with pytest.raises(NonFiniteError) as caught:
        dead.train()
    assert (caught.value.step, caught.value.path) == (1, "params.weight")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("shape", [(3, 5), (40, 30), (4, 3, 50), (400,), (1,)])
def test_the_cheap_test_finds_each_of_them(value, dtype, shape):
    from equikd.train._guard import _first_bad

    first_bad = jax.jit(lambda array: _first_bad([[jnp.float32(1)], [], [array], [jnp.float32(2)]]))
    array = jnp.ones(shape, dtype)
    assert int(first_bad(array)) == 0
    assert int(first_bad(array * float(jnp.finfo(dtype).max))) == 0
    assert int(first_bad(-array * float(jnp.finfo(dtype).max))) == 0
    for at in (0, array.size - 1):
        assert int(first_bad(array.ravel().at[at].set(value).reshape(shape))) == 3


def test_the_first_of_several_is_told_and_nothing_is_fine():
    from equikd.train._guard import _first_bad

    bad, good = jnp.full((20, 20), jnp.nan), jnp.ones(3)
    assert int(_first_bad([[good], [bad], [bad]])) == 2
    assert int(_first_bad([[good, bad], [bad]])) == 1
    assert int(_first_bad([[], []])) == 0
    assert int(_first_bad([[jnp.zeros(0)], [jnp.zeros((0, 7))]])) == 0
    with jax.numpy_dtype_promotion("strict"):
        assert int(_first_bad([[good], [jnp.full(3, jnp.inf, jnp.bfloat16)]])) == 2
    both = jnp.stack([jnp.ones((9, 99)), jnp.full((9, 99), jnp.inf)])
    assert jax.vmap(lambda x: _first_bad([[good], [x]]))(both).tolist() == [0, 2]


def test_evals_and_running_statistics_keep_what_was_good(tmp_path):
    """An eval at a step after the failure raises instead of a row for a state that is not of that step."""
    data = ek.data.InMemory({"x": X, "y": Y})
    trainer = make((7,), evals={"test": ek.evals.Eval(data=data, every=2)}, log_every=100, checkpoints=None)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train(tmp_path / "run")
    assert caught.value.step == 7
    assert [(row["step"], row["split"]) for row in rows(tmp_path / "run")] == [(2, "test"), (4, "test"), (6, "test")]


def test_without_a_guard_nan_spreads(tmp_path):
    result = make((7,), guard=None).train(tmp_path / "run")
    assert result.state.guard is None
    assert np.isnan(result.metrics["train/loss"])
    assert steps_in(tmp_path / "run") == [12, 16, 20]


def test_it_costs_no_read_of_its_own(monkeypatch):
    counts = {"read": 0, "bad_parameters": 0}

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(one: Any) -> Any:
            counts[name] += 1
            return original(one)

        monkeypatch.setattr(module, name, call)

    counted(_output, "read")
    counted(_failure, "bad_parameters")
    make().train()
    # 20 steps, an interval of 5; parameters are looked at before the first step and after the last.
    assert counts == {"read": 4, "bad_parameters": 2}


def own_update(config: Any, state: Any, batch: Any) -> Any:
    """A step that makes its update by hand."""
    context = ek.train.loss_and_gradients(config, state, batch)
    params = jax.tree.map(lambda one, grad: one - 0.1 * grad, context.params, context.grads)
    new = eqx.tree_at(lambda one: one.step, state, state.step + 1)
    model = eqx.combine(params, state.model)
    return eqx.tree_at(lambda one: one.model, new, model), ek.train.collect(config, context)


def test_a_step_without_apply_updates_is_guarded_by_its_losses():
    with pytest.raises(NonFiniteError) as caught:
        make((3,), step=own_update).train()
    assert (caught.value.step, caught.value.path) == (3, "losses.mse")
    assert_same(caught.value.state.model, make(num_steps=2, step=own_update).train().state.model)
    assert make((3,), step=own_update, guard=SkipNonFinite()).train().metrics["train/skipped_steps"] == 1


def test_it_does_not_start_from_what_is_not_finite(snapshot):
    class Masked(eqx.Module):
        mask: jax.Array

        def __init__(self, *, key: jax.Array) -> None:
            self.mask = jnp.array([0.0, 0.0, 0.0, -jnp.inf])

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.nn.softmax(x + self.mask)[:1]

    with pytest.raises(NonFiniteError) as caught:
        make(model=ek.lazy(Masked)()).train()
    snapshot("bad_from_the_start", str(caught.value))
    make(model=ek.lazy(Masked)(), trainable=ek.optim.freeze("mask"), optimizer=ek.lazy(optax.sgd)(0.1)).train()


def test_running_statistics_that_are_not_finite_are_not_saved(tmp_path):
    class Normed(eqx.Module):
        norm: eqx.nn.BatchNorm
        layer: eqx.nn.Linear

        def __init__(self, *, key: jax.Array) -> None:
            self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
            self.layer = eqx.nn.Linear(4, 1, key=key)

        def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
            x, state = self.norm(x, state)
            return self.layer(x), state

    with pytest.raises(NonFiniteError) as caught:
        make((6,), value=1e25, model=ek.lazy(Normed)()).train(tmp_path / "run")
    assert caught.value.path.startswith("model_state")
    assert steps_in(tmp_path / "run") == [4]


def test_two_updates_in_a_step_are_one_step():
    def twice(config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        after, _ = ek.train.apply_updates(config, state, context)
        after, _ = ek.train.apply_updates(config, after, context)
        return after, ek.train.collect(config, context)

    assert int(make(step=twice).train().state.step) == 20


def test_an_interval_of_skipped_steps_has_no_loss():
    result = make((6, 7, 8, 9, 10), guard=SkipNonFinite()).train()
    second = next(row for row in result.history if row.step == 10)
    assert all(np.isnan(second.metrics[name]) for name in ("loss", "losses/mse", "weighted/mse"))


def test_no_row_is_written_for_parameters_that_are_not_finite(tmp_path):
    dead = make(
        model=ek.lazy(RootOfNothing)(),
        train_data=ek.data.InMemory({"x": X * np.array([1, 1, 0, 1], np.float32), "y": Y}, batch_size=8),
        optimizer=ek.lazy(optax.adam)(1e-2, eps=0.0),
        evals={"test": ek.evals.Eval(data=ek.data.InMemory({"x": X, "y": Y}), every=1)},
    )
    with pytest.raises(NonFiniteError):
        dead.train(tmp_path / "run")
    assert rows(tmp_path / "run") == []


def test_a_guard_may_be_referred_to():
    guard = ek.ref("shared.guard")
    trainer = make((3,), guard=guard, shared={"guard": SkipNonFinite()})
    assert trainer.train().metrics["train/skipped_steps"] == 1


GUARDS = [None, StopOnNonFinite(), SkipNonFinite(), RollBack()]


@pytest.mark.slow
@pytest.mark.parametrize("before", GUARDS, ids=map(str, range(4)))
@pytest.mark.parametrize("after", GUARDS, ids=map(str, range(4)))
def test_a_run_may_go_on_with_another_guard(tmp_path, before, after):
    make(guard=before, num_steps=8).train(tmp_path / "run")
    result = make(guard=after).train(tmp_path / "run")
    pairs = zip(jax.tree.leaves(result.state.params()), jax.tree.leaves(make().train().state.params()), strict=True)
    for one, other in pairs:  # each guard is another program
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert int(result.state.step) == 20
    assert (result.state.guard is None) == (after is None)


def test_parameters_that_break_under_skipping_are_blamed_on_their_update():
    """Adam without eps, under a guard that skips what comes after."""
    dead = make(
        model=ek.lazy(RootOfNothing)(),
        train_data=ek.data.InMemory({"x": X * np.array([1, 1, 0, 1], np.float32), "y": Y}, batch_size=8),
        optimizer=ek.lazy(optax.adam)(1e-2, eps=0.0),
        guard=SkipNonFinite(max_consecutive=3),
    )
    for num_steps in (1, 3, 20):
        with pytest.raises(NonFiniteError) as caught:
            ek.override(dead, {"num_steps": num_steps}).train()
        assert (caught.value.step, caught.value.path) == (1, "params.weight")


def test_a_metric_cannot_take_the_name_of_the_count():
    with pytest.raises(ConfigError, match="skipped_steps"):
        make(metrics={"skipped_steps": ek.metrics.Mean(values="preds")}).train()


def test_a_guard_that_is_off_leaves_the_program_alone():
    def text(trainer: ek.Trainer) -> str:
        state = trainer.init()
        arrays, static = eqx.partition((trainer.in_step, state), eqx.is_array)
        batch = next(trainer.batches(state))

        def run(arrays: Any, data: Any) -> Any:
            config, state = eqx.combine(arrays, static)
            return eqx.filter(ek.train.default_step(config, state, data), eqx.is_array)

        return jax.jit(run).lower(arrays, batch.data).as_text()

    assert "tensor<5xi32>" not in text(make(guard=None))
    assert "tensor<5xi32>" in text(make())


def test_accumulation_is_guarded():
    with pytest.raises(NonFiniteError) as caught:
        make((3,), accumulate=2).train()
    assert (caught.value.step, caught.value.path) == (3, "losses.mse")


def test_a_step_of_ones_own_is_guarded_by_apply_updates():
    def own(config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        state, context = ek.train.apply_updates(config, state, context)
        return state, ek.train.collect(config, context)

    with pytest.raises(NonFiniteError) as caught:
        make((3,), step=own).train()
    assert caught.value.step == 3


def slow_copy(config: Any, state: Any, batch: Any) -> Any:
    """A step that updates `extra` by the parameters after the update."""
    state, aux = ek.train.default_step(config, state, batch)
    extra = jax.tree.map(lambda slow, fast: 0.9 * slow + 0.1 * fast, state.extra, state.params())
    return eqx.tree_at(lambda one: one.extra, state, extra), aux


def trained(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array)


def test_extra_stays_too():
    with pytest.raises(NonFiniteError) as caught:
        make((7,), step=slow_copy, init_extra=trained).train()
    good = make(num_steps=6, step=slow_copy, init_extra=trained).train().state
    assert_same(caught.value.state.extra, good.extra)
    skipped = make((7,), num_steps=7, step=slow_copy, init_extra=trained, guard=SkipNonFinite()).train().state
    assert_same(skipped.extra, good.extra)


def test_two_updates_in_a_step_are_both_looked_at():
    """The first is bad, the second, of another loss, is good."""

    def twice(config: Any, state: Any, batch: Any) -> Any:
        first = ek.train.loss_and_gradients(config, state, batch)
        after, _ = ek.train.apply_updates(config, state, first)
        second = first.replace(grads=jax.tree.map(jnp.zeros_like, first.grads), totals=None)
        after, _ = ek.train.apply_updates(config, after, second)
        return eqx.tree_at(lambda one: one.step, after, state.step + 1), ek.train.collect(config, first)

    with pytest.raises(NonFiniteError) as caught:
        make((3,), step=twice).train()
    assert (caught.value.step, caught.value.path) == (3, "losses.mse")


# --- it skips ---------------------------------------------------------------------------------------------------------


def test_bad_steps_are_skipped_and_count_nowhere():
    result = make((3, 9, 10), guard=SkipNonFinite(max_consecutive=2)).train()
    assert int(result.state.step) == 20
    assert result.metrics["train/skipped_steps"] == 3
    assert all(np.isfinite(list(row.metrics.values())).all() for row in result.history)
    # By hand: adam on the good batches alone.
    model = make().init().model
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(params)
    loss = lambda params, x, y: ((jax.vmap(eqx.combine(params, static))(x) - y) ** 2).mean()
    for number, batch in zip(range(1, 21), batches((), 0.0), strict=False):
        if number not in (3, 9, 10):
            grads = jax.grad(loss)(params, batch["x"], batch["y"])
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
    for ours, theirs in zip(jax.tree.leaves(result.state.params()), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_one_more_in_a_row_ends_the_run(snapshot):
    bad = (2, 3, 6, 7, 8)
    with pytest.raises(NonFiniteError) as caught:
        make(bad, guard=SkipNonFinite(max_consecutive=2)).train()
    snapshot("too_many_in_a_row", str(caught.value))
    assert caught.value.step == 8
    assert int(make(bad, guard=SkipNonFinite(max_consecutive=3)).train().state.step) == 20


@pytest.mark.slow
def test_skipping_survives_a_resume(tmp_path):
    trainer = make((3, 9), guard=SkipNonFinite(max_consecutive=1))
    ek.override(trainer, {"num_steps": 12}).train(tmp_path / "run")
    result, whole = trainer.train(tmp_path / "run"), trainer.train()
    assert_same(result.state, whole.state)
    assert result.metrics["train/skipped_steps"] == 2


# --- it rolls back ----------------------------------------------------------------------------------------------------


def test_it_goes_back_with_smaller_updates(tmp_path, capsys, snapshot):
    """Gradient descent that blows up at rate 4; the newest checkpoints are on their way out already."""
    trainer = make(
        optimizer=ek.lazy(optax.sgd)(4.0),
        guard=RollBack(factor=0.1, max_returns=6),
        checkpoints=ek.train.Checkpoints(every=1, keep=10),
    )
    result = trainer.train(tmp_path / "run")
    said = [line for line in capsys.readouterr().err.splitlines() if "going back" in line]
    snapshot("going_back", "\n".join(said))
    assert int(result.state.step) == 20
    assert float(result.state.guard.scale) < 1
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert steps == [5, 10, 15, 20]  # of what was left, no row stays
    assert np.isfinite(result.metrics["train/loss"])
    scale = json.loads(json.dumps(float(result.state.guard.scale)))
    longer = ek.override(trainer, {"num_steps": 24}).train(tmp_path / "run")
    assert float(longer.state.guard.scale) == scale  # a resume keeps it


@pytest.mark.slow
def test_the_factor_is_a_smaller_rate(tmp_path):
    """From the step it went back to, the run is that of another rate."""
    trainer = make(num_steps=6, log_every=1, optimizer=ek.lazy(optax.sgd)(4.0))
    guarded = {"guard": RollBack(factor=0.001), "checkpoints": ek.train.Checkpoints(every=100)}
    result = ek.override(trainer, guarded).train(tmp_path / "run")
    smaller = ek.override(trainer, {"optimizer.learning_rate": 0.004}).train()
    assert float(result.state.guard.scale) == np.float32(0.001)
    for one, other in zip(jax.tree.leaves(result.state.params()), jax.tree.leaves(smaller.state.params()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_it_gives_up(tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        make((7,), guard=RollBack(max_returns=2)).train(tmp_path / "run")
    assert caught.value.step == 7
    assert float(caught.value.state.guard.scale) == 0.25
    assert steps_in(tmp_path / "run") == [4]


def test_it_needs_somewhere_to_go_back_to(tmp_path, snapshot):
    with pytest.raises(ConfigError) as caught:
        make(guard=RollBack()).train()
    snapshot("no_work_directory", str(caught.value))
    with pytest.raises(ConfigError, match="checkpoints is None"):
        ek.inspect.check(make(guard=RollBack(), checkpoints=None))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "guard", [SkipNonFinite(max_consecutive=0), RollBack(factor=1.0), RollBack(factor=0.0), RollBack(max_returns=0)]
)
def test_settings_without_sense_are_refused(guard):
    with pytest.raises((ValueError, ConfigError), match=r"max_|factor"):
        make(guard=guard).train()


@pytest.mark.slow
def test_the_factor_recompiles_nothing(compilations, tmp_path):
    trainer = make(guard=RollBack(factor=0.5))
    trainer.train(tmp_path / "one")
    compilations.clear()
    ek.override(trainer, {"guard.factor": 0.25}).train(tmp_path / "other")
    assert not [name for name in compilations.names if "step" in name]


def test_guards_are_plain_data():
    for guard in (StopOnNonFinite(), SkipNonFinite(max_consecutive=4), RollBack(factor=0.25), None):
        trainer = ek.Trainer(
            model=ek.lazy(eqx.nn.MLP)(4, 1, 8, 1),
            optimizer=ek.lazy(optax.sgd)(0.1),
            train_data=ek.lazy.partial(batches)(bad=(), value=0.0),
            num_steps=3,
            guard=guard,
        )
        assert ek.config.from_json(ek.config.to_json(trainer)) == trainer
