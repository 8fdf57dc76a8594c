"""The step: one pure function (config, state, batch) -> (state, aux), from pieces that can be used alone.

`config` is the part of the trainer that the step uses (`trainer.in_step`), resolved here, inside the trace, so each of
its floats may change, be vmapped or be differentiated without a recompile. The context is filled in order: forward,
losses, gradients, updates, metrics (of the parameters before the update). `Trainer(step=my_step)` replaces
`default_step` by a function of the same signature, which may call the same pieces.
"""

from typing import Any

import jax
import jax.numpy as jnp

from equikd.config import resolve
from equikd.data import Batch, as_batch
from equikd.losses import replace_masked
from equikd.metrics import Aux, StepTotals
from equikd.model import predictions, with_hyperparameters
from equikd.train._accumulate import accumulated
from equikd.train._core import update
from equikd.train._custom import check_updatable, chosen, gradients, state_of
from equikd.train._guard import checked
from equikd.train._init import optimizer_of
from equikd.train._state import TrainState, split, strong
from equikd.wiring import UNSET, Context

Only = str | tuple[str, ...] | None


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
        A context with step, key, batch, mask, model, preds, interms, extra and config; and params, where the model is
        one that they can be found in.
    """
    if model is None:
        model = with_hyperparameters(config, state.model, state.hyperparameter)
    context = begin(config, state, as_batch(batch), model)
    if jax.tree.structure(model) == jax.tree.structure(state.model):
        context = context.replace(params=split(model, state.trainable)[0])
    key = None if inference else context.key
    found = predictions(config, model, context, key=key, model_state=state.model_state, inference=inference)
    return context.replace(**found._asdict())


def losses_of(config: Any, context: Context, only: Only = None) -> tuple[jax.Array, Context]:
    """Total loss (float scalar) of all losses, or of those that `only` names; and the context with the states of all.

    Raises:
        WiringError: key paths lead nowhere, or `only` names no loss.
    """
    losses = resolve(config.losses, root=config, path="losses")
    states = {name: state_of(loss, context, "losses", name) for name, loss in losses.items()}
    terms = {name: loss.weight_at(context.step) * states[name].mean() for name, loss in losses.items()}
    terms = strong({name: jnp.asarray(term) for name, term in terms.items()})
    total = sum((terms[name] for name in chosen(config, only)), start=jnp.zeros(()))
    return total, context.replace(losses=states, totals=StepTotals.of(terms, states))


def loss_and_gradients(config: Any, state: TrainState, batch: Any, only: Only = None) -> Context:
    """Forward, losses, and the gradient of the total loss with respect to the trainable leaves.

    Args:
        config: `trainer.in_step`.
        state: the train state.
        batch: a `Batch`, or a bare pytree.
        only: names of the losses whose sum is differentiated; None: all. All of them are computed and reported.

    Returns:
        A context with all that a step computes before its update: preds, losses, params, grads. With `accumulate` the
        predictions are never there all at once: in their place, it holds the states of the metrics that read them.

    Raises:
        WiringError: key paths lead nowhere, or there is no loss of that name.
    """
    batch = as_batch(batch)
    if config.accumulate > 1:
        model = with_hyperparameters(config, state.model, state.hyperparameter)
        return accumulated(config, state, begin(config, state, batch, model), chosen(config, only))
    return gradients(config, state, lambda m: losses_of(config, forward(config, state, batch, model=m), only))


def apply_updates(config: Any, state: TrainState, context: Context) -> tuple[TrainState, Context]:
    """The state after one optimizer update.

    Args:
        config: `trainer.in_step`; its optimizer is used.
        state: the train state before the update.
        context: needs `grads`, `params` and `model`; optimizers that look at the loss get it, where it is there.

    Returns:
        The new state, and the context with updates and opt_state.

    Raises:
        WiringError: the context has no gradients, or these do not fit the parameters.
    """
    check_updatable(context)
    optimizer = optimizer_of(config)
    _, rest = split(context.model, state.trainable)
    value = None if context.totals is None else context.totals.compute()
    others = {"model_state": context.model_state, "scale": None if state.guard is None else state.guard.scale}
    new, updates, opt_state = update(optimizer, state, context.grads, context.params, rest, value=value, **others)
    return checked(config, state, new, context), context.replace(updates=updates, opt_state=opt_state)


def collect(config: Any, context: Context) -> Aux:
    """The step's loss states, weighted means and metric states.

    Args:
        config: `trainer.in_step`; its metrics are used.
        context: what the step has computed; losses are reported where it holds any.
    """
    metrics = resolve(config.metrics, root=config, path="metrics")
    found = context.collected
    states = {n: found[n] if n in found else state_of(one, context, "metrics", n) for n, one in metrics.items()}
    return Aux(losses={} if context.losses is UNSET else context.losses, total=context.totals, metrics=states)
