"""What each layer returns on a batch: numbers against numpy, one forward pass, and what a reader sees."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from tests.train._small import BATCH, CLASSES, FEATURES, BatchNormed, Counted, Dropping, arrays, quick


class Net(eqx.Module):
    """A scan over layers, a layer that is called twice, a switch, and a layer that is not called."""

    first: eqx.nn.Linear
    stacked: eqx.nn.Linear
    twice: eqx.nn.Linear
    experts: list[eqx.nn.Linear]
    relu: Any
    never: eqx.nn.Linear
    pair: "Pair"

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        linear = lambda key: eqx.nn.Linear(FEATURES, FEATURES, key=key)
        self.first, self.twice = linear(keys[0]), linear(keys[1])
        self.stacked = eqx.filter_vmap(linear)(jax.random.split(keys[2], 3))
        self.experts = [eqx.nn.Linear(FEATURES, CLASSES, key=key) for key in keys[3:5]]
        self.relu = jax.nn.relu
        self.never = linear(keys[5])
        self.pair = Pair()

    def __call__(self, x: jax.Array) -> jax.Array:
        chosen = jnp.int32(x[0] <= 0)
        x = self.relu(self.first(x))
        parts, static = eqx.partition(self.stacked, eqx.is_array)
        x = jax.lax.scan(lambda x, part: (jnp.tanh(eqx.combine(part, static)(x)), None), x, parts)[0]
        x, _ = self.pair(self.twice(self.twice(x)))
        branches = [lambda x, expert=expert: expert(x) for expert in self.experts]
        return jax.lax.switch(chosen, branches, x)


class Pair(eqx.Module):
    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        return x, {"signs": x > 0, "word": "yes", "number": 3}


def make(rows: int = 40, **fields: Any) -> ek.Trainer:
    made: dict[str, Any] = {
        "model": ek.lazy(Net)(),
        "train_data": ek.data.InMemory(arrays(rows), batch_size=BATCH),
        "optimizer": ek.lazy(optax.sgd)(0.1),
        "metrics": {},
    }
    return quick(**made | fields)


def moments(values: Any) -> tuple[float, float, float]:
    values = np.asarray(values, np.float64)
    return values.mean(), values.std(), (values == 0).mean()


def test_numbers_are_those_of_the_outputs() -> None:
    trainer = make()
    state = trainer.init()
    batch = next(trainer.batches(state))
    found, model = ek.inspect.layers(trainer, state, batch), state.model
    first = jax.vmap(model.first)(batch.data["x"])
    h, each = jax.nn.relu(first), []
    for at in range(3):
        layer = jax.tree.map(lambda leaf, at=at: leaf[at] if eqx.is_array(leaf) else leaf, model.stacked)
        each.append(jax.vmap(layer)(h))
        h = jnp.tanh(each[-1])
    once = jax.vmap(model.twice)(h)
    both = jax.vmap(model.twice)(once)
    chosen = np.asarray(batch.data["x"][:, 0] > 0)
    expected = {
        "first": first,
        "relu": jax.nn.relu(first),
        "stacked": each,
        "twice[0]": once,
        "twice[1]": both,
        "pair[0][0]": both,
        "pair[0][1].signs": both > 0,
        "experts[0]": jax.vmap(model.experts[0])(both)[chosen],
        "experts[1]": jax.vmap(model.experts[1])(both)[~chosen],
    }
    assert 0 < chosen.sum() < len(chosen)
    assert {row.path for row in found} == {*expected}
    for path, values in expected.items():
        row = found[path]
        np.testing.assert_allclose((row.mean, row.std, row.zeros), moments(values), rtol=1e-4, atol=1e-6)
        assert row.non_finite == 0
    assert found["stacked"].shape == (3, FEATURES)
    assert found["stacked"].parameters == 3 * (FEATURES + 1) * FEATURES
    assert found["first"].shape == (FEATURES,)
    assert found["pair[0][1].signs"].dtype == "bool"
    assert found["relu"].parameters == 0


def test_rows_of_padding_and_numbers_that_are_not_finite_are_left_out() -> None:
    trainer = make(rows=BATCH)
    state = trainer.init()
    x = arrays(BATCH)["x"].copy()
    x[0, 0], x[-1] = np.inf, 1e6
    batch = ek.data.Batch({"x": x, "label": arrays(BATCH)["label"]}, np.arange(BATCH) < BATCH - 1)
    found = ek.inspect.layers(trainer, state, batch)
    assert found.examples == BATCH - 1
    good = jax.vmap(state.model.first)(x[1:-1])
    row = found["first"]
    np.testing.assert_allclose((row.mean, row.std, row.zeros), moments(good), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(row.non_finite, 1 / (BATCH - 1))


def test_dropout_and_batch_statistics_are_those_of_a_training_step() -> None:
    trainer = make(model=ek.lazy(Dropping)(0.5))
    state = trainer.init()
    assert 0.2 < ek.inspect.layers(trainer, state)["dropout"].zeros
    kept = ek.inspect.layers(trainer, state, inference=True)["dropout"].zeros
    assert kept < ek.inspect.layers(trainer, state)["dropout"].zeros
    normed = ek.inspect.layers(make(model=ek.lazy(BatchNormed)()))["norm[0][0]"]
    np.testing.assert_allclose((normed.mean, normed.std), (0, 1), atol=1e-2)


def test_one_forward_pass_compiled_once(compilations: Any) -> None:
    trainer = make(model=ek.lazy(Dropping)(0.1), train_data=ek.data.InMemory(arrays(40), batch_size=13))
    state = trainer.init()
    batches = trainer.batches(state)
    first, second = next(batches), next(batches)
    before = Counted.traces[0]
    ek.inspect.layers(trainer, state, first)
    assert [name for name in compilations.names if "moments" in name] == ["jit(_moments)"], compilations.names
    assert Counted.traces[0] - before == 1
    compilations.clear()
    ek.inspect.layers(trainer, state, second)
    assert compilations.names == []
    assert Counted.traces[0] - before == 1


def test_what_a_reader_sees(snapshot: Any) -> None:
    class Dead(eqx.Module):
        relu: eqx.nn.Lambda
        bad: eqx.nn.Lambda
        flat: eqx.nn.Lambda
        head: eqx.nn.Linear

        def __init__(self, *, key: jax.Array) -> None:
            self.relu = eqx.nn.Lambda(lambda x: jax.nn.relu(x - 100))
            self.bad = eqx.nn.Lambda(lambda x: jnp.log(-1 - x))
            self.flat = eqx.nn.Lambda(lambda x: jnp.full(3, 2.0) + 0 * x[0])
            self.head = eqx.nn.Linear(FEATURES, CLASSES, key=key)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.relu(x)
            return self.head(x) + 0 * jnp.nan_to_num(self.bad(x)).sum() + 0 * self.flat(x).sum()

    trainer = ek.override(make(), {"model": None})
    found = ek.inspect.layers(trainer, model=Dead(key=jax.random.key(0)))
    lines = str(found).splitlines()
    assert lines[0] == f"Layers, over {BATCH} examples"
    snapshot("layers", "\n".join(line for line in lines if "head" not in line))
    shown = found._repr_mimebundle_()
    assert "text/html" in shown
    assert "FINITE" in shown["text/plain"]


def test_one_state_or_one_model() -> None:
    trainer = make()
    state = trainer.init()
    with pytest.raises(ek.errors.ConfigError, match="two models"):
        ek.inspect.layers(trainer, state, model=state.model)


@pytest.mark.slow
def test_meshes_precision_and_models_of_whole_batches() -> None:
    plain = ek.inspect.layers(make())
    spread = ek.inspect.layers(make(mesh=ek.sharding.data_parallel()))
    low = ek.inspect.layers(make(precision=ek.optim.Precision()))
    for row in (row for row in plain if not np.isnan(row.std)):
        np.testing.assert_allclose(spread[row.path].std, row.std, rtol=1e-5)
        assert abs(low[row.path].std - row.std) < 0.05

    class Whole(eqx.Module):
        layer: eqx.nn.Linear

        def __init__(self, *, key: jax.Array) -> None:
            self.layer = eqx.nn.Linear(FEATURES, CLASSES, key=key)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.vmap(self.layer)(x)

    whole = ek.inspect.layers(make(model=ek.lazy(Whole)(), per_example=False))
    assert whole["layer"].shape == (BATCH, CLASSES)


def test_all_there_is_to_watch_can_be_watched() -> None:
    trainer = make()
    paths = ek.inspect.intermediates(trainer).paths
    assert paths["interms.stacked"].shape == (BATCH, 3, FEATURES)
    assert list(paths)[:3] == ["interms.first", "interms.stacked", "interms.twice[0]"]
    metrics = {f"m{i}": ek.metrics.Mean(path) for i, path in enumerate(paths)}
    options = ek.intermediates.Options(absent="zeros")
    shapes = ek.inspect.check(make(metrics=metrics, intermediates=options)).paths
    assert {path: shapes[path].shape for path in paths} == {path: shape.shape for path, shape in paths.items()}
