"""Gradient accumulation: a step over micro-batches is the step over the whole batch."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import equikd as ek
from equikd.train._accumulate import split_rows
from equikd.typing import Array, Bool, Float
from tests.train._parts import SGD, Unmasked, make, rows_of, stepped, two_losses
from tests.train._small import (
    BATCH,
    CLASSES,
    FEATURES,
    BatchNormed,
    Counted,
    Dropping,
    arrays,
    assert_same,
    evaluated,
    leaves,
    quick,
    small,
)


@eqx.filter_jit
def computed(config: Any, state: Any, batch: Any) -> Any:
    """Gradients, losses and the total of one batch."""
    context = ek.train.loss_and_gradients(config, state, batch)
    return context.grads, context.losses, context.totals, context.model_state


def rounded(tree: Any) -> Any:
    """Sums without the errors that they carry along."""
    is_sum = lambda part: isinstance(part, ek.metrics.TwoFloat)
    return jax.tree.map(lambda part: part.value if is_sum(part) else part, tree, is_leaf=is_sum)


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    for one, other in zip(leaves(rounded(ours)), leaves(rounded(theirs)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


# --- how rows are split -----------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40))
def test_each_row_is_in_one_micro_batch_and_none_is_empty(rows: int, count: int) -> None:
    count = min(rows, count)
    picks, real = split_rows(rows, count)
    assert picks.shape == real.shape == (count, -(-rows // count))
    assert picks[real].tolist() == list(range(rows))
    assert real[:, 0].all()
    for part, kept in zip(picks, real, strict=True):
        assert set(part) == set(part[kept])  # filled up with rows of its own


# --- the whole batch, exactly (case 24) -------------------------------------------------------------------------------

SHAPES = [(7, 2), (7, 3), (8, 4), (10, 4), (5, 5)]
WHOLE = {rows: make(1, rows) for rows, _ in SHAPES}
PARTED = {shape: make(shape[1], shape[0]) for shape in SHAPES}


def assert_equals_whole(rows: int, count: int, batch: Any) -> None:
    state = WHOLE[rows].init()
    whole, parted = (computed(t.in_step, state, batch) for t in (WHOLE[rows], PARTED[rows, count]))
    assert_close(parted, whole)
    assert all(np.isfinite(leaf).all() for leaf in leaves(parted[0]))


@pytest.mark.parametrize("shape", [SHAPES[1], pytest.param(SHAPES[3], marks=pytest.mark.slow)])
def test_ragged_micro_batches_and_two_losses_under_different_masks_equal_the_whole_batch(shape: Any) -> None:
    rows, count = shape
    data = rows_of(rows, seed=3)
    assert_equals_whole(rows, count, data)
    assert_equals_whole(rows, count, ek.data.Batch(data, np.arange(rows) % 3 > 0))


def test_the_mean_of_the_means_of_micro_batches_is_another_gradient() -> None:
    """So that the test above can fail."""
    rows, count = 7, 3
    data, state = rows_of(rows, seed=3), WHOLE[rows].init()
    whole = computed(WHOLE[rows].in_step, state, data)[0]
    picks, real = split_rows(rows, count)
    found = [
        computed(WHOLE[rows].in_step, state, ek.data.Batch(jax.tree.map(lambda x, at=at: x[at], data), kept))[0]
        for at, kept in zip(picks, real, strict=True)
    ]
    naive = jax.tree.map(lambda *grads: sum(grads) / count, *found)
    assert max(np.abs(a - b).max() for a, b in zip(leaves(naive), leaves(whole), strict=True)) > 1e-2


@pytest.mark.slow
@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.integers(0, 2**16), st.data())
def test_any_masks_and_shapes_equal_the_whole_batch(shape: Any, seed: int, data: Any) -> None:
    rows, count = shape
    bits = lambda size: np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    batch = rows_of(rows, seed) | {"known": bits(rows), "parts": bits(rows * CLASSES).reshape(rows, CLASSES)}
    assert_equals_whole(rows, count, ek.data.Batch(batch, bits(rows)))


def test_padding_may_hold_anything_and_a_micro_batch_of_padding_counts_for_nothing() -> None:
    """Case 22: the last of the four micro-batches of two rows has no real row."""
    clean = rows_of(8)
    mask = np.arange(8) < 5
    spoilt = {name: np.where(mask.reshape(8, *(1,) * (leaf.ndim - 1)), leaf, 99) for name, leaf in clean.items()}
    spoilt |= {name: leaf.astype(clean[name].dtype) for name, leaf in spoilt.items()}
    for name in ("x", "y"):
        spoilt[name][~mask] = np.nan
    state = WHOLE[8].init()
    ours = computed(PARTED[8, 4].in_step, state, ek.data.Batch(spoilt, mask))
    theirs = computed(WHOLE[5].in_step, state, {name: leaf[:5] for name, leaf in clean.items()})
    assert_close(ours, theirs)
    nothing = computed(PARTED[8, 4].in_step, state, ek.data.Batch(spoilt, np.zeros(8, bool)))
    assert_close(nothing[0], computed(make(1, 8, losses={"l2": two_losses()["l2"]}).in_step, state, clean)[0])


def test_both_ways_to_normalise_and_a_lone_penalty() -> None:
    by_values = ek.losses.SquaredError(
        preds="preds", targets="batch.y", mask="batch.parts", normalize_by="values", weight=2.0
    )
    for losses in ({"a": by_values, **two_losses()}, {"l2": ek.losses.ParameterL2("params.weight")}):
        whole, parted = (make(k, 7, losses=losses) for k in (1, 3))
        state = whole.init()
        batch = ek.data.Batch(rows_of(7), np.arange(7) < 6)
        assert_close(computed(parted.in_step, state, batch), computed(whole.in_step, state, batch))


@pytest.mark.slow
def test_gradients_with_respect_to_hyperparameters_are_those_of_the_whole() -> None:
    state, batch = WHOLE[7].init(), rows_of(7)

    def after(config: Any) -> Any:
        new, aux = ek.train.step(config, state, batch)
        return aux.loss + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(new.params()))

    whole, parted = (jax.jit(jax.grad(after))(t.in_step) for t in (WHOLE[7], PARTED[7, 3]))
    ours, theirs = (jax.tree.leaves(grads) for grads in (parted, whole))
    assert np.abs(np.array(theirs)).max() > 1e-3
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_bfloat16_gradients_are_added_in_float32() -> None:
    """512 of one size: in bf16 the sum of 1/512s stops growing at 1/2."""
    linear = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    model = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.bfloat16), linear)
    trainer = quick(
        None,
        inputs={"x": "batch.x"},
        losses={"value": ek.losses.Value(value="preds")},
        metrics={},
        optimizer=SGD,
        train_data=ek.data.InMemory({"x": np.ones((512, 1), np.float32)}, batch_size=512),
        accumulate=512,
    )
    trainer = dataclasses.replace(trainer, model=None)
    grads = computed(trainer.in_step, trainer.init(model=model), {"x": jnp.ones((512, 1), jnp.bfloat16)})[0]
    assert grads.weight.dtype == jnp.bfloat16
    assert grads.weight.item() == 1.0


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_dropout_draws_what_it_draws_in_the_whole_batch(count: int) -> None:
    whole, parted = (small(accumulate=k, optimizer=SGD) for k in (1, count))
    (ours, our_results), (theirs, their_results) = stepped(parted), stepped(whole)
    assert_close(ours.params(), theirs.params())
    assert our_results == pytest.approx(their_results, rel=1e-6)


@pytest.mark.slow
def test_running_statistics_pass_from_micro_batch_to_micro_batch() -> None:
    trainer = quick(ek.lazy(BatchNormed)(), optimizer=ek.lazy(optax.sgd)(0.0), accumulate=2)
    state = trainer.init()
    batch = next(trainer.batches(state)).data
    ours, _ = ek.train.step(trainer, state, batch)
    plain, theirs = ek.override(trainer, {"accumulate": 1}), state
    halves = [jax.tree.map(lambda x, at=at: x[at], batch) for at in (slice(0, 8), slice(8, 16))]
    for half in halves:
        theirs, _ = ek.train.step(plain, theirs, half)
    assert_close(ours.model_state, theirs.model_state)
    # A half of nothing but padding changes no statistic.
    padded, _ = ek.train.step(trainer, state, ek.data.Batch(batch, np.arange(16) < 8))
    first, _ = ek.train.step(plain, state, halves[0])
    assert_close(padded.model_state, first.model_state)


class Shared(eqx.Module):
    """Each example sees all the rows of one argument."""

    weight: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        self.weight = jax.random.normal(key, (FEATURES, CLASSES))

    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        return (x + table.mean(0)) @ self.weight


@pytest.mark.slow
def test_what_is_unmapped_comes_from_the_whole_batch() -> None:
    fields = {"inputs": {"x": "batch.x", "table": "batch.x"}, "unmapped": ("table",), "optimizer": SGD}
    whole, parted = (quick(ek.lazy(Shared)(), accumulate=k, **fields) for k in (1, 4))
    assert_close(stepped(parted)[0].params(), stepped(whole)[0].params())


class Whole(eqx.Module):
    """Takes whole batches, and may drop features."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, rate: float, *, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(FEATURES, CLASSES, key=key)
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> Any:
        kept = self.dropout(jnp.ones_like(x), key=key)
        return {"logits": jax.vmap(self.linear)(x * kept), "kept": kept.astype(jnp.float32), "name": "a text"}


@pytest.mark.slow
def test_a_model_of_whole_batches_sees_micro_batches_with_keys_of_their_own() -> None:
    fields = {
        "losses": {"ce": ek.losses.SoftmaxCrossEntropy(logits="preds.logits", labels="batch.label")},
        "metrics": {"kept": ek.metrics.Mean(values="preds.kept"), "seen": Positions(kept="preds.kept")},
        "per_example": False,
        "optimizer": SGD,
    }
    whole, parted = (quick(ek.lazy(Whole)(0.0), accumulate=k, **fields) for k in (1, 3))
    assert_close(stepped(parted)[0].params(), stepped(whole)[0].params())
    _, results = stepped(ek.override(parted, {"model.rate": 0.5}))
    assert 0 < results["seen"] < 1  # were all drawn with one key, each feature would be kept in all parts or in none


@ek.config.config
class Positions(ek.metrics.Metric):
    """Of each feature of the first row of a micro-batch, how often it is kept, spread over the micro-batches."""

    kept: ek.KeyPath

    class State(ek.metrics.State):
        low: Float[Array, " d"] = ek.metrics.min_field()
        high: Float[Array, " d"] = ek.metrics.max_field()

        def compute(self) -> Any:
            return (self.low < self.high).mean(dtype=np.float32) * 0.999

    def from_values(self, kept: Float[Array, "b d"], mask: Bool[Array, " b"]) -> State:
        del mask
        return self.State(kept[0], kept[0])


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_metrics_equal_those_of_the_whole_batch() -> None:
    metrics = {
        "accuracy": ek.metrics.Accuracy(preds="preds", labels="batch.label"),
        "known": ek.metrics.Accuracy(preds="preds", labels="batch.label", mask="batch.known"),
        "mean": ek.metrics.Mean(values="preds[:, 0]"),
        "std": ek.metrics.Std(values="preds[:, 1]"),
        "largest": ek.metrics.Max(values="preds"),
        "x": ek.metrics.Mean(values="batch.x"),
        "step": ek.metrics.Mean(values="step", mask=None),
        "loss": ek.metrics.Mean(values="losses.ce.count", mask=None),
        "grads": ek.metrics.Norm(tree="grads", per_leaf=True),
        "updates": ek.metrics.Norm(tree="updates"),
        "params": ek.metrics.Norm(tree="params"),
        "images": ek.metrics.Norm(tree="batch.x"),
    }
    metrics["ce_count"] = metrics.pop("loss")
    batch = ek.data.Batch(rows_of(7), np.arange(7) < 6)
    whole, parted = (stepped(make(k, 7, metrics=metrics), batch)[1] for k in (1, 3))
    assert list(whole) == list(parted)
    assert parted == pytest.approx(whole, rel=1e-6, abs=1e-7)
    assert len(whole) > len(metrics)


@pytest.mark.slow
def test_a_metric_without_a_mask_is_fine_where_nothing_is_filled_up() -> None:
    fields = {"metrics": {"plain": Unmasked(preds="preds")}}
    whole, parted = (stepped(make(k, 8, **fields))[1] for k in (1, 4))
    assert parted["plain"] == pytest.approx(whole["plain"], rel=1e-6)


# --- one step is one update -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_schedules_advance_per_update_and_a_run_ends_like_one_on_whole_batches(compilations: Any) -> None:
    rate = ek.optim.Linear(0.5, 0.0, transition_steps=6)
    weight = ek.optim.Linear(1.0, 0.0, transition_steps=6)
    fields = {
        "losses": {"ce": ek.losses.SoftmaxCrossEntropy(logits="preds", labels="batch.label", weight=weight)},
        "optimizer": ek.lazy(optax.sgd)(rate),
        "evals": evaluated(),
        "num_steps": 6,
        "train_data": ek.data.InMemory(arrays(90), batch_size=BATCH, drop_remainder=False),
    }
    whole = quick(**fields).train()
    Counted.traces[0] = 0
    compilations.clear()
    parted = quick(accumulate=3, **fields).train()
    assert compilations.names.count("jit(flat_step)") == 1
    assert [name for name in compilations.names if "eval" in name] == []  # evals have nothing to accumulate
    assert int(parted.state.step) == 6
    assert_close(parted.state, whole.state, 1e-5)
    assert parted.metrics == pytest.approx(whole.metrics, rel=1e-5)
    compilations.clear()
    ek.override(parted.trainer, {"optimizer.learning_rate.init_value": 0.25, "seed": 3}).train()
    assert compilations.names == []


@pytest.mark.slow
def test_an_optimizer_that_accumulates_over_steps_does_so_still() -> None:
    """`optax.MultiSteps` counts updates, each of which may be accumulated."""
    every = ek.lazy(optax.MultiSteps)(SGD, every_k_schedule=2)
    whole, parted = (quick(accumulate=k, optimizer=every, num_steps=3).train() for k in (1, 4))
    assert_close(parted.state, whole.state)
    assert int(parted.state.opt_state.gradient_step) == 1


@pytest.mark.slow
def test_a_step_of_ones_own_accumulates_by_its_pieces() -> None:
    def own(config: Any, state: Any, batch: Any) -> Any:
        context = ek.train.loss_and_gradients(config, state, batch)
        halved = context.replace(grads=jax.tree.map(lambda grad: grad / 2, context.grads))
        state, context = ek.train.apply_updates(config, state, halved)
        return state, ek.train.collect(config, context)

    whole, parted = (stepped(quick(step=own, accumulate=k, optimizer=SGD)) for k in (1, 4))
    assert_close(parted[0].params(), whole[0].params())
    assert parted[1] == pytest.approx(whole[1], rel=1e-6)


@pytest.mark.slow
def test_a_resumed_run_ends_to_the_bit_like_one_that_was_not_stopped(tmp_path: Any) -> None:
    trainer = small(
        ek.lazy(Dropping)(rate=0.25), accumulate=3, num_steps=8, checkpoints=ek.train.Checkpoints(every=None)
    )
    whole = trainer.train()
    ek.override(trainer, {"num_steps": 5}).train(tmp_path / "run")
    resumed = trainer.train(tmp_path / "run")
    assert_same(resumed.state, whole.state)


@pytest.mark.slow
def test_memory_falls_with_the_number_of_micro_batches() -> None:
    data = {"x": np.ones((1024, FEATURES), np.float32), "y": np.ones((1024, CLASSES), np.float32)}

    def temporary(count: int) -> int:
        trainer = quick(
            ek.lazy(eqx.nn.MLP)(FEATURES, CLASSES, 64, 2),
            inputs={"x": "batch.x"},
            losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")},
            metrics={},
            train_data=ek.data.InMemory(data, batch_size=1024),
            accumulate=count,
        )
        memory = ek.inspect.check(trainer, memory=True).memory
        assert memory is not None
        return memory.temporary

    one, four, sixteen = map(temporary, (1, 4, 16))
    assert four < 0.4 * one
    assert sixteen < 0.5 * four


def test_a_preflight_tells_the_number_of_micro_batches_and_the_paths_of_the_whole_batch() -> None:
    found, whole = (ek.inspect.check(make(k, 8)) for k in (3, 1))
    assert "shape over all 3 micro-batches" in str(found)
    assert found.paths == whole.paths
    assert found.paths["preds"].shape == (8, CLASSES)
    assert found.warnings == whole.warnings
