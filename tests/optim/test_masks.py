"""Masks in training: what is frozen stays to the bit, and nothing beside the parameters knows of it."""

import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equikd as ek
from equikd.config import from_json, to_json
from equikd.errors import ConfigError
from equikd.tree import named_leaves
from tests.train._small import BatchNormed, LayerNormed, assert_same, leaves, quick

DECAYING = ek.lazy(optax.adamw)(0.1, weight_decay=0.5)


def moved(before: Any, after: Any) -> list[str]:
    after = named_leaves(after)
    return [path for path, leaf in named_leaves(before).items() if not np.array_equal(leaf, after[path])]


@pytest.mark.parametrize(
    ("trainable", "paths"),
    [
        ((eqx.nn.Linear, ek.optim.freeze("**.weight")), ["first.bias", "last.bias"]),
        (eqx.nn.LayerNorm, ["norm.weight", "norm.bias"]),
    ],
    ids=["class without weights", "class"],
)
def test_what_is_not_trained_has_no_optimizer_state_and_stays_to_the_bit(trainable: Any, paths: list[str]) -> None:
    trainer = quick(ek.lazy(LayerNormed)(), trainable=trainable, optimizer=DECAYING, num_steps=2)
    before = trainer.init()
    after = trainer.train().state
    assert list(named_leaves(before.params())) == moved(before.model, after.model) == paths
    in_state = [path for path in named_leaves(after.opt_state) if path.endswith((".weight", ".bias"))]
    assert len(in_state) == 2 * len(paths)


def test_a_mask_is_plain_data() -> None:
    trainer = quick(
        optimizer=ek.lazy(optax.adamw)(0.1, mask=ek.optim.decay("**", except_=("**.bias", eqx.nn.LayerNorm))),
        trainable=(ek.optim.freeze(eqx.nn.LayerNorm), "first.**"),
    )
    assert trainer.optimizer.mask == ek.optim.Decay(("**",), ("**.bias", eqx.nn.LayerNorm))
    assert trainer.optimizer.mask != ek.optim.decay(except_="**.bias")
    for part in (trainer.optimizer, ek.optim.freeze(eqx.nn.LayerNorm, "a")):
        assert from_json(to_json(part)) == part
    assert len(jax.tree.leaves(trainer.optimizer)) == 1  # the rate; the mask is part of the program


def matrices(tree: Any) -> Any:
    """A mask as one would write it for optax alone."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def test_only_what_the_mask_says_decays() -> None:
    def train(mask: Any) -> Any:
        return quick(optimizer=ek.lazy(optax.adamw)(0.1, weight_decay=0.5, mask=mask), num_steps=1).train().model

    model = train(ek.optim.decay(except_="**.bias"))
    assert_same(model, train(matrices))
    assert moved(model, train(ek.optim.decay())) == ["first.bias", "last.bias"]


# LoRA: two small leaves of a big model.


class Adapted(eqx.Module):
    """A frozen layer and a product of two small matrices beside it (Hu et al. 2021)."""

    base: eqx.nn.Linear
    down: jax.Array
    up: jax.Array

    def __init__(self, rank: int = 2, *, key: jax.Array) -> None:
        base, down = jax.random.split(key)
        self.base = eqx.nn.Linear(6, 64, key=base)
        self.down = jax.random.normal(down, (rank, 6)) / 6
        self.up = jnp.zeros((64, rank))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (self.base(x) + self.up @ (self.down @ x))[:3]


def test_two_small_leaves_of_a_big_model(tmp_path: Any) -> None:
    trainer = quick(ek.lazy(Adapted)(), trainable=("down", "up"), optimizer=DECAYING, num_steps=2)
    first = trainer.init()
    found = ek.inspect.check(trainer)
    assert (found.trainable.leaves, found.trainable.elements) == (2, 2 * 6 + 64 * 2)
    assert (found.frozen.leaves, found.frozen.elements) == (2, 64 * 6 + 64)
    for name in ("grads", "updates", "params"):
        assert [path for path in found.paths if path.startswith(name)] == [f"{name}.down", f"{name}.up"]

    result = trainer.train(tmp_path / "run")
    assert moved(first.model, result.model) == ["down", "up"]
    saved = (tmp_path / "run" / "checkpoints" / "2" / "checkpoint.json").read_text()
    in_checkpoint = [path for path in json.loads(saved)["leaves"] if path.startswith("state.opt_state")]
    assert len([path for path in in_checkpoint if path.endswith((".down", ".up"))]) == 4
    assert not [path for path in in_checkpoint if "base" in path]
    assert_same(trainer.restore(tmp_path / "run"), result.state)  # the whole model, the frozen layer too


def test_a_buffer_that_is_frozen_does_not_decay_and_running_statistics_go_on() -> None:
    class Buffered(BatchNormed):
        buffer: jax.Array

        def __init__(self, *, key: jax.Array) -> None:
            super().__init__(key=key)
            self.buffer = jnp.ones(6)

        def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
            return super().__call__(x * jax.lax.stop_gradient(self.buffer), state)

    trainer = quick(
        ek.lazy(Buffered)(), trainable=ek.optim.freeze("buffer", "first.**"), optimizer=DECAYING, num_steps=2
    )
    before, after = trainer.init(), trainer.train().state
    assert moved(before.model, after.model) == ["last.weight", "last.bias", "norm.weight", "norm.bias"]
    assert not [path for path in named_leaves(after.opt_state) if "buffer" in path or "first" in path]
    assert any((a != b).any() for a, b in zip(leaves(before.model_state), leaves(after.model_state), strict=True))


def test_freezing_everything_trains_nothing_and_freezing_nothing_is_a_slip() -> None:
    trainer = quick(trainable=ek.optim.freeze("**"), optimizer=DECAYING, num_steps=1)
    assert ek.inspect.check(trainer).warnings == ("trainable: nothing is trained",)
    with pytest.raises(ConfigError, match=r"(?s)trainable: freeze\('frist.*matches no parameter.*first\.weight"):
        quick(trainable=ek.optim.freeze("frist.*")).init()
