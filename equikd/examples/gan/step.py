"""One step of adversarial training, from the public pieces of the default step."""

from typing import Any

import equinox as eqx
import jax

from equikd.data import Batch
from equikd.metrics import Aux
from equikd.train import TrainState, apply_updates, collect, loss_and_gradients


def adversarial_step(config: Any, state: TrainState, batch: Batch) -> tuple[TrainState, Aux]:
    """Gradients of both players, each of its own losses with respect to its own parameters; then both move at once.

    Args:
        config: `trainer.in_step`, with losses `real` and `fake` of the discriminator and `generator` of the generator.
        state: the train state.
        batch: real images.
    """
    rows = len(batch.mask)
    # The step splits its key for the rows, whose keys are fold_in(key, 0) to fold_in(key, rows - 1): this is the next.
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), rows)
    noise = jax.random.normal(key, (rows, config.model.generator.noise))
    batch = Batch({**batch.data, "noise": noise}, batch.mask)
    context = loss_and_gradients(config, state, batch, only=("real", "fake"))
    of_generator = loss_and_gradients(config, state, batch, only="generator").grads
    # The two share the forward pass, and what neither asks for is never computed: they are one program.
    grads = eqx.tree_at(lambda grads: grads.generator, context.grads, of_generator.generator)
    state, context = apply_updates(config, state, context.replace(grads=grads))
    return state, collect(config, context)
