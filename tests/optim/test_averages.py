"""Averages of the parameters: their values, their dtypes, and what reads them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equikd as ek
from equikd.errors import ConfigError, EquikdError
from equikd.tree import named_leaves
from tests.train._small import BatchNormed, Dropping, Plain, arrays, assert_same, differs, evaluated, leaves, quick

L = ek.lazy
ADAM = L(optax.adam)(0.05)
EMA = ek.optim.Ema(ADAM, decay=0.75)


def points(optimizer: Any, count: int = 9) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Parameters and averages of one number that goes 0, 1, 4, 9, ..."""
    optimizer = ek.resolve(optimizer)
    at = jnp.zeros(())
    state, found, means = optimizer.init(at), [np.asarray(at)], []
    for step in range(1, count + 1):
        updates, state = optimizer.update(jnp.float32((step - 1) ** 2 - step**2), state, at)
        at = optax.apply_updates(at, updates)
        found.append(np.asarray(at))
        means.append(np.asarray(ek.optim.averaged(at, state)))
    return found, means


@given(st.floats(0, 1, width=32, allow_subnormal=False), st.booleans(), st.booleans())
def test_an_exponential_average_is_the_loop_by_hand(decay: float, debias: bool, warmup: bool) -> None:
    found, means = points(ek.optim.Ema(L(optax.sgd)(1.0), decay=decay, debias=debias, warmup=warmup))
    total, weight = (0.0, 0.0) if debias else (float(found[0]), 1.0)
    for step, (point, mean) in enumerate(zip(found[1:], means, strict=True)):
        now = min(decay, (1 + step) / (10 + step)) if warmup else decay
        total, weight = now * total + (1 - now) * float(point), now * weight + (1 - now)
        np.testing.assert_allclose(mean, total / weight if weight else found[0], rtol=1e-4, atol=1e-5)


def test_the_decay_may_be_a_schedule_of_the_updates_made() -> None:
    found, means = points(
        ek.optim.Ema(L(optax.sgd)(1.0), decay=ek.optim.PiecewiseConstant(1.0, ((2, 0.5), (3, 0.0)))), 4
    )
    assert [float(mean) for mean in means] == [0.0, 0.0, 4.5, 16.0]
    assert [float(point) for point in found[1:]] == [1.0, 4.0, 9.0, 16.0]


@given(st.integers(0, 6), st.integers(1, 4))
def test_a_plain_average_is_the_mean_of_what_it_names(start: int, every: int) -> None:
    found, means = points(ek.optim.Swa(L(optax.sgd)(1.0), start=start, every=every))
    for step, mean in enumerate(means, 1):
        taken = [float(found[at]) for at in range(1, step + 1) if at >= start and (at - start) % every == 0]
        np.testing.assert_allclose(mean, np.mean(taken) if taken else found[step], rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (ek.optim.Ema(ADAM, decay=1.5), "decay must be from 0 to 1, got 1.5"),
        (ek.optim.Swa(ADAM, start=-1), "start must not be negative, got -1"),
        (ek.optim.Swa(ADAM, start=1, every=0), "every must be positive, got 0"),
        (ek.optim.Lookahead(ADAM, every=0), "every must be positive, got 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(optimizer: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        quick(optimizer=optimizer).init()


@pytest.mark.parametrize("cls", [ek.optim.Ema, ek.optim.Swa, ek.optim.Lookahead])
def test_the_laws_of_configs_hold(cls: type) -> None:
    numbers = {"start": st.integers(0, 99), "every": st.integers(1, 99), "decay": st.sampled_from([0.0, 0.999])}
    numbers |= {"slow_rate": st.sampled_from([0.5, 0.8]), "optimizer": st.just(ADAM)}
    fields = {name: values for name, values in numbers.items() if name in ek.config.roles(cls)}
    ek.testing.check_config(cls, fields=fields, examples=5)


@pytest.fixture(scope="module")
def trainer() -> ek.Trainer:
    average = ek.evals.Eval(data=evaluated()["test"].data, transform=ek.optim.averaged)
    return quick(L(Dropping)(0.25), optimizer=EMA, num_steps=4, evals=evaluated() | {"average": average})


@pytest.fixture(scope="module")
def result(trainer: ek.Trainer) -> Any:
    return trainer.train()


def test_the_average_in_a_trainer_is_the_loop_by_hand(trainer: ek.Trainer, result: Any) -> None:
    state = trainer.init()
    mean = leaves(state.params())
    for batch, _ in zip(trainer.batches(state), range(4), strict=False):
        state, _ = ek.train.step(trainer, state, batch)
        mean = [0.75 * old + 0.25 * new for old, new in zip(mean, leaves(state.params()), strict=True)]
    for ours, theirs in zip(leaves(eqx.filter(result.averaged_model, eqx.is_inexact_array)), mean, strict=False):
        if ours.ndim:  # the rate of dropout is no parameter
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert result.averaged_model.dropout.p == result.model.dropout.p
    assert_same(result.state.params(), quick(L(Dropping)(0.25), optimizer=ADAM, num_steps=4).train().state.params())


def test_an_eval_a_prediction_and_a_saved_model_have_the_average(result: Any, tmp_path: Any) -> None:
    batch = {"x": arrays()["x"][:8]}
    model = result.averaged_model
    expected = jax.vmap(eqx.nn.inference_mode(model))(batch["x"])
    np.testing.assert_allclose(result.predict(batch, model=model), expected, rtol=1e-5, atol=1e-6)
    assert differs(result.predict(batch), expected)
    ek.save_model(tmp_path / "model", model)
    loaded = ek.load_model(tmp_path / "model")
    assert_same(loaded, model)
    np.testing.assert_array_equal(
        ek.train.predict(result.trainer, result.state, batch, model=loaded), result.predict(batch, model=model)
    )
    swapped = eqx.tree_at(lambda state: state.model, result.state, model)
    assert result.trainer.evaluate(swapped, "test")["test/loss"] == result.metrics["average/loss"]
    assert result.metrics["average/loss"] != result.metrics["test/loss"]


def test_a_new_decay_compiles_nothing_and_decays_are_vmapped(
    trainer: ek.Trainer, result: Any, compilations: Any
) -> None:
    compilations.clear()
    other = ek.override(trainer, {"optimizer.decay": 0.5}).train()
    assert compilations.names == []
    assert_same(other.model, result.model)
    assert differs(other.averaged_model, result.averaged_model)
    state = trainer.init()
    batch = next(trainer.batches(state))

    def mean(decay: Any) -> Any:
        new, _ = ek.train.step(ek.override(trainer.in_step, {"optimizer.decay": decay}), state, batch)
        return ek.optim.averaged(new.model, new.opt_state).first.weight

    decays = jnp.array([0.5, 0.75])
    for one, decay in zip(eqx.filter_jit(jax.vmap(mean))(decays), decays, strict=True):
        np.testing.assert_allclose(one, eqx.filter_jit(mean)(decay), rtol=1e-5, atol=1e-7)


def test_only_an_eval_whose_transform_asks_for_it_carries_the_optimizer_state(trainer: ek.Trainer) -> None:
    state = trainer.init()
    assert ek.evals.view_of(state, trainer.in_step).opt_state is None
    views = {one.name: ek.evals.view_of(state, one.config) for one in ek.train._setup.prepare(trainer).evals}
    assert views["test"].opt_state is None
    assert views["average"].opt_state is state.opt_state


def test_a_run_goes_on_to_the_bit_with_average_accumulation_and_batch_normalisation(tmp_path: Any) -> None:
    trainer = quick(L(BatchNormed)(), optimizer=EMA, accumulate=2, num_steps=3, evals=evaluated(2))
    trainer.train(tmp_path)
    longer = ek.override(trainer, {"num_steps": 6})
    resumed, whole = longer.train(tmp_path), longer.train()
    assert_same(resumed.state, whole.state)
    assert_same(resumed.averaged_model, whole.averaged_model)


class Half(Plain):
    """Parameters in bfloat16."""

    def __init__(self, *, key: jax.Array) -> None:
        super().__init__(key=key)
        self.first, self.last = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (self.first, self.last))

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x.astype(jnp.bfloat16)).astype(jnp.float32)


def test_averages_of_bfloat16_parameters_are_in_float32_and_keep_what_bfloat16_would_lose(compilations: Any) -> None:
    trainer = quick(L(Half)(), optimizer=ek.optim.Ema(ADAM, decay=0.999), num_steps=3, log_every=1)
    first = trainer.init()
    compilations.clear()
    result = trainer.train()
    assert compilations.names.count("jit(flat_step)") == 1
    before, after = (state.opt_state.average for state in (first, result.state))
    assert {leaf.dtype for leaf in leaves(after)} == {np.dtype("float32")}
    assert all((one != other).any() for one, other in zip(leaves(before), leaves(after), strict=True))
    assert {leaf.dtype for leaf in leaves(result.averaged_model)} == {jnp.dtype("bfloat16")}
    wide = ek.optim.averaged(result.model, result.state.opt_state, cast=False)
    assert {leaf.dtype for leaf in leaves(wide)} == {np.dtype("float32")}


def test_it_is_found_wherever_it_stands_and_frozen_leaves_are_the_models() -> None:
    clipped = L(optax.chain)(L(optax.clip_by_global_norm)(1.0), ek.optim.Ema(ADAM, decay=0.5))
    inside = L(optax.MultiSteps)(ek.optim.Ema(L(optax.adam)(0.05), decay=0.5), every_k_schedule=2)
    optimizer = {"first.weight": clipped, "first.bias": inside, "**": L(optax.sgd)(0.1)}
    result = quick(optimizer=optimizer, trainable=ek.optim.freeze("last.bias"), num_steps=3).train()
    paths = [path for path in named_leaves(result.state.opt_state) if ".average." in path]
    assert [path.rpartition(".average.")[2] for path in paths] == ["first.bias", "first.weight"]
    model = result.averaged_model
    assert differs(model.first.weight, result.model.first.weight)
    assert differs(model.first.bias, result.model.first.bias)
    assert_same(model.last, result.model.last)


def test_around_everything_else_it_averages_what_the_others_train(compilations: Any) -> None:
    groups = {"first.**": ek.optim.Lookahead(L(optax.sgd)(0.1), every=2), "**": L(optax.adam)(0.05)}
    fast = L(optax.chain)(L(optax.clip)(0.5), ek.optim.ScaleRates(L(optax.sgd)(0.1), {"first.**": 0.5}))
    trainer = quick(optimizer=ek.optim.Swa(groups, start=2), num_steps=3)
    first = trainer.init()
    compilations.clear()
    assert trainer.train().state.opt_state.weight == 2.0
    assert compilations.names.count("jit(flat_step)") == 1
    assert jax.tree.structure(first.opt_state) == jax.tree.structure(trainer.train().state.opt_state)
    assert ek.inspect.check(quick(optimizer=ek.optim.Ema(fast))).warnings == ()


def test_two_averages_of_one_parameter_and_none_are_refused(snapshot: Any) -> None:
    model, twice = Plain(key=jax.random.key(0)), ek.resolve(L(optax.chain)(EMA, ek.optim.Swa(ADAM, start=1)))
    with pytest.raises(ConfigError) as error:
        ek.optim.averaged(model, twice.init(eqx.filter(model, eqx.is_inexact_array)))
    snapshot("two", str(error.value))
    average = ek.evals.Eval(data=evaluated()["test"].data, transform=ek.optim.averaged)
    with pytest.raises(EquikdError) as error:
        quick(evals={"average": average}).train()
    snapshot("none", str(error.value))


# Lookahead.


def test_lookahead_computes_what_optax_computes() -> None:
    theirs = optax.lookahead(optax.adam(0.1), sync_period=3, slow_step_size=0.25)
    ours = ek.resolve(ek.optim.Lookahead(L(optax.adam)(0.1), slow_rate=0.25, every=3))
    params, at = optax.LookaheadParams.init_synced(jnp.ones(3)), jnp.ones(3)
    state, own = theirs.init(params), ours.init(at)
    for _ in range(7):
        updates, state = theirs.update(params.fast**2 - 2, state, params)
        params = optax.apply_updates(params, updates)
        updates, own = ours.update(at**2 - 2, own, at)
        at = optax.apply_updates(at, updates)
        np.testing.assert_allclose(at, params.fast, rtol=1e-5)
        np.testing.assert_allclose(own.slow, params.slow, rtol=1e-5)


def test_lookahead_of_optax_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"(?s)optimizer: optax.lookahead wants parameters.*ek.optim.Lookahead"):
        quick(optimizer=L(optax.lookahead)(ADAM, 5, 0.5)).init()
