"""The step: one pure function (config, state, batch) -> (state, aux), from pieces that can be used alone.

`config` is the part of the trainer that the step uses (`trainer.in_step`), resolved here, inside the trace, so each of
its floats may change, be vmapped or be differentiated without a recompile. The context is filled in order: forward,
losses, gradients, updates, metrics (of the parameters before the update). `Trainer(step=my_step)` replaces
`default_step` by a function of the same signature, which may call the same pieces.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.config import resolve
from equikd.data import Batch, as_batch
from equikd.losses import replace_masked
from equikd.metrics import Aux, StepTotals
from equikd.model import call, with_hyperparameters
from equikd.train._accumulate import accumulated
from equikd.train._core import update, value_and_gradients
from equikd.train._init import optimizer_of
from equikd.train._state import TrainState, split, strong
from equikd.wiring import UNSET, Context


def default_step(config: Any, state: TrainState, batch: Any) -> tuple[TrainState, Aux]:
    """One optimizer update.

    Args:
        config: `trainer.in_step`.
        state: the train state.
        batch: a `Batch`, or a bare pytree of arrays with the batch axis first, all of whose rows are real.

    Returns:
        The new state, and the losses and metric states of this batch.
    """
    context = loss_and_gradients(config, state, batch)
    state, context = apply_updates(config, state, context)
    return state, collect(config, context)


def begin(config: Any, state: TrainState, batch: Batch, model: Any) -> Context:
    """The context before anything is computed; rows of padding hold ordinary numbers, lest a nan enter a gradient."""
    key = jax.random.fold_in(state.key, state.step)
    data = replace_masked(batch.data, jnp.asarray(batch.mask))
    return Context(step=state.step, key=key, batch=data, mask=batch.mask, model=model, extra=state.extra, config=config)


def forward(config: Any, state: TrainState, batch: Any, *, model: Any = None, inference: bool = False) -> Context:
    """The model's predictions on a batch.

    Args:
        config: `trainer.in_step`.
        state: the train state.
        batch: a `Batch`, or a bare pytree.
        model: in place of the state's model; what gradients are taken through.
        inference: inference mode, without PRNG key.

    Returns:
        A context with step, key, batch, mask, model, preds, extra and config.
    """
    if model is None:
        model = with_hyperparameters(config, state.model, state.hyperparameter)
    context = begin(config, state, as_batch(batch), model)
    preds, model_state = call(
        model,
        context,
        inputs=config.inputs,
        per_example=config.per_example,
        unmapped=config.unmapped,
        key=None if inference else context.key,
        model_state=state.model_state,
        inference=inference,
    )
    return context.replace(preds=preds, model_state=model_state)


def losses_of(config: Any, context: Context) -> tuple[jax.Array, Context]:
    """Total loss (float scalar), and the context with the losses' states and weighted means."""
    losses = resolve(config.losses, root=config, path="losses")
    states = {name: loss.from_context(context) for name, loss in losses.items()}
    terms = {name: loss.weight_at(context.step) * states[name].mean() for name, loss in losses.items()}
    terms = strong({name: jnp.asarray(term) for name, term in terms.items()})
    total = sum(terms.values(), start=jnp.zeros(()))
    return total, context.replace(losses=states, totals=StepTotals.of(terms, states))


def loss_and_gradients(config: Any, state: TrainState, batch: Any) -> Context:
    """Forward, losses, and the gradient of the total loss with respect to the trainable leaves.

    Args:
        config: `trainer.in_step`.
        state: the train state.
        batch: a `Batch`, or a bare pytree.

    Returns:
        A context with all that a step computes before its update: preds, losses, params, grads. With `accumulate` the
        predictions are never there all at once: in their place, it holds the states of the metrics that read them.

    Raises:
        WiringError: key paths lead nowhere.
    """
    batch = as_batch(batch)
    model = with_hyperparameters(config, state.model, state.hyperparameter)
    if config.accumulate > 1:
        return accumulated(config, state, begin(config, state, batch, model))

    def total_loss(params: Any, rest: Any) -> tuple[jax.Array, dict[str, Any]]:
        context = forward(config, state, batch, model=eqx.combine(params, rest)).replace(params=params)
        total, context = losses_of(config, context)
        return total, {name: getattr(context, name) for name in ("preds", "losses", "model_state", "totals")}

    params, rest = split(model, state.trainable)
    (_, computed), grads = value_and_gradients(total_loss, params, rest)
    return begin(config, state, batch, model).replace(params=params, grads=grads, **computed)


def apply_updates(config: Any, state: TrainState, context: Context) -> tuple[TrainState, Context]:
    """The state after one optimizer update.

    Args:
        config: `trainer.in_step`; its optimizer is used.
        state: the train state before the update.
        context: needs `grads`, `params` and `model`; optimizers that look at the loss get it, where it is there.

    Returns:
        The new state, and the context with updates and opt_state.
    """
    optimizer = optimizer_of(config)
    _, rest = split(context.model, state.trainable)
    value = None if context.totals is None else context.totals.compute()
    new, updates, opt_state = update(
        optimizer, state, context.grads, context.params, rest, value=value, model_state=context.model_state
    )
    return new, context.replace(updates=updates, opt_state=opt_state)


def collect(config: Any, context: Context) -> Aux:
    """The step's loss states, weighted means and metric states.

    Args:
        config: `trainer.in_step`; its metrics are used.
        context: what the step has computed; losses are reported where it holds any.
    """
    metrics = resolve(config.metrics, root=config, path="metrics")
    found = context.collected
    states = {name: found[name] if name in found else one.from_context(context) for name, one in metrics.items()}
    return Aux(losses={} if context.losses is UNSET else context.losses, total=context.totals, metrics=states)
