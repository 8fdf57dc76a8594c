"""Live models stay their caller's; what training hands out stays valid; which leaves of a model are trained."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import ConfigError
from tests.train import _small
from tests.train._small import (
    WIDTH,
    BatchNormed,
    Counted,
    Derived,
    Dropping,
    HoldsConfig,
    Plain,
    Scaling,
    StaticRate,
    WithLambda,
    arrays,
    assert_same,
    differs,
    evaluated,
    leaves,
    quick,
)

KEY = jax.random.key(3)


def host(tree: Any) -> list[np.ndarray]:
    return [array.copy() for array in leaves(tree)]


def assert_kept(tree: Any, before: list[np.ndarray]) -> None:
    """Still there (not donated), and unchanged."""
    for now, then in zip(leaves(tree), before, strict=True):
        np.testing.assert_array_equal(now, then)


# --- live models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("described", [True, False])
def test_a_live_model_stays_usable(described: bool) -> None:
    model = Plain(key=KEY)
    before = host(model)
    trainer = quick() if described else ek.override(quick(), {"model": None})
    result = trainer.train(model=model)
    state = trainer.init(model=model)
    ek.train.step(trainer, state, next(trainer.batches(state)))
    stepper = ek.train.Stepper(trainer, state)
    stepper.step(next(trainer.batches(state)))
    assert_kept(model, before)
    assert model(jnp.ones(6)).shape == (3,)
    assert differs(result.model, model)
    assert_kept(state.model, before)


@pytest.mark.parametrize("described", [True, False])
def test_training_starts_from_the_live_model(described: bool) -> None:
    trainer = quick() if described else ek.override(quick(), {"model": None})
    model = Plain(key=KEY)
    state = trainer.init(model=model)
    assert_same(state.model, model)
    batch = next(trainer.batches(state))
    after, aux = ek.train.step(trainer, state, batch)
    logits = jax.vmap(model)(batch.data["x"])
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, batch.data["label"]).mean()
    np.testing.assert_allclose(aux.loss, expected, rtol=1e-6)
    assert differs(after.model, model)


def test_arrays_of_numpy_are_trained_too() -> None:
    model = jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, Plain(key=KEY))
    before = [leaf.copy() for leaf in jax.tree.leaves(model)]
    trainer = ek.override(quick(), {"model": None})
    result = trainer.train(model=model)
    assert_same(result.model, trainer.train(model=Plain(key=KEY)).model)
    for now, then in zip(jax.tree.leaves(model), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_second_live_model_of_the_same_structure_compiles_nothing(compilations: Any) -> None:
    trainer = quick()
    bare = ek.override(trainer, {"model": None})
    trainer.train(model=Plain(key=KEY))
    bare.train(model=Plain(key=KEY))
    one, other = Plain(key=jax.random.key(4)), Plain(key=jax.random.key(5))
    compilations.clear()
    assert differs(trainer.train(model=one).state, trainer.train(model=other).state)
    assert differs(bare.train(model=one).state, bare.train(model=other).state)
    assert compilations.names == []


def test_hyperparameters_come_from_the_config(compilations: Any) -> None:
    model = Dropping(0.9, key=KEY)
    trainer = quick(ek.lazy(Dropping)(rate=0.25))
    result = trainer.train(model=model)
    assert float(result.model.dropout.p) == 0.25
    assert_same(result.state, trainer.train(model=Dropping(0.1, key=KEY)).state)
    compilations.clear()
    other = ek.override(trainer, {"model.rate": 0.5}).train(model=model)
    assert compilations.names == []
    assert differs(result.state.params(), other.state.params())


def test_without_a_description_python_floats_are_part_of_the_program() -> None:
    trainer = ek.override(quick(), {"model": None})
    result = trainer.train(model=Dropping(0.25, key=KEY))
    assert result.model.dropout.p == 0.25
    assert isinstance(result.model.dropout.p, float)
    described = quick(ek.lazy(Dropping)(rate=0.25)).train(model=Dropping(0.25, key=KEY))
    for ours, theirs in zip(leaves(result.state.params()), leaves(described.state.params()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_another_structure_is_refused_with_all_paths() -> None:
    trainer = quick()
    wide = eqx.tree_at(lambda m: (m.first.bias, m.last.weight), Plain(key=KEY), (jnp.ones(WIDTH + 1), jnp.ones((3, 9))))
    with pytest.raises(ConfigError) as error:
        trainer.init(model=wide)
    for words in ("first.bias", "float32[9]", "float32[8]", "last.weight", "float32[3, 9]"):
        assert words in str(error.value)
    with pytest.raises(ConfigError) as error:
        trainer.train(model=eqx.nn.MLP(6, 3, 8, 1, key=KEY))
    for words in ("first.weight", "last.bias", "layers[0].weight", "layers[1].bias"):
        assert words in str(error.value)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), Plain(key=KEY))
    with pytest.raises(ConfigError, match=r"first\.weight.*\n.*bfloat16"):
        trainer.init(model=half)


def test_a_live_model_with_a_state() -> None:
    model = BatchNormed(key=KEY)
    before = host(model)
    for trainer in (quick(ek.lazy(BatchNormed)()), ek.override(quick(), {"model": None})):
        result = trainer.train(model=model)
        assert_kept(model, before)
        made, model_state = eqx.nn.make_with_state(BatchNormed)(key=KEY)
        kept = host(model_state)
        again = trainer.train(model=made, model_state=model_state)
        assert_kept(model_state, kept)
        assert_same(result.state, again.state)
        assert differs(result.state.model_state, model_state)


def test_no_model_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="there is no model"):
        ek.override(quick(), {"model": None}).init()


# --- what is handed out ---------------------------------------------------------------------------------------------


def test_what_the_stepper_handed_out_stays_valid() -> None:
    trainer = quick(ek.lazy(BatchNormed)())
    stepper = ek.train.Stepper(trainer, trainer.init())
    batches = trainer.batches(stepper.state)
    for _ in range(3):
        stepper.step(next(batches))
    state, aux = stepper.state, stepper.swap()
    kept = host(state), host(aux), aux.results()
    predictions = trainer_predictions(trainer, state)
    for _ in range(3):
        stepper.step(next(batches))
    assert_kept(state, kept[0])
    assert_kept(aux, kept[1])
    assert aux.results() == kept[2]
    np.testing.assert_array_equal(trainer_predictions(trainer, state), predictions)
    after, _ = ek.train.step(trainer, state, next(batches))  # and can be trained on
    assert int(after.step) == 4
    assert int(stepper.state.step) == 6


def trainer_predictions(trainer: ek.Trainer, state: Any) -> np.ndarray:
    return np.asarray(ek.train.predict(trainer, state, arrays(10)))


def test_what_the_stepper_started_from_stays_valid() -> None:
    trainer = quick()
    state = trainer.init()
    kept = host(state)
    one, other = ek.train.Stepper(trainer, state), ek.train.Stepper(trainer, state)
    batch = next(trainer.batches(state))
    one.step(batch)
    one.step(batch)
    other.step(batch)
    assert_kept(state, kept)
    assert int(one.state.step) == 2
    assert int(other.state.step) == 1


def test_the_public_step_donates_nothing() -> None:
    trainer = quick(ek.lazy(BatchNormed)())
    state = trainer.init()
    kept = host(state)
    batch = jax.device_put(next(trainer.batches(state)))
    first, aux = ek.train.step(trainer, state, batch)
    kept_aux = host(aux)
    second, _ = ek.train.step(trainer, state, batch)
    ek.train.step(trainer, first, batch)
    assert_same(first, second)
    assert_kept(state, kept)
    assert_kept(aux, kept_aux)
    assert np.asarray(batch.mask).all()


def test_accumulators_go_on_where_they_are_given() -> None:
    trainer = quick()
    stepper = ek.train.Stepper(trainer, trainer.init())
    batches = trainer.batches(stepper.state)
    stepper.step(next(batches))
    state, aux = stepper.state, stepper.borrow()[1]
    other = ek.train.Stepper(trainer, state, accumulators=aux)
    batch = next(batches)
    other.step(batch)
    stepper.step(batch)
    assert_same(other.swap(), stepper.swap())
    assert_same(other.state, stepper.state)


# --- what is trained ------------------------------------------------------------------------------------------------


def adam_sees(state: Any) -> int:
    """Numbers of which the optimizer keeps a moment."""
    return sum(leaf.size for leaf in jax.tree.leaves(optax.tree_utils.tree_get(state.opt_state, "mu")))


ENDS = 6 * 8 + 8 + 8 * 3 + 3


@pytest.mark.parametrize(
    ("node", "hyperparameters"),
    [
        (ek.lazy(Dropping)(rate=0.25), {"dropout.p": 0.25}),
        (ek.lazy(Derived)(rate=0.25), {"keep": 0.75}),
        (ek.lazy(HoldsConfig)(Scaling(2.0)), {"scaling.scale": 2.0}),
        (ek.lazy(WithLambda)(rate=0.5), {"rate": 0.5}),
        (ek.lazy(StaticRate)(dropout_rate=0.25), {}),
    ],
    ids=["dropout", "derived", "config", "lambda", "static"],
)
def test_hyperparameters_are_never_trained(node: Any, hyperparameters: dict[str, float]) -> None:
    trainer = quick(node, optimizer=ek.lazy(optax.adamw)(learning_rate=0.1, weight_decay=0.5))
    result = trainer.train()
    for path, value in hyperparameters.items():
        assert float(ek.tree.get(result.model, path)) == value
    assert adam_sees(result.state) == ENDS
    assert all(
        (a != b).any() for a, b in zip(leaves(result.state.params()), leaves(trainer.init().params()), strict=True)
    )


@pytest.mark.parametrize(
    ("node", "path", "place", "value"),
    [
        (ek.lazy(Dropping)(rate=0.25), "model.rate", "dropout.p", 0.5),
        (ek.lazy(Derived)(rate=0.25), "model.rate", "keep", 0.5),
        (ek.lazy(HoldsConfig)(Scaling(2.0)), "model.scaling.scale", "scaling.scale", 0.5),
        (ek.lazy(WithLambda)(rate=0.25), "model.rate", "rate", 0.5),
    ],
    ids=["dropout", "derived", "config", "lambda"],
)
def test_a_changed_hyperparameter_acts_at_the_next_step(
    node: Any, path: str, place: str, value: float, compilations: Any
) -> None:
    trainer = quick(node)
    state, batches = trainer.init(), trainer.batches(trainer.init())
    state, _ = ek.train.step(trainer, state, next(batches))
    batch = next(batches)
    changed = ek.override(trainer, {path: value})
    compilations.clear()
    Counted.traces[0] = 0
    old, old_aux = ek.train.step(trainer, state, batch)
    new, new_aux = ek.train.step(changed, state, batch)
    assert compilations.names == []
    assert Counted.traces[0] == 0
    assert float(new_aux.loss) != float(old_aux.loss)
    assert float(ek.tree.get(new.model, place)) == value
    assert float(ek.tree.get(old.model, place)) != value
    # As if the model had been made with it: nothing of the old value is left in the state.
    fresh = ek.override(trainer, {path: value})
    moved = eqx.combine(state.params(), fresh.init().model)
    same, aux = ek.train.step(fresh, eqx.tree_at(lambda s: s.model, state, moved), batch)
    assert_same(same, new)
    assert float(aux.loss) == float(new_aux.loss)


def test_a_changed_hyperparameter_acts_in_an_eval(compilations: Any) -> None:
    trainer = quick(ek.lazy(HoldsConfig)(Scaling(2.0)), evals=evaluated())
    trainer.train()
    state = trainer.init()
    one = ek.train.predict(trainer, state, arrays(10))
    compilations.clear()
    other = ek.train.predict(ek.override(trainer, {"model.scaling.scale": 0.5}), state, arrays(10))
    assert compilations.names == []
    np.testing.assert_allclose(other, one / 4, rtol=1e-6)


def test_running_statistics_are_not_trained_and_move() -> None:
    trainer = quick(ek.lazy(BatchNormed)())
    first = trainer.init()
    result = trainer.train()
    assert adam_sees(result.state) == ENDS + 2 * WIDTH  # and the norm's own weight and bias
    assert differs(first.model_state, result.state.model_state)


@pytest.mark.parametrize(
    "trainable", ["last.*", ("last.weight", "last.bias"), lambda path, leaf: path.startswith("last")]
)
def test_what_is_frozen_is_the_same_to_the_bit_and_unknown_to_the_optimizer(trainable: Any) -> None:
    trainer = quick(optimizer=ek.lazy(optax.adamw)(0.1, weight_decay=0.5), trainable=trainable, num_steps=5)
    first, result = trainer.init(), trainer.train()
    assert_same(first.model.first, result.model.first)
    assert all((a != b).any() for a, b in zip(leaves(first.model.last), leaves(result.model.last), strict=True))
    assert adam_sees(result.state) == 8 * 3 + 3


def test_a_pattern_of_trainable_without_a_match_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"(?s)frist.*matches no parameter.*first\.weight"):
        quick(trainable="frist.*").init()


def test_only_inexact_arrays_are_trained() -> None:
    class Offset(Counted):
        steps: jax.Array
        name: str

        def __init__(self, *, key: jax.Array) -> None:
            self.ends(key)
            self.steps = jnp.arange(3)
            self.name = "offset"

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(jnp.tanh(self.first(x))) + self.steps

    result = quick(ek.lazy(Offset)()).train()
    assert adam_sees(result.state) == ENDS
    np.testing.assert_array_equal(result.model.steps, [0, 1, 2])
    assert result.model.name == "offset"


def test_one_array_at_two_paths_is_an_error_with_both() -> None:
    weight = jnp.ones((6, 6))
    tied = eqx.tree_at(lambda m: (m[0].weight, m[1].weight), eqx.nn.MLP(6, 6, 6, 1, key=KEY).layers, (weight, weight))
    model = eqx.tree_at(lambda m: m.layers, eqx.nn.MLP(6, 6, 6, 1, key=KEY), tied)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.weight and at layers\[1\]\.weight"):
        ek.override(quick(), {"model": None}).init(model=model)


def test_evals_of_a_state_whose_model_has_no_description():
    trainer = _small.small(evals=_small.evaluated(), num_steps=2)
    live = trainer.init().model
    undescribed = ek.override(trainer, {"model": None})
    result = undescribed.train(model=live)
    assert undescribed.evaluate(result.state) == {k: v for k, v in result.metrics.items() if k.startswith("test/")}
