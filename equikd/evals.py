"""Evals: the model, its losses and its metrics over a whole dataset, exact over all rows whatever the batch size.

    evals={"test": ek.evals.Eval(data=ek.data.InMemory(test, batch_size=256), every=200)}

An eval runs every `every` steps and at the end. The data comes in order, its last batch padded and masked, so that one
compiled program serves all batches; states are merged on the device and read once. An eval inherits those of the
trainer's losses and metrics whose key paths exist in an eval; gradients and updates do not.
"""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.config import config, resolve
from equikd.data import Batch
from equikd.losses import Loss
from equikd.metrics import Aux, EvalWeights, Metric
from equikd.model import call, with_hyperparameters
from equikd.sharding import home
from equikd.wiring import Context


@config
class Eval:
    """One evaluation of the model while it trains; its name is the key under `Trainer.evals`."""

    data: Any
    """A pipeline such as `ek.data.InMemory`, or a node that makes one; read in order, each row once."""
    every: int | None = None
    """Steps between two evaluations; None: only at the end. The end is always evaluated."""
    metrics: dict[str, Metric] | None = None
    """Metric name -> metric; None: those of the trainer that can run in an eval."""
    losses: dict[str, Loss] | None = None
    """Loss name -> loss; None: those of the trainer that can run in an eval."""

    def validate(self) -> None:
        """Refuse an interval below one step."""
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")


def eval_context(config: Any, view: "View", batch: Batch) -> Context:
    """The context of an eval: everything but what only a training step computes."""
    model = with_hyperparameters(config, view.model, view.hyperparameter)
    context = Context(step=view.step, batch=batch.data, mask=batch.mask, model=model, extra=view.extra, config=config)
    preds, _ = call(
        model,
        context,
        inputs=config.inputs,
        per_example=config.per_example,
        unmapped=config.unmapped,
        model_state=view.model_state,
        inference=True,
    )
    return context.replace(preds=preds)


class View(eqx.Module):
    """What an eval sees of a train state.

    Attributes:
        step: int32 scalar, updates made.
        model: the model.
        model_state: its `eqx.nn.State`, or None.
        extra: the state's `extra`.
        hyperparameter: per leaf of the model, whether it comes from the config.
    """

    step: Any
    model: Any
    model_state: Any
    extra: Any
    hyperparameter: tuple[bool, ...] = eqx.field(static=True)


def eval_batch(config: Any, view: View, batch: Batch) -> Aux:
    """Losses and metrics of one batch in inference mode.

    Args:
        config: the part of the trainer that its step uses, with the eval's losses and metrics.
        view: what the eval sees of the train state.
        batch: a batch; masked rows count nowhere.
    """
    context = eval_context(config, view, batch)
    losses = resolve(config.losses, root=config, path="losses")
    states = {name: loss.from_context(context) for name, loss in losses.items()}
    weights = {name: jnp.asarray(loss.weight_at(view.step), jnp.float32) for name, loss in losses.items()}
    metrics = resolve(config.metrics, root=config, path="metrics")
    return Aux(
        losses=states,
        total=EvalWeights(weights) if weights else None,
        metrics={name: metric.from_context(context.replace(losses=states)) for name, metric in metrics.items()},
    )


@eqx.filter_jit
def _eval_and_merge(config: Any, view: View, so_far: Aux, batch: Batch) -> Aux:
    return so_far.merge(eval_batch(config, view, batch))


def evaluate(config: Any, view: View, batches: Iterable[Batch], empty: Aux) -> Aux:
    """Losses and metrics over all rows of some batches of one shape, on the device.

    Args:
        config: as in `eval_batch`.
        view: what the eval sees of the train state.
        batches: of equal shapes, the ragged end padded and masked.
        empty: empty accumulators; `empty_state` of the shapes of `eval_batch`.

    Returns:
        The merged states; `results()` gives the values.
    """
    arrays, static = eqx.partition(empty, eqx.is_array_like)
    aux = eqx.combine(jax.device_put(arrays, home(view)), static)
    for batch in batches:
        aux = _eval_and_merge(config, view, aux, batch)
    return aux
