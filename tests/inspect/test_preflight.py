"""Preflight tells what an experiment consists of, without computing or compiling the step; and warns of what is odd."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import WiringError
from equikd.examples import digits
from equikd.typing import Array, Bool, Float

DATA = {
    "x": np.ones((8, 3), np.float32),
    "y": np.ones((8, 2), np.float32),
    "id": np.arange(8, dtype=np.int32),
    "nested": {"kept": np.ones((8, 4), np.float32), "lost": np.ones(8, np.float32)},
}


class Net(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    table: np.ndarray

    def __init__(self, rate: float, eps: float, *, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(3, 2, key=key)
        self.norm = eqx.nn.LayerNorm(2, eps=eps)
        self.dropout = eqx.nn.Dropout(rate)
        self.table = np.zeros((2, 2), np.int32)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> dict[str, jax.Array]:
        return {"out": self.dropout(self.norm(self.linear(x)), key=key), "unused": x}


@ek.config.config
class Frozen(ek.losses.Loss):
    """A loss through which no gradient comes."""

    x: ek.KeyPath

    def values(self, x: Float[Array, " b *n"]) -> Float[Array, " b"]:
        return jax.lax.stop_gradient(x).reshape(x.shape[0], -1).sum(1)


@ek.config.config
class OnHost(ek.metrics.Metric):
    """A metric that computes with numpy."""

    x: ek.KeyPath

    class State(ek.metrics.State):
        total: Float[Array, ""] = ek.metrics.sum_field()

        def compute(self) -> Any:
            return {"a": float(np.asarray(self.total)), "b": np.float32(1)}

    def from_values(self, x: Float[Array, " b *n"], mask: Bool[Array, " b"]) -> "OnHost.State":
        return OnHost.State(jnp.where(mask[:, None], x, 0).sum())


def make(**changed: Any) -> ek.Trainer:
    fields = {
        "model": ek.lazy(Net)(0.1, 1e-5),
        "inputs": {"x": "batch.x[..., :3]"},
        "losses": {
            "mse": ek.losses.SquaredError(preds="preds.out", targets="batch.y", weight=ek.ref("shared.weight")),
            "frozen": Frozen(x="preds.out"),
            "data": Frozen(x="batch.nested.kept"),
        },
        "metrics": {"host": OnHost(x="preds.out"), "grad": ek.metrics.Mean(values="grads.linear.bias", mask=None)},
        "optimizer": ek.lazy(optax.adamw)(ek.optim.Constant(0.1), weight_decay=ek.pin(0.5), b1=0.8),
        "train_data": ek.data.InMemory(DATA, batch_size=4),
        "evals": {"test": ek.evals.Eval(data=ek.data.InMemory(DATA, batch_size=2))},
        "num_steps": 2,
        "trainable": ("linear.**",),
        "shared": {"weight": 0.5},
        "trace": ("optimizer.**", "model.**", "losses.*.weight", "shared.**"),
    }
    return ek.Trainer(**fields | changed)


def test_what_it_finds() -> None:
    found = ek.inspect.check(make())
    shapes = {path: (shape.shape, shape.dtype.name) for path, shape in found.paths.items()}
    assert shapes["batch.nested.kept"] == ((4, 4), "float32")
    assert shapes["preds.out"] == ((4, 2), "float32")
    assert shapes["grads.linear.weight"] == ((2, 3), "float32")
    assert shapes["updates.linear.weight"] == shapes["params.linear.weight"] == ((2, 3), "float32")
    assert shapes["step"] == ((), "int32")
    assert "grads.norm.weight" not in shapes  # frozen
    assert list(dict.fromkeys(path.partition(".")[0].partition("[")[0] for path in found.paths)) == [
        "step", "key", "batch", "mask", "model", "preds", "losses", "params", "grads", "updates", "opt_state", "config",
    ]  # fmt: skip
    assert found.evals["test"]["preds.out"].shape == (2, 2)
    assert not any(path.startswith(("grads", "updates", "params")) for path in found.evals["test"])
    assert (found.trainable.leaves, found.trainable.elements, found.trainable.bytes) == (2, 8, 32)
    assert (found.frozen.leaves, found.frozen.elements, found.frozen.bytes) == (3, 8, 32)
    assert found.hyperparameter.leaves == 1
    assert found.results["train/host/a"].shape == ()
    assert {"train/loss", "train/losses/mse", "train/grad", "test/weighted/frozen"} <= found.results.keys()
    assert "test/grad" not in found.results
    assert {*found.readers["preds.out"]} == {"losses.mse.preds", "losses.frozen.x", "metrics.host.x"}


def test_every_float_is_traced_or_says_why_not() -> None:
    found = ek.inspect.check(make(), model=None)
    assert found.floats["model.rate"] == "traced"
    assert found.floats["model.eps"].startswith("static: ")
    assert "LayerNorm.eps" in found.floats["model.eps"]
    assert found.floats["optimizer.weight_decay"] == "static: pinned"
    assert found.floats["optimizer.b1"] == "traced"
    assert found.floats["shared.weight"] == "traced"
    without = ek.inspect.check(make(trace=("optimizer.**", "shared.**")))
    assert without.floats["model.rate"] == "static: left out by `trace`"
    traced = {path for path, why in without.floats.items() if why == "traced"}
    assert len(traced) == len(jax.tree.leaves(make(trace=("optimizer.**", "shared.**")).in_step))


def test_warnings_name_what_nothing_reads_and_losses_without_gradient() -> None:
    assert ek.inspect.check(make()).warnings == (
        "batch.id: nothing reads it",
        "batch.nested.lost: nothing reads it",
        "preds.unused: nothing reads it",
        "losses.data: it has no gradient with respect to any trainable parameter",
        "losses.frozen: it has no gradient with respect to any trainable parameter",
    )


def test_a_step_of_ones_own_may_read_what_it_likes() -> None:
    found = ek.inspect.check(make(step=ek.train.default_step, trace="all"))
    assert found.warnings == ()
    assert found.paths["preds.out"].shape == (4, 2)
    assert "train/loss" in found.results


def test_the_printed_tables(snapshot: Any) -> None:
    snapshot("tables", str(ek.inspect.check(make())))


def test_it_refuses_what_training_would_refuse() -> None:
    wrong = make(inputs={"x": "batch.xx"}, metrics={"host": OnHost(x="preds.outt")})
    with pytest.raises(WiringError, match=r"inputs\.x = 'batch\.xx'"):
        ek.inspect.check(wrong)


def test_digits_is_checked_without_compiling_the_step(compilations: Any) -> None:
    trainer = digits.get_config()
    compilations.clear()
    found = ek.inspect.check(trainer)
    assert not any("step" in name for name in compilations.names)
    assert found.warnings == ()
    assert found.trainable.elements == 26122


def test_memory_is_that_of_the_compiled_step(compilations: Any) -> None:
    trainer = make()
    compilations.clear()
    memory = ek.inspect.check(trainer, memory=True).memory
    assert [name for name in compilations.names if "step" in name] == ["jit(flat_step)"]
    assert memory is not None
    leaves = [leaf for leaf in jax.tree.leaves(trainer.init()) if eqx.is_array(leaf)]
    state = sum(leaf.nbytes for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
    batch = sum(array.nbytes for array in jax.tree.leaves(DATA)) // 2
    assert memory.arguments > 0.9 * state
    assert memory.arguments < 2 * (state + batch) + 4096
    assert memory.peak >= memory.arguments + memory.temporary


class Uncallable(eqx.Module):
    """What a step of one's own trains, in its own way."""

    weight: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        self.weight = jax.random.normal(key, (3,))


def own_step(config: Any, state: Any, batch: Any) -> Any:
    context = ek.train.begin(config, state, ek.data.as_batch(batch), state.model)
    params = state.params()
    grads = jax.grad(lambda params: (context.batch["x"] @ params.weight).sum())(params)
    state, context = ek.train.apply_updates(config, state, context.replace(params=params, grads=grads))
    return state, ek.train.collect(config, context)


def test_a_model_that_only_a_step_of_ones_own_can_call() -> None:
    trainer = make(
        model=ek.lazy(Uncallable)(),
        step=own_step,
        inputs={},
        losses={},
        metrics={},
        evals={},
        trainable=None,
        trace="all",
    )
    trainer.train()
    found = ek.inspect.check(trainer)
    assert found.paths["batch.x"].shape == (4, 3)
    assert found.paths["model.weight"].shape == (3,)
    assert not any(path.startswith("preds") for path in found.paths)


class Summed(eqx.Module):
    net: Net

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.net(x)["out"].sum()


def test_an_eval_shows_what_its_transform_predicts() -> None:
    plain = make().evals["test"]
    metrics = {"mean": ek.metrics.Mean("preds")}
    evals = {"test": ek.evals.Eval(data=plain.data, transform=Summed, losses={}, metrics=metrics)}
    found = ek.inspect.check(make(evals=evals))
    assert found.evals["test"]["preds"].shape == (plain.data.batch_size,)


@ek.config.config
class NeedsRows(OnHost):
    """A metric whose value does not exist without rows."""

    class State(ek.metrics.State):
        total: Float[Array, ""] = ek.metrics.sum_field()

        def compute(self) -> Any:
            if float(np.asarray(self.total)) == 0:
                raise ValueError("no rows")
            return 1.0

    def from_values(self, x: Float[Array, " b *n"], mask: Bool[Array, " b"]) -> "NeedsRows.State":
        return NeedsRows.State(mask.sum(dtype=jnp.float32))


def test_a_metric_that_needs_rows_to_compute() -> None:
    trainer = make(metrics={"rows": NeedsRows(x="preds.out")})
    assert trainer.train().metrics["train/rows"] == 1.0
    found = ek.inspect.check(trainer)
    assert found.results["train/rows"] is None
    assert found.results["test/losses/mse"] is not None
    assert "as its rows say" in str(found)


class Many(eqx.Module):
    """A tuple of outputs."""

    linear: eqx.nn.Linear

    def __init__(self, *, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(3, 2, key=key)

    def __call__(self, x: jax.Array) -> Any:
        return self.linear(x), x, (x, self.linear(x))


def test_negative_indices_and_attributes_are_read() -> None:
    losses = {
        "a": ek.losses.SquaredError(preds="preds[-3]", targets="batch.y"),
        "b": ek.losses.SquaredError(preds="preds[-1][-1][..., :2]", targets="batch.y"),
    }
    found = ek.inspect.check(make(model=ek.lazy(Many)(), losses=losses, metrics={}, trace="all", evals={}))
    assert [text for text in found.warnings if text.startswith("preds")] == [
        "preds[1]: nothing reads it",
        "preds[2][0]: nothing reads it",
    ]
    both = {"a": losses["a"], "b": ek.losses.SquaredError(preds="preds[0]", targets="batch.y")}
    found = ek.inspect.check(make(model=ek.lazy(Many)(), losses=both, metrics={}, trace="all", evals={}))
    assert found.readers["preds[0]"] == ("losses.a.preds", "losses.b.preds")


def test_nothing_trained_and_evals_without_results_are_warnings() -> None:
    without = {"x": DATA["x"]}
    evals = {"bare": ek.evals.Eval(data=ek.data.InMemory(without, batch_size=4), losses={})}
    losses = {"mse": ek.losses.SquaredError(preds="preds.out", targets="batch.y")}
    found = ek.inspect.check(make(trainable=(), losses=losses, metrics={}, evals=evals, trace="all"))
    assert "trainable: nothing is trained" in found.warnings
    assert any(text.startswith("evals.bare: it reports nothing") for text in found.warnings)


def test_long_parts_of_the_context_are_cut_in_the_summary_only() -> None:
    deep = ek.lazy(eqx.nn.MLP)(3, 2, 4, 20)
    losses = {"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")}
    trainer = make(model=deep, losses=losses, metrics={}, trainable=None, trace="all", evals={})
    found = ek.inspect.check(trainer)
    assert "opt_state.**" in str(found)
    assert len(str(found).splitlines()) < 80
    assert "layers[20].bias" not in str(found)
    assert "opt_state[0].mu.layers[20].bias" in found.context


def test_what_opening_the_data_refuses_is_refused() -> None:
    with pytest.raises(ek.errors.DataError, match="larger than the data"):
        ek.inspect.check(make(train_data=ek.data.InMemory(DATA, batch_size=400), evals={}))
    with pytest.raises(ek.errors.ConfigError, match="writer"):
        ek.inspect.check(make(writers=(3,)))
