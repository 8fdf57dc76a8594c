"""Faults that people have met with other trainers, in the part of them that a config decides."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.config import cli, config, diff, lazy, override, resolve
from equikd.config._flags import edited
from equikd.errors import ConfigError


@config
class Experiment:
    rate: float = 0.1
    optimizer: optax.GradientTransformation = lazy(optax.adamw)(1e-3, b2=0.999)
    steps: int = 10


def traced(function):
    """The function under jit, and a list that grows by one at each trace."""
    traces = []

    def counted(*arguments):
        traces.append(1)
        return function(*arguments)

    return jax.jit(counted), traces


def one_update(node, params):
    optimizer = resolve(node)
    return optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)


def test_many_learning_rates_are_one_trace():
    """Each new learning rate of an optimizer made the training step compile again."""
    step, traces = traced(one_update)
    seen = [float(step(lazy(optax.sgd)(rate), jnp.ones(()))[0]) for rate in (0.1, 1, 3e-4, np.float32(0.2), 5.0)]
    np.testing.assert_allclose(seen, [-0.1, -1, -3e-4, -0.2, -5], rtol=1e-6)
    assert len(traces) == 1


def test_a_python_float_of_a_config_is_traced():
    """A Python float in a module was part of the compiled program, so that each value compiled again."""
    step, traces = traced(lambda cfg, x: cfg.rate * x)
    assert [float(step(Experiment(rate), 2.0)) for rate in (1.0, 2.0, 3.0, 4.0, 5)] == [2, 4, 6, 8, 10]
    assert len(traces) == 1


def test_what_a_step_gives_back_goes_in_again_without_a_trace():
    """A Python number that went in came out as a weakly typed array, and the second step compiled again."""

    def step(cfg, state):
        updates, new = resolve(cfg.optimizer).update(state[0] * cfg.rate, state[1], state[0])
        return (state[0] + updates, new)

    compiled, traces = traced(step)
    cfg = Experiment()
    state = first = (jnp.ones(2), resolve(cfg.optimizer).init(jnp.ones(2)))
    for _ in range(3):
        state = compiled(cfg, state)
    assert len(traces) == 1
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, first)
    identity, traces = traced(lambda cfg: jax.tree.map(lambda leaf: leaf * 1, cfg))
    for _ in range(3):  # a config that has been through a program is the config that went in
        cfg = identity(cfg)
    assert len(traces) == 1


def test_no_two_configs_differ_by_weakness_alone_and_what_differs_has_a_path():
    """A program was compiled again because of a weak type, and the report of what had changed was empty."""
    values = (1, 1.0, np.float64(1), np.float32(1), jnp.float32(1), jnp.asarray(1.0), jax.lax.full((), 1.0))
    kinds = {str(jax.tree.map(jax.typeof, jax.tree.leaves(Experiment(value))[0])) for value in values}
    assert kinds == {"float32[]"}
    assert not any(jax.typeof(leaf).weak_type for value in values for leaf in jax.tree.leaves(Experiment(value)))
    one, other = Experiment(), override(Experiment(), {"steps": 11, "optimizer.nesterov": True})
    assert jax.tree.structure(one) != jax.tree.structure(other)
    assert [path for path, _, _ in diff(one, other)] == ["optimizer.nesterov", "steps"]


def test_an_equal_optimizer_written_again_is_the_same_program():
    """An optimizer built a second time from the same numbers had new functions in it, and compiled again."""
    step, traces = traced(one_update)
    for _ in range(3):
        step(lazy(optax.chain)(lazy(optax.clip)(1.0), lazy(optax.adamw)(1e-3, b1=0.8)), jnp.ones(()))
        step(lazy(optax.chain)(lazy(optax.clip)(1.0), lazy(optax.adamw)(b1=0.8, learning_rate=1e-3)), jnp.ones(()))
    assert len(traces) == 1


def test_a_warm_up_takes_a_traced_peak_and_traced_steps():
    """A warm-up with a traced peak and traced step counts asked in Python whether a tracer is positive."""
    schedule, traces = traced(lambda schedule, count: schedule(count))
    for peak, warmup, decay in ((1e-3, 5, 20), (0.5, 3, 40), (1, 10, 11)):
        written = ek.optim.WarmupCosine(0.0, peak, warmup_steps=warmup, decay_steps=decay, end_value=peak / 10)
        theirs = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, decay, peak / 10)
        for count in (0, 1, warmup, decay - 1, decay, decay + 5):
            np.testing.assert_allclose(schedule(written, count), theirs(count), rtol=1e-5, atol=1e-8)
    assert len(traces) == 1


def test_a_decay_rate_keeps_its_digits_beside_bf16_parameters():
    """0.999 was put into the dtype of bf16 parameters, where it is 1, and the optimizer divided by zero."""
    params = jnp.ones(2, jnp.bfloat16)
    updates, state = jax.jit(one_update)(Experiment().optimizer, params)
    assert jax.tree.leaves(Experiment())[-1].dtype == jnp.float32
    assert np.isfinite(np.asarray(updates, np.float32)).all()
    assert updates.dtype == jnp.bfloat16
    plain = optax.adamw(1e-3, b2=0.999)
    wanted, wanted_state = plain.update(jnp.ones_like(params), plain.init(params), params)
    np.testing.assert_allclose(updates.astype(np.float32), wanted.astype(np.float32), rtol=2e-2)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, wanted_state)
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("value", [np.ones(2), jnp.ones(2), [1], {1: 2}, {"a": np.ones(2)}, (1, [2])], ids=repr)
def test_what_cannot_be_hashed_is_refused_where_it_is_written(value):
    """An array or a dict in a static field failed as unhashable far away, or compiled again at each call."""
    with pytest.raises(ConfigError, match=r"^Experiment\.steps\b"):
        Experiment(steps=value)
    mask = {"a": {1}} if isinstance(value, dict) and 1 in value else value  # a node takes an int for a key
    with pytest.raises(ConfigError, match=r"^adamw\.mask"):
        lazy(optax.adamw)(1e-3, mask=mask)


def test_a_misspelt_name_is_an_error_wherever_it_is_written(capsys):
    """A misspelt key was ignored, and the run went on with the default."""
    text = ek.config.to_json(Experiment()).replace('"rate"', '"raet"')
    attempts = {
        "rate": lambda: Experiment(raet=1.0),  # pyright: ignore[reportCallIssue]  # what is tested
        "learning_rate": lambda: lazy(optax.adamw)(learning_raet=1.0),  # pyright: ignore[reportCallIssue]
        "optimizer.learning_rate": lambda: override(Experiment(), {"optimizer.learning_raet": 1.0}),
        "optimizer.b2": lambda: edited(Experiment(), {"optimizer.b22": "0.9"}),
        "'rate'": lambda: ek.config.from_json(text),
    }
    for near, attempt in attempts.items():
        with pytest.raises(ConfigError) as error:
            attempt()
        assert "nearest:" in str(error.value)
        assert near in str(error.value)
    with pytest.raises(SystemExit):
        cli(ek.optim.Constant, ["--valeu", "1"])
    assert "--value" in capsys.readouterr().err


def test_a_rate_from_the_command_line_is_a_strong_float32_and_the_same_program():
    """A command line could not set a learning rate that is an array, or set one that is weakly typed."""

    @config
    class Rate:
        rate: float = 0.1

    step, traces = traced(lambda cfg: cfg.rate * jnp.ones((), jnp.bfloat16))
    configs = [Rate(), Rate(jnp.float32(0.5)), cli(Rate, ["--rate", "1"]), edited(Rate(), {"rate": "1e-3"})]
    configs.append(cli(Rate, ["--rate", "2"], default=jax.tree.map(jnp.asarray, Rate())))  # arrays by default
    assert [step(cfg).dtype.name for cfg in configs] == ["float32"] * 5  # a weak one would give bfloat16
    assert len(traces) == 1


def test_the_first_update_has_the_value_of_step_0():
    """The first update had the schedule's value of step 1."""
    schedule = ek.optim.Linear(1.0, 0.0, 4)
    node = lazy(optax.sgd)(schedule)
    optimizer, params, seen = resolve(node), jnp.zeros(()), []
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(jnp.ones(()), state, params)
        optimizer = resolve(node)  # as a resume does
        seen.append(-float(updates))
    assert seen == [1.0, 0.75, 0.5]


def test_a_rate_in_a_config_has_no_gradient_among_the_parameters():
    """A dropout rate held as an array was trained, or decayed by the optimizer."""

    class Model(eqx.Module):
        weight: jax.Array
        dropout: eqx.nn.Dropout

        def __init__(self, rate: float, *, key: jax.Array) -> None:
            self.weight, self.dropout = jax.random.normal(key, (2,)), eqx.nn.Dropout(rate)

        def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
            return self.dropout(x @ self.weight, key=key)

    trainer = ek.Trainer(
        model=lazy(Model)(0.25),
        inputs={"x": "batch.x"},
        losses={"l": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        optimizer=lazy(optax.adamw)(0.1, weight_decay=0.5),
        train_data=ek.data.InMemory({"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}, batch_size=2),
        num_steps=3,
    )
    state = trainer.init()
    assert [leaf.shape for leaf in jax.tree.leaves(state.params())] == [(2,)]
    for batch, _ in zip(trainer.batches(state), range(2), strict=False):
        state, _ = ek.train.step(trainer, state, batch)
    assert float(state.model.dropout.p) == 0.25
    assert not np.array_equal(state.model.weight, trainer.init().model.weight)
