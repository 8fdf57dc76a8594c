"""Several devices compute what one does: training, metrics, evals, predictions, resumes."""

import shutil
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.errors import DataError, WiringError
from equikd.train._program import program_for
from equikd.typing import Array, Bool, Float, Int
from tests.train._parts import Unmasked
from tests.train._small import BATCH, BatchNormed, Dropping, Plain, arrays, assert_same, evaluated, leaves, quick, small

MESHES: dict[str, Any] = {
    "data parallel": ek.sharding.data_parallel(),
    "fsdp": ek.sharding.fsdp(min_bytes=32),
}
SGD = ek.lazy(optax.sgd)(learning_rate=0.1, momentum=0.9)


class Kinds(ek.metrics.State):
    """A field of each kind."""

    total: Float[Array, ""] = ek.metrics.sum_field(exact=True)
    count: Int[Array, ""] = ek.metrics.sum_field()
    least: Float[Array, ""] = ek.metrics.min_field()
    most: Float[Array, ""] = ek.metrics.max_field()
    first: ek.metrics.Rows = ek.metrics.truncate_field(3)
    rows: ek.metrics.Rows = ek.metrics.concat_field(size=120)

    def compute(self) -> dict[str, Any]:
        return {
            "mean": self.total.value / self.count,
            "least": self.least,
            "most": self.most,
            **spelled(self.first, "first"),
            **spelled(self.rows, "rows"),
        }


class AllRows(ek.metrics.State):
    """What grows, and is gathered on the host."""

    rows: ek.metrics.Rows = ek.metrics.concat_field()

    def compute(self) -> dict[str, Any]:
        return spelled(self.rows, "all")


def spelled(rows: ek.metrics.Rows, name: str) -> dict[str, Any]:
    """Numbers that tell which rows there are, and in which order."""
    if isinstance(rows.valid, jax.core.Tracer):  # its results are looked at before there are any
        return {f"{name}_{what}": rows.values.sum() for what in ("count", "order")}
    real = rows.real()
    return {f"{name}_count": len(real), f"{name}_order": float(real @ np.arange(1, len(real) + 1))}


@ek.config.config
class Scores(ek.metrics.Metric):
    """Of the right class."""

    preds: ek.KeyPath
    labels: ek.KeyPath
    grows: bool = False

    def from_values(self, preds: Float[Array, "b k"], labels: Int[Array, " b"], mask: Bool[Array, " b"]) -> Any:
        score = jnp.take_along_axis(preds, labels[:, None], 1)[:, 0]
        rows = ek.metrics.Rows(score, mask)
        if self.grows:
            return AllRows(rows)
        inside = lambda other: jnp.where(mask, score, other)
        return Kinds(inside(0).sum(), mask.sum(), inside(jnp.inf).min(), inside(-jnp.inf).max(), rows, rows)


def equal(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Two trees have the same arrays but for the order of additions."""
    for ours, theirs in zip(leaves(one), leaves(other), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def equal_results(one: dict[str, float], other: dict[str, float], rtol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=rtol, atol=1e-6, err_msg=name)


def on(mesh: Any, trainer: ek.Trainer) -> ek.Trainer:
    return ek.override(trainer, {"mesh": mesh})


def everything(model: Any, **fields: Any) -> ek.Trainer:
    """Losses and metrics of all kinds, a ragged end in training, and evals whose batches no mesh divides."""
    scores = Scores(preds="preds", labels="batch.label")
    shapes = {"every": 4, "data": ek.data.InMemory(arrays(50, seed=1), batch_size=20)}
    made: dict[str, Any] = {
        "losses": {
            "ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label", label_smoothing=0.1),
            "l2": ek.losses.ParameterL2(weight=ek.optim.Linear(0.0, 1e-2, 6)),
        },
        "metrics": {
            "accuracy": ek.metrics.Accuracy(preds="preds", labels="batch.label"),
            "scores": scores,
            "grads": ek.metrics.Norm("grads.**", per_leaf=True),
        },
        "evals": {
            "test": ek.evals.Eval(**shapes),
            "rows": ek.evals.Eval(
                metrics={"scores": scores, "all": ek.override(scores, {"grows": True})}, losses={}, **shapes
            ),
        },
        "optimizer": SGD,
        "train_data": ek.data.InMemory(arrays(90), batch_size=BATCH, drop_remainder=False),
        "num_steps": 8,
        "log_every": 3,
    }
    return small(model, **made | fields)


@pytest.fixture(scope="module")
def one() -> tuple[ek.Trainer, Any]:
    trainer = everything(ek.lazy(Dropping)(rate=0.25))
    return trainer, trainer.train()


def assert_equal_runs(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    equal(one.state, other.state, rtol, atol)
    assert [(row.step, row.split) for row in one.history] == [(row.step, row.split) for row in other.history]
    for row, same in zip(one.history, other.history, strict=True):
        equal_results(row.metrics, same.metrics, rtol)


def test_three_steps_and_an_eval(compilations: Any) -> None:
    """The short form of the tests below."""
    alone = light(ek.lazy(eqx.nn.Linear)(6, 3), num_steps=3)
    one = alone.train()
    compilations.clear()
    result = on(MESHES["fsdp"], alone).train()
    assert [name for name in compilations.names if "step" in name or "eval" in name] == [
        "jit(flat_step)",
        "jit(_eval_and_merge)",
    ]
    assert_equal_runs(one, result)
    np.testing.assert_allclose(result.predict(arrays(13)), one.predict(arrays(13)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
def test_several_devices_train_and_evaluate_as_one_does(one: Any, kind: str, compilations: Any) -> None:
    trainer, alone = one
    spread = on(MESHES[kind], trainer)
    compilations.clear()
    result = spread.train()
    assert_equal_runs(alone, result)
    assert compilations.names.count("jit(flat_step)") == 1  # neither ragged batches nor swaps compile another
    assert compilations.names.count("jit(_eval_and_merge)") == 2
    compilations.clear()
    again = spread.train()
    assert compilations.names == []
    assert_same(again.state, result.state)
    assert again.metrics == result.metrics
    for leaf in jax.tree.leaves(eqx.filter(result.state, eqx.is_array)):
        assert len(leaf.devices()) == 8
    parts = {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(eqx.filter(result.state, eqx.is_array))}
    assert parts == ({True, False} if kind == "fsdp" else {True})

    for rows in (13, 16):  # any number of rows can be predicted
        batch = arrays(rows, seed=5)
        np.testing.assert_allclose(result.predict(batch), alone.predict(batch), rtol=1e-5, atol=1e-6)
    equal_results(trainer.evaluate(alone.state), spread.evaluate(alone.state))  # a state from elsewhere
    equal_results(trainer.evaluate(alone.state), trainer.evaluate(result.state))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
def test_the_state_keeps_its_places_and_is_donated(kind: str) -> None:
    trainer = quick(ek.lazy(Dropping)(rate=0.25), mesh=MESHES[kind], optimizer=SGD, metrics={}, guard=None)
    state = trainer.init()
    stepper = ek.train.Stepper(trainer, state)
    places = [leaf.sharding for leaf in jax.tree.leaves(eqx.filter(state, eqx.is_array))]
    for batch, _ in zip(trainer.batches(state), range(3), strict=False):
        before = jax.tree.leaves(eqx.filter(stepper.borrow()[0], eqx.is_array))
        assert [leaf.sharding for leaf in before] == places
        stepper.step(batch)
        gone = [leaf.is_deleted() for leaf in before]
        assert sum(gone) == len(gone) - 2  # the PRNG key and the dropout rate are no part of what changes
    assert [leaf.sharding for leaf in jax.tree.leaves(eqx.filter(stepper.state, eqx.is_array))] == places


@pytest.mark.slow
def test_gradients_and_the_public_step(one: Any) -> None:
    """With plain gradient descent at rate 1, the first step moves the parameters by their gradients."""
    trainer = ek.override(one[0], {"optimizer": ek.lazy(optax.sgd)(1.0)})
    state = trainer.init()
    batch = next(trainer.batches(state))
    before = leaves(state.params())
    alone, aux = ek.train.step(trainer, state, batch)
    moved = [new - old for new, old in zip(leaves(alone.params()), before, strict=True)]
    for mesh in MESHES.values():
        spread = on(mesh, trainer)
        same, found = ek.train.step(spread, spread.init(), jax.device_put(batch, jax.devices()[2]))
        for ours, old, theirs in zip(leaves(same.params()), before, moved, strict=True):
            np.testing.assert_allclose(ours - old, theirs, rtol=1e-5, atol=1e-6)
        equal(aux, found)


@pytest.mark.slow
def test_states_are_copied_on_their_way_to_more_devices_and_back() -> None:
    """On its way from one device to several, JAX shares what is there already, and donation would take it away."""
    trainer = quick()
    spread = on(ek.sharding.data_parallel(), trainer)
    state, batch = trainer.init(), next(trainer.batches(trainer.init()))
    stepper = ek.train.Stepper(spread, state)
    stepper.step(batch)
    first = stepper.state
    stepper.step(batch)
    spread.train(model=state.model)
    back, _ = ek.train.step(trainer, first, batch)
    for kept in (state, first):
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(eqx.filter(kept, eqx.is_array)))
    assert_same(state, trainer.init())
    equal(back, stepper.state)
    assert all((empty == 0).all() or np.isinf(empty).any() for empty in stepper._program.fresh())


def test_batches_that_do_not_divide_are_refused_before_anything_is_computed(compilations: Any, snapshot: Any) -> None:
    trainer = quick(mesh=ek.sharding.data_parallel(), train_data=ek.data.InMemory(arrays(), batch_size=20))
    compilations.clear()
    for refused in (trainer.train, trainer.init, lambda: ek.inspect.check(trainer)):
        with pytest.raises(DataError) as caught:
            refused()
        snapshot("uneven", str(caught.value))
    assert compilations.names == []


@pytest.mark.slow
def test_an_odd_batch_of_a_pipeline_is_refused_at_its_step() -> None:
    trainer = quick(mesh=ek.sharding.data_parallel())
    state = trainer.init()
    stepper = ek.train.Stepper(trainer, state)
    for step in (stepper.step, lambda batch: ek.train.step(trainer, state, batch)):
        with pytest.raises(DataError, match="a batch of 12 rows cannot be spread over 8 devices"):
            step(arrays(12))
    stepper.step(arrays(24))  # another size compiles once more
    stepper.step(arrays(16))
    assert int(stepper.state.step) == 2


def test_a_metric_without_a_mask_is_refused_where_devices_need_padding(snapshot: Any) -> None:
    data = {"train_data": ek.data.InMemory(arrays(), batch_size=BATCH), "metrics": {"plain": Unmasked(preds="preds")}}
    full = {"test": ek.evals.Eval(data=ek.data.InMemory(arrays(40), batch_size=20))}
    quick(evals=full, **data).init()
    with pytest.raises(WiringError) as caught:
        quick(evals=full, mesh=ek.sharding.data_parallel(), **data).init()
    snapshot("without_mask", str(caught.value))
    late = {"test": ek.evals.Eval(data=ek.lazy(uneven_pass)())}
    trainer = quick(evals=late, mesh=ek.sharding.data_parallel(), **data)
    with pytest.raises(WiringError, match="batch 1 has 20 real rows of 24"):
        trainer.evaluate(trainer.init())


class uneven_pass:  # a pipeline whose batches alone show that they must be padded
    def batches(self, start: int, seed: int) -> Any:
        return self.epoch()

    def epoch(self) -> Any:
        yield ek.data.as_batch(arrays(16))
        yield ek.data.as_batch(arrays(20))

    def spec(self) -> Any:
        return ek.data.element_spec(ek.data.as_batch(arrays(16)))


def test_check_says_what_a_device_holds(snapshot: Any) -> None:
    model = ek.lazy(eqx.nn.MLP)(6, 3, 16, 1)
    trainer = quick(model, mesh=ek.sharding.fsdp(min_bytes=12), accumulate=4, guard=None)
    found = ek.inspect.check(trainer)
    held = found.devices
    assert held is not None
    state = trainer.init()
    arrays_held = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    on_first = [leaf.addressable_shards[0].data.nbytes for leaf in arrays_held]
    assert held.bytes == sum(leaf.nbytes for leaf in arrays_held)
    assert held.bytes_each == sum(on_first) < held.bytes / 2
    assert list(held.undivided) == [f"{at}.layers[1].bias" for at in ("model", "opt_state[0].mu", "opt_state[0].nu")]
    assert held.rows == 2
    text = str(found)
    snapshot("devices", text[text.index("Devices\n") : text.index("Warnings")])
    assert found.warnings == ("accumulate: 8 devices do not divide a micro-batch of 4 rows, so devices repeat work",)
    assert ek.inspect.check(quick(model)).devices is None


def test_without_a_mesh_the_program_knows_of_none() -> None:
    trainer = quick(accumulate=2)
    state, spec = trainer.init(), trainer.spec()
    program = program_for(trainer.in_step, state, spec)
    changing, kept = program.parted(jax.tree.leaves(eqx.filter(state, eqx.is_array)))
    config = jax.tree.leaves(trainer.in_step)
    text = program.run.lower(changing, program.fresh(), kept, config, spec.data, spec.mask).as_text()
    assert '"data"' not in text
    assert "sharding_constraint" not in text
    assert type(program.run) is type(jax.jit(lambda: 0))


@pytest.mark.slow
def test_a_mesh_of_one_device_is_that_device() -> None:
    alone = quick(num_steps=3)
    assert_same(alone.train().state, on(ek.sharding.data_parallel(1), alone).train().state)


def light(model: Any, **fields: Any) -> ek.Trainer:
    """What compiles faster: one loss, and one eval whose batches no mesh divides."""
    scores = Scores(preds="preds", labels="batch.label", grows=True)
    data = ek.data.InMemory(arrays(40, seed=1), batch_size=20)
    made = {"metrics": {}, "evals": {"rows": ek.evals.Eval(metrics={"all": scores}, data=data)}, "num_steps": 4}
    return small(model, **made | {"optimizer": SGD, "log_every": 4} | fields)


VARIANTS: dict[str, Any] = {
    "accumulate": lambda: light(ek.lazy(Dropping)(rate=0.25), accumulate=2),
    "uneven micro-batches": lambda: light(ek.lazy(Dropping)(rate=0.25), accumulate=3),
    "batch norm": lambda: light(ek.lazy(BatchNormed)()),
    "batch norm, accumulate": lambda: light(ek.lazy(BatchNormed)(), accumulate=2),
    "adam": lambda: light(ek.lazy(Plain)(), optimizer=ek.lazy(optax.adamw)(1e-3, eps=1e-3)),
    "unmapped": lambda: light(ek.lazy(Tabled)(), inputs={"x": "batch.x", "table": "batch.x"}, unmapped=("table",)),
    "whole batches": lambda: light(ek.lazy(Whole)(), per_example=False),
    "transform": lambda: light(
        ek.lazy(Plain)(),
        evals={"halved": ek.evals.Eval(transform=halved, data=ek.data.InMemory(arrays(40, seed=1), batch_size=20))},
    ),
    "own step": lambda: light(ek.lazy(Plain)(), step=SlowCopy(), init_extra=parameters),
}


class Tabled(Plain):
    """Looks at all rows of the batch for each of them."""

    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:  # pyright: ignore
        return super().__call__(x + 0.1 * jnp.tanh(table).sum(0))


class Whole(Plain):
    """Takes whole batches, and centres them."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.vmap(super().__call__)(x - 0.5 * x.mean(0))


@ek.config.config
class SlowCopy:
    """The default step with a slow copy of the parameters."""

    rate: float = 0.1

    def __call__(self, config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        state, context = ek.train.apply_updates(config, state, context)
        slow = jax.tree.map(lambda slow, fast: slow + self.rate * (fast - slow), state.extra, state.params())
        return eqx.tree_at(lambda s: s.extra, state, slow), ek.train.collect(config, context)


def halved(model: Any, step: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf / (1 + step) if eqx.is_inexact_array(leaf) else leaf, model)


def parameters(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "kind"), [*((name, "fsdp") for name in VARIANTS), ("batch norm", "data parallel")])
def test_variants(variant: str, kind: str) -> None:
    trainer = VARIANTS[variant]()
    alone, result = trainer.train(), on(MESHES[kind], trainer).train()
    assert_equal_runs(alone, result)
    np.testing.assert_allclose(result.predict(arrays(13)), alone.predict(arrays(13)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
def test_in_float64(kind: str) -> None:
    with jax.enable_x64(True):
        trainer = light(ek.lazy(Dropping)(rate=0.25))
        assert_equal_runs(trainer.train(), on(MESHES[kind], trainer).train(), rtol=1e-10, atol=1e-11)


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh(tmp_path: Path) -> None:
    """All at once: dropout, accumulation, momentum, evals; one device, then eight, four with spread parameters, one."""
    trainer = everything(
        ek.lazy(Dropping)(rate=0.25), accumulate=2, num_steps=12, checkpoints=ek.train.Checkpoints(every=2, keep=9)
    )
    workdir = tmp_path / "run"
    whole = trainer.train(workdir)
    rows = {(row.step, row.split): row.metrics for row in whole.history}
    # Steps 4, 8 and 10 are no ends of training intervals: their accumulators go on, too.
    for step, mesh in ((4, ek.sharding.data_parallel()), (8, ek.sharding.fsdp(4, min_bytes=32)), (10, None)):
        for later in (workdir / "checkpoints").iterdir():
            if later.name.isdigit() and int(later.name) > step:
                shutil.rmtree(later)
        result = on(mesh, trainer).train(workdir)
        equal(whole.state, result.state)
        for row in result.history:
            equal_results(rows[row.step, row.split], row.metrics)
        assert result.history[-1].step == 12

    spread = on(ek.sharding.fsdp(min_bytes=32), trainer)
    restored = spread.restore(workdir, 8)
    for leaf in jax.tree.leaves(eqx.filter(restored, eqx.is_array)):
        assert len(leaf.devices()) == 8
    assert_same(restored, trainer.restore(workdir, 8))
    equal_results(spread.evaluate(restored), trainer.evaluate(trainer.restore(workdir, 8)))
    seeded = ek.override(trainer, {"seed": 3, "mesh": ek.sharding.data_parallel(), "num_steps": 13}).train(workdir)
    assert int(seeded.state.step) == 13


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
def test_many_steps_and_evals_never_wait_for_each_other(kind: str) -> None:
    """Fake devices share the threads of one CPU, of which programs under way must leave enough."""
    quick(mesh=MESHES[kind], num_steps=600, log_every=600).train()
    result = quick(mesh=MESHES[kind], num_steps=200, log_every=200, evals=evaluated(every=10)).train()
    for _ in range(50):
        result.predict(arrays(20))
    assert int(result.state.step) == 200
