"""What compiles, and how often; what is traced, and how often the loop reads the device."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import equikd as ek
from tests.train._small import (
    BatchNormed,
    Counted,
    Derived,
    Dropping,
    HoldsConfig,
    LayerNormed,
    Plain,
    Scaling,
    StaticRate,
    WithLambda,
    arrays,
    assert_same,
    differs,
    evaluated,
    quick,
)

MODELS: dict[str, Any] = {
    "plain": ek.lazy(Plain)(),
    "dropout": ek.lazy(Dropping)(rate=0.25),
    "lambda": ek.lazy(WithLambda)(rate=0.5),
    "batch norm": ek.lazy(BatchNormed)(momentum=0.9),
    "layer norm": ek.lazy(LayerNormed)(eps=1e-5),
    "static rate": ek.lazy(StaticRate)(dropout_rate=0.25),
    "config": ek.lazy(HoldsConfig)(Scaling(2.0)),
    "derived": ek.lazy(Derived)(rate=0.25),
}


@functools.cache
def base() -> ek.Trainer:
    return quick(
        MODELS["dropout"], evals=evaluated(), shared={"unused": 1.0}, checkpoints=ek.train.Checkpoints(every=6)
    )


@ek.config.config
class Silent:
    """A writer that writes nothing."""

    def open(self, run: Any) -> Any:
        return self

    def tick(self, step: int) -> None: ...
    def write(self, record: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


OUTSIDE: dict[str, dict[str, Any]] = {
    "num_steps": {"num_steps": 9},
    "seed": {"seed": 7},
    "log_every": {"log_every": 3},
    "evals.test.every": {"evals.test.every": 3},
    "evals.test.every is None": {"evals.test.every": None},
    "checkpoints": {"checkpoints": ek.train.Checkpoints(every=4, keep=1)},
    "no checkpoints": {"checkpoints": None},
    "writers": {"writers": (Silent(),)},
    "no thread": {"prefetch": 0},
    "a limit of compilations": {"max_compilations": 0},
    "order of the data": {"train_data.seed": 3},
    "no shuffling": {"train_data.shuffle": False},
    "other data": {"train_data": ek.data.InMemory(arrays(seed=2), batch_size=16)},
    "ragged end": {"train_data.drop_remainder": False},
    "other eval data": {"evals.test.data": ek.data.InMemory(arrays(30, seed=2), batch_size=20)},
    "a limit": {"stop_after": ek.train.StopAfter(steps=100)},
    "early stopping": {"early_stop": ek.train.EarlyStop("train/loss", patience=100)},
    "shared, unused": {"shared.unused": 2.0},
    "shared, more": {"shared": {"unused": 1.0, "also": 2.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", OUTSIDE)
def test_what_is_outside_the_step_traces_and_compiles_nothing(change: str, compilations: Any, tmp_path: Path) -> None:
    state = base().train(tmp_path / "base").state
    ek.train.step(base(), state, next(base().batches(state)))
    changed = ek.override(base(), OUTSIDE[change])
    compilations.clear()
    Counted.traces[0] = 0
    result = changed.train(tmp_path / "changed")
    state = changed.init()
    ek.train.step(changed, state, next(changed.batches(state)))
    assert compilations.names == []
    assert Counted.traces[0] == 0
    assert int(result.state.step) == changed.num_steps


def test_every_field_outside_the_step_is_among_these() -> None:
    inside = {field.name for field in dataclasses.fields(base().in_step)}
    fields = {field.name for field in dataclasses.fields(ek.Trainer)} - inside
    elsewhere = {"evals", "init_from", "compilation_cache", "steps_per_call"}  # see the tests of each
    assert fields == {path.partition(".")[0] for change in OUTSIDE.values() for path in change} | elsewhere


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "layer norm" else pytest.mark.slow) for kind in MODELS]
)
def test_a_second_trainer_a_second_run_and_the_public_step_compile_nothing(kind: str, compilations: Any) -> None:
    def make() -> ek.Trainer:
        return quick(MODELS[kind], evals=evaluated(), optimizer=ek.lazy(optax.adam)(learning_rate=1e-2))

    trainer = make()
    first = trainer.train()
    first.predict(arrays(20, seed=3))
    assert Counted.traces[0] > 0
    Counted.traces[0] = 0
    state = trainer.init()
    ek.train.step(trainer, state, next(trainer.batches(state)))  # takes rows from the host, and the loop its own
    assert Counted.traces[0] == 0
    compilations.clear()
    again, second = trainer.train(), make().train()
    assert_same(first.state, again.state)
    assert_same(first.state, second.state)
    assert first.metrics == again.metrics == second.metrics
    np.testing.assert_array_equal(first.predict(arrays(20, seed=3)), second.predict(arrays(20, seed=3)))
    state = make().init()
    for _, batch in zip(range(trainer.num_steps), trainer.batches(state), strict=False):
        state, _ = ek.train.step(trainer, state, batch)
    assert_same(first.state, state)
    other = ek.override(trainer, {"optimizer.learning_rate": 3e-2}).train()
    assert differs(first.state, other.state)
    assert compilations.names == []
    assert Counted.traces[0] == 0


def test_the_order_of_names_is_no_part_of_the_structure(compilations: Any) -> None:
    def make(names: str) -> ek.Trainer:
        weights = {"a": 1.0, "b": 0.25}
        loss = lambda weight: ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label", weight=weight)
        return quick(losses={name: loss(weights[name]) for name in names})

    first = make("ab").train()
    compilations.clear()
    second = make("ba").train()
    assert compilations.names == []
    assert first.metrics == second.metrics
    np.testing.assert_allclose(first.metrics["train/weighted/b"], first.metrics["train/losses/b"] / 4, rtol=1e-6)


def test_a_resumed_run_compiles_nothing_in_the_process_that_has_trained(compilations: Any, tmp_path: Path) -> None:
    whole = base().train(tmp_path / "whole")
    ek.override(base(), {"num_steps": 6}).train(tmp_path / "run")
    compilations.clear()
    Counted.traces[0] = 0
    resumed = base().train(tmp_path / "run")
    assert set(compilations.names) <= {"jit(stage)"}  # JAX's own, of a PRNG key from the host
    assert Counted.traces[0] == 0
    assert_same(resumed.state, whole.state)


def on_device(tree: Any, index: int = 0) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.devices()[index]), tree)


def test_arrays_that_are_committed_to_their_device_compile_nothing_more(compilations: Any) -> None:
    """As those of a model that was put on a device are, and what is computed from them."""
    trainer = quick(evals=evaluated())
    model = Plain(key=jax.random.key(1))
    result = trainer.train(model=model)
    result.predict(arrays(20))
    state = trainer.init(model=model)
    batch = next(trainer.batches(state))
    ek.train.step(trainer, state, batch)
    on_device(model), on_device(batch)
    compilations.clear()
    assert_same(trainer.train(model=on_device(model)).state, result.state)
    ek.train.predict(trainer, state, arrays(20))
    stepper = ek.train.Stepper(trainer, state)
    for given in (batch, on_device(batch), jax.device_put(batch), batch, on_device(batch)):
        state, _ = ek.train.step(trainer, state, given)
        stepper.step(given)
        stepper.swap()
    assert_same(stepper.state, state)
    assert compilations.names == []


def test_a_model_on_another_device_is_trained_there_with_one_compilation(compilations: Any) -> None:
    trainer = quick(evals=evaluated())
    model = Plain(key=jax.random.key(1))
    here = trainer.train(model=model)
    compilations.clear()
    there = trainer.train(model=on_device(model, 1))
    trainer.train(model=on_device(model, 1))
    assert compilations.names.count("jit(flat_step)") == 1
    assert compilations.names.count("jit(_eval_and_merge)") == 1
    assert_same(here.state, there.state)
    for leaf in jax.tree.leaves(eqx.filter(there.state, eqx.is_array)):
        assert leaf.devices() == {jax.devices()[1]}


STATIC = {
    "layer norm": ("model.eps", 0.5),
    "batch norm": ("model.momentum", 0.5),
    "static rate": ("model.dropout_rate", 0.5),
}


@pytest.mark.parametrize("kind", STATIC)
def test_a_float_that_a_module_declares_static_recompiles_once(kind: str, compilations: Any) -> None:
    path, value = STATIC[kind]
    before = quick(MODELS[kind]).train()
    compilations.clear()
    changed = ek.override(quick(MODELS[kind]), {path: value})
    after = changed.train()
    assert compilations.names == ["jit(flat_step)"]
    assert differs(before.state, after.state)
    changed.train()
    quick(MODELS[kind]).train()
    ek.override(changed, {"optimizer.learning_rate": 0.3}).train()
    assert compilations.names == ["jit(flat_step)"]


@pytest.mark.slow
def test_equal_static_values_of_another_type_are_another_program(compilations: Any) -> None:
    """1 is not True, and -0.0 not 0.0."""

    def run(value: Any) -> Any:
        return quick(optimizer=ek.lazy(_sgd)(1e-2, ek.pin(value) if type(value) is float else value)).train()

    run(1)
    compilations.clear()
    run(True)
    assert compilations.names == ["jit(flat_step)"]
    run(0.0)
    compilations.clear()
    run(-0.0)
    assert compilations.names == ["jit(flat_step)"]


def _sgd(rate: float, marker: Any) -> Any:
    del marker
    return optax.sgd(rate)


class _Watch:
    """Notes the number of compilations after each step."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.counts = names, [0]

    def open(self, run: Any) -> Any:
        return self

    def tick(self, step: int) -> None:
        self.counts.append(len(self.names))

    def write(self, record: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def test_one_compilation_of_the_step_and_one_of_the_eval_in_300_steps(
    compilations: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    watch = _Watch(compilations.names)
    monkeypatch.setattr(Silent, "open", watch.open)
    trainer = quick(
        ek.lazy(Dropping)(rate=0.125),
        optimizer=ek.lazy(optax.adamw)(learning_rate=1e-3),  # another structure than all other tests have
        num_steps=300,
        log_every=7,
        evals=evaluated(every=11),
        train_data=ek.data.InMemory(arrays(), batch_size=20, drop_remainder=False),  # ragged in training, too
        checkpoints=ek.train.Checkpoints(every=13),
        writers=(Silent(),),
    )
    trainer.train(tmp_path / "run")
    assert [name for name in compilations.names if "step" in name or "eval" in name] == [
        "jit(flat_step)",
        "jit(_eval_and_merge)",
    ]
    after_one_of_each = watch.counts[14]
    assert watch.counts[-1] == after_one_of_each
    assert len(compilations.names) == after_one_of_each  # nor at the end


def test_the_device_is_read_once_an_interval_and_once_an_eval(monkeypatch: Any) -> None:
    from equikd.train import _output

    reads = []

    def read(aux: Any) -> Any:
        reads.append(aux)
        return original(aux)

    original = _output.read
    monkeypatch.setattr(_output, "read", read)
    quick(num_steps=20, log_every=4).train()
    assert len(reads) == 5
    reads.clear()
    quick(num_steps=22, log_every=4, evals=evaluated(every=10)).train()  # intervals end at 4, 8, ..., 20, 22
    assert len(reads) == 6 + 3


def test_the_device_is_read_one_interval_late(monkeypatch: Any) -> None:
    from equikd.train import _output

    steps, reads = [0], []
    original, step = _output.read, ek.train.Stepper.run

    def read(aux: Any) -> Any:
        reads.append(steps[0])
        return original(aux)

    def counted(self: Any, batch: Any) -> None:
        steps[0] += 1
        step(self, batch)

    monkeypatch.setattr(_output, "read", read)
    monkeypatch.setattr(ek.train.Stepper, "run", counted)
    quick(num_steps=20, log_every=5).train()
    assert reads == [10, 15, 20, 20]


def test_the_stepper_reads_nothing(monkeypatch: Any) -> None:
    """`jax.device_get`, `float` and `np.asarray` of an array all ask for its `_value`."""
    trainer = quick(num_steps=20, log_every=5)
    stepper = ek.train.Stepper(trainer, trainer.init())
    batches = trainer.batches(stepper.state)
    stepper.step(next(batches))
    asked = []
    monkeypatch.setattr(type(jax.numpy.zeros(())), "_value", property(asked.append))
    for _ in range(5):
        stepper.step(next(batches))
    stepper.swap()
    assert asked == []
