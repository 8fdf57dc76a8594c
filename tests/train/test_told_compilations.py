"""A compilation of the step after the first is told, with its reason; `max_compilations` refuses it."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.train import CompilationError, _feed
from tests.train._small import Plain, arrays, quick


class Losing:
    """A pipeline that breaks its promise: the sixth batch and those after it have a row less."""

    def batches(self, start: int, seed: int) -> Iterator[ek.data.Batch]:
        for number in range(start, 100):
            yield ek.data.as_batch(arrays(8 if number < 5 else 7, seed=number))

    def epoch(self) -> Iterator[ek.data.Batch]:
        yield ek.data.as_batch(arrays(8))

    def spec(self) -> ek.data.Batch:
        return ek.data.element_spec(ek.data.as_batch(arrays(8)))


def test_another_shape_is_told_once_and_stands_in_the_rows(tmp_path: Path, caplog: Any, snapshot: Any) -> None:
    with caplog.at_level(logging.WARNING, "equikd"):
        quick(train_data=ek.lazy(Losing)(), num_steps=12).train(tmp_path / "run")
    told = [record.getMessage() for record in caplog.records if record.name == "equikd"]
    assert len(told) == 1
    snapshot("another_shape", told[0])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["split"] == "compilation"]
    assert (row["step"], row["metrics"]) == (6, {"number": 2.0})
    assert [(one["path"], one["kind"], one["before"], one["after"]) for one in row["differences"]] == [
        ("batch.label", "shape", "[8]", "[7]"),
        ("batch.x", "shape", "[8, 6]", "[7, 6]"),
        ("mask", "shape", "[8]", "[7]"),
    ]
    read = ek.train.Record(6, "compilation", {"number": 2.0}, row["seconds"], differences=tuple(row["differences"]))
    from equikd.train._rows import read_records

    assert read in read_records(tmp_path / "run/metrics.jsonl")


def test_one_too_many_is_refused_before_it_is_made(tmp_path: Path, compilations: Any, snapshot: Any) -> None:
    own = {"optimizer": ek.lazy(optax.adan)(1e-3)}  # lest another test has compiled it
    trainer = quick(train_data=ek.lazy(Losing)(), num_steps=12, max_compilations=1, **own)
    with pytest.raises(CompilationError) as caught:
        trainer.train(tmp_path / "run")
    snapshot("one_too_many", str(caught.value))
    assert compilations.names.count("jit(flat_step)") == 1
    assert int(ek.override(trainer, {"num_steps": 5}).train().state.step) == 5


def test_none_at_all_admits_what_is_compiled_already() -> None:
    optimizer = ek.lazy(optax.lion)(1e-3)
    with pytest.raises(CompilationError, match="max_compilations is 0"):
        quick(optimizer=optimizer, max_compilations=0).train()
    quick(optimizer=optimizer).train()
    quick(optimizer=ek.lazy(optax.lion)(3e-3), max_compilations=0).train()


def stepped(trainer: ek.Trainer, batch: Any = None) -> None:
    stepper = ek.train.Stepper(trainer, trainer.init())
    stepper.step(arrays(20) if batch is None else batch)


def told(caplog: Any, *trainers: ek.Trainer) -> str:
    """What is told of the last of some trainers."""
    with caplog.at_level(logging.INFO, "equikd"):
        for trainer in trainers:
            caplog.clear()
            stepped(trainer)
    (record,) = [record for record in caplog.records if record.name == "equikd"]
    assert record.levelno == logging.INFO  # another experiment, not the same run
    return record.getMessage()


def pair(kind: str) -> tuple[ek.Trainer, ek.Trainer]:
    base = quick(optimizer=ek.lazy(optax.adamw)(1e-3))
    changes: dict[str, dict[str, Any]] = {
        "optimizer": {"optimizer": ek.lazy(optax.sgd)(1e-3)},
        "a static value": {"optimizer": ek.lazy(optax.adamw)(1e-3, nesterov=True)},
        "accumulate": {"accumulate": 2},
        "a metric more": {"metrics": {**base.metrics, "norm": ek.metrics.Norm("grads")}},
        "precision": {"precision": ek.optim.Precision()},
    }
    return base, ek.override(base, changes[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["optimizer", "a static value", "accumulate", "a metric more", "precision"])
def test_what_differs_between_experiments_is_told(kind: str, caplog: Any, snapshot: Any) -> None:
    jax.clear_caches()
    from equikd.train import _compilations, _program

    _compilations._KNOWN.clear()
    _program._PROGRAMS.made.clear()
    snapshot(kind.replace(" ", "_"), told(caplog, *pair(kind)))


def test_an_equal_optimizer_and_another_rate_compile_nothing(compilations: Any, caplog: Any) -> None:
    """(optax 197, 577)"""
    stepped(quick(optimizer=ek.lazy(optax.adamw)(1e-3)))
    compilations.clear()
    with caplog.at_level(logging.INFO, "equikd"):
        for rate in (1e-3, 3e-3, 0.1):
            stepped(quick(optimizer=ek.lazy(optax.adamw)(rate)))
    assert compilations.names == []
    assert not [record for record in caplog.records if record.name == "equikd"]


def test_a_setting_of_jax_is_told(caplog: Any) -> None:
    trainer = quick(optimizer=ek.lazy(optax.adadelta)(1e-3))
    stepper = ek.train.Stepper(trainer, trainer.init())
    stepper.step(arrays(20))
    with caplog.at_level(logging.WARNING, "equikd"), jax.default_matmul_precision("highest"):
        stepper.step(arrays(20))
    (record,) = [record for record in caplog.records if record.name == "equikd"]
    assert "jax setting jax.config.jax_default_matmul_precision = None -> 'highest'" in record.getMessage()


def test_a_weak_type_alone_is_told(caplog: Any) -> None:
    """(equinox 817)"""

    class Scaled(eqx.Module):
        inner: Plain

        def __init__(self, *, key: jax.Array) -> None:
            self.inner = Plain(key=key)

        def __call__(self, x: jax.Array, scale: jax.Array) -> jax.Array:
            return self.inner(x) * scale

    rows = arrays(20)
    trainer = quick(
        ek.lazy(Scaled)(),
        inputs={"x": "batch.x", "scale": "batch.scale"},
        train_data=ek.data.InMemory({**rows, "scale": np.ones(20, np.float32)}, batch_size=20),
    )
    stepper = ek.train.Stepper(trainer, trainer.init())
    with caplog.at_level(logging.WARNING, "equikd"):
        for weak in (False, True):
            scale = jnp.full(20, 1.0) if weak else jnp.ones(20, jnp.float32)
            assert scale.weak_type is weak
            stepper.step({**rows, "scale": scale})
    (record,) = [record for record in caplog.records if record.name == "equikd"]
    assert "batch.scale: weak type strong float32 -> weak float32" in record.getMessage()
    assert record.getMessage().count("->") == 1


def test_steps_that_compile_nothing_tell_nothing(caplog: Any, monkeypatch: Any) -> None:
    from equikd.train import _program

    asked = []
    tell = _program.tell_traced
    monkeypatch.setattr(_program, "tell_traced", lambda call: (asked.append(1), tell(call)))
    quick(optimizer=ek.lazy(optax.rmsprop)(1e-3), num_steps=40).train()
    assert len(asked) == 1


def test_an_eval_cannot_have_the_name_of_these_rows() -> None:
    with pytest.raises((TypeError, ValueError), match="an eval cannot be named 'compilation'"):
        quick(evals={"compilation": ek.evals.Eval(data=ek.data.InMemory(arrays(), batch_size=10))}).train()


READERS = ["__float__", "__int__", "__bool__", "__index__", "__array__", "item", "tolist", "__complex__"]


@pytest.mark.parametrize("most", [1, 7])
@pytest.mark.parametrize("on_device", [True, False])
def test_the_device_is_read_at_the_ends_of_intervals_alone(most: int, on_device: bool, monkeypatch: Any) -> None:
    """Counted at the one function that reads, and by patching whatever else could (elegy 141, wandb 3690)."""
    from equikd.train import _output

    if not on_device:
        monkeypatch.setattr(_feed, "fits", lambda *arguments: False)
    trainer = quick(num_steps=40, log_every=10, steps_per_call=most)
    trainer.train()
    inside, reads, strays = [False], [], []
    read, loop = _output.read, ek.train.Stepper.run
    array = type(jnp.zeros(()))

    def reading(pending: Any) -> Any:
        inside[0] = True
        reads.append(pending.step)
        try:
            return read(pending)
        finally:
            inside[0] = False

    def watched(name: str) -> Any:
        original = getattr(array, name)

        def stray(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not inside[0]:
                strays.append(name)
            return original(self, *args, **kwargs)

        return stray

    def running(self: Any, fed: Any) -> None:
        if not running_since[0]:  # from the first step on; what comes before it starts the run
            running_since[0] = True
            for name in READERS:
                monkeypatch.setattr(array, name, watched(name))
        loop(self, fed)

    running_since = [False]
    monkeypatch.setattr(_output, "read", reading)
    monkeypatch.setattr(ek.train.Stepper, "run", running)
    trainer.train()
    assert reads == [10, 20, 30, 40]
    assert set(strays) <= {"__array__"}, strays
    assert len(strays) <= 1, strays  # whether parameters are finite, when all is done
