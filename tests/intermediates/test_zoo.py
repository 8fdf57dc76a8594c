"""Ten architectures, captured by path, against the same models with their intermediates returned by hand."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equikd as ek
from equikd.intermediates import available, capture
from equikd.tree import named_leaves
from tests.zoo._zoo import ZOO, Entry

ROWS = 4
QUICK = ("fixed_point",)
"""The models whose tests are run each time; those of the others take seconds each."""

each_model = pytest.mark.parametrize(
    "entry", [pytest.param(ZOO[name], id=name, marks=[] if name in QUICK else pytest.mark.slow) for name in ZOO]
)


def batched(one: Callable[..., Any]) -> Callable[..., Any]:
    """`one(model, state, example, key)`, mapped over examples and keys as a trainer does."""
    return lambda model, state, examples, keys: jax.vmap(
        lambda example, key: one(model, state, example, key), axis_name="batch"
    )(examples, keys)


def arguments(entry: Entry) -> tuple[Any, ...]:
    """Model, state, some examples, and a key for each."""
    return (*entry.build(), entry.examples(ROWS), jax.random.split(jax.random.key(1), ROWS))


# From 0.11 on, a function that is evaluated by way of a jaxpr may list its operations in another order (JAX's own
# `jaxpr_as_fun` does so too), which XLA fuses in another way: the U-Net then differs in the last bit of a few numbers.
LAST_BIT = 0.0 if jax.__version_info__ < (0, 11) else 3e-7


def equal(got: Any, expected: Any) -> None:
    """Same structure and dtypes, and the same bits (see `LAST_BIT`)."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, one), (_, other) in zip(*map(jax.tree_util.tree_leaves_with_path, (got, expected)), strict=True):
        assert one.dtype == other.dtype, path
        np.testing.assert_allclose(one, other, rtol=LAST_BIT, atol=LAST_BIT, err_msg=jax.tree_util.keystr(path))


def total(tree: Any) -> jax.Array:
    """A number that depends on each float of a tree."""
    return sum((jnp.mean(jnp.square(leaf)) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))), 0.0)


def calls(listed: dict[str, list[Any]]) -> dict[str, Any]:
    """Each call that `available` lists, by the path that captures it alone, with its shapes."""
    return {
        path if len(shapes) == 1 else f"{path}[{index}]": shape
        for path, shapes in listed.items()
        for index, shape in enumerate(shapes)
    }


def described(tree: Any) -> Any:
    """Structure, shapes and dtypes."""
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_rows_take_ways_of_their_own() -> None:
    """What is tested below is not the case in which all rows choose one expert, or stop after as many iterations."""
    model, _, examples, _ = arguments(ZOO["moe"])
    scores = jax.vmap(lambda x: model.mixture.router(jax.nn.relu(model.embedding(x.reshape(-1)))))(examples)
    assert len(set(scores.argmax(axis=1).tolist())) > 1
    model, _, examples, _ = arguments(ZOO["fixed_point"])
    steps = jax.vmap(lambda x: model.equilibrium(model.embedding(x.reshape(-1)))[1])(examples)
    assert len(set(steps.tolist())) > 1
    assert steps.max() < model.most


@each_model
def test_what_is_listed_can_be_captured(entry: Entry) -> None:
    """All calls at once, and a few alone, outside the map over the batch; with the shapes that were announced."""
    forward, args = batched(entry.forward), arguments(entry)
    expected = calls(available(forward, *args))
    assert entry.watched in expected
    out, values = eqx.filter_jit(capture(forward, list(expected), **entry.capture_options))(*args)
    assert {path: described(value) for path, value in values.items()} == {
        path: described(shape) for path, shape in expected.items()
    }
    equal(out, eqx.filter_jit(forward)(*args))
    for path in (next(iter(expected)), entry.watched):
        alone = eqx.filter_jit(capture(forward, [path], **entry.capture_options))(*args)
        equal(alone, (out, {path: values[path]}))


@each_model
def test_values_are_those_returned_by_hand(entry: Entry) -> None:
    """To the bit, inside the map over the batch; the path `watched` is among them."""
    args = arguments(entry)
    out, by_hand = eqx.filter_jit(batched(entry.by_hand))(*args)
    captured = capture(entry.forward, list(by_hand), **entry.capture_options)
    got, values = eqx.filter_jit(batched(captured))(*args)
    equal(got, out)
    equal(values, by_hand)
    equal(out, eqx.filter_jit(batched(entry.forward))(*args))  # the oracle computes what the model does
    assert entry.watched in by_hand


def test_outside_the_map_the_last_iteration_is_each_rows_own() -> None:
    """A mapped loop goes on until all rows are done; what it computes for those that are is thrown away."""
    entry = ZOO["fixed_point"]
    args, paths = arguments(entry), ["cell[0]", "cell.weights[0]"]
    by_hand = eqx.filter_jit(batched(entry.by_hand))(*args)[1]
    values = eqx.filter_jit(capture(batched(entry.forward), paths, while_loops="last"))(*args)[1]
    equal(values, {path: by_hand[path] for path in paths})


def test_outside_the_map_all_experts_run() -> None:
    """There the switch is a selection among the results of all branches, so that nothing is absent."""
    entry = ZOO["moe"]
    args, paths = arguments(entry), ["mixture.experts[0]", "mixture.experts[1]", "mixture.experts[2]"]
    inside = eqx.filter_jit(batched(capture(entry.forward, paths, absent="zeros")))(*args)[1]
    outside = eqx.filter_jit(capture(batched(entry.forward), paths))(*args)[1]
    ran = jnp.stack([inside[path].any(axis=1) for path in paths])
    assert (ran.sum(axis=0) == 1).all()
    for path, rows in zip(paths, ran, strict=True):
        assert outside[path].any(axis=1).all()
        equal(jnp.where(rows[:, None], outside[path], 0), inside[path])


@each_model
def test_gradients_are_those_by_hand(entry: Entry) -> None:
    """Of the output and all captured values together: to the bit, in the structure of the model as it was built."""
    model, *args = arguments(entry)
    paths = list(eqx.filter_eval_shape(batched(entry.by_hand), model, *args)[1])
    captured = capture(entry.forward, paths, **entry.capture_options)

    def gradients(one: Callable[..., Any]) -> Any:
        loss = lambda model, *args: total(batched(one)(model, *args))
        return eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, *args)

    (value, got), (expected_value, expected) = gradients(captured), gradients(entry.by_hand)
    equal(value, expected_value)
    equal(got, expected)
    alone = gradients(entry.forward)[1]
    assert any((one != other).any() for one, other in zip(*map(jax.tree.leaves, (got, alone)), strict=True))


@each_model
def test_training_is_the_same_when_watched(entry: Entry) -> None:
    """The norm of an intermediate, among the metrics of a run, changes no bit of what is trained."""
    norm, options = ek.metrics.Norm(f"interms.{entry.watched}"), ek.intermediates.Options(**entry.capture_options)
    watched = entry.trainer(num_steps=5, metrics={"norm": norm}, intermediates=options).train()
    plain = entry.trainer(num_steps=5).train()
    equal(eqx.filter(watched.model, eqx.is_array), eqx.filter(plain.model, eqx.is_array))
    assert watched.metrics.keys() - plain.metrics.keys() == {"train/norm"}
    assert 0 < watched.metrics["train/norm"] < np.inf


@each_model
def test_training_lowers_the_loss(entry: Entry) -> None:
    """What is watched in these models would mean little if they did not learn."""
    trainer, losses = entry.trainer(), []
    state = trainer.init()
    before = named_leaves(eqx.filter(state.model, eqx.is_inexact_array))
    for batch, _ in zip(trainer.batches(state), range(trainer.num_steps), strict=False):
        state, aux = ek.train.step(trainer, state, batch)
        losses.append(float(aux.loss))
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:2])
    after = named_leaves(eqx.filter(state.model, eqx.is_inexact_array))
    assert [path for path in before if (before[path] == after[path]).all()] == []
