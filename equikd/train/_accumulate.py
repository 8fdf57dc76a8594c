"""Gradient accumulation: the losses, gradients and metrics of a batch, of which only a part is in memory at a time.

`Trainer(accumulate=k)` splits the rows of a batch into k micro-batches, over which the step scans. The mean over a
batch is not the mean of the means of its parts, where these have different numbers of rows that count. So normalisers
come first: they need masks only, of the whole batch. Then each micro-batch gives the gradient of

    sum over losses of   weight * (sum of its values) / (count over the whole batch),

and these add up, in float32, to the gradient of the whole. What reads no rows (a penalty on parameters) is computed
once. Metrics that read predictions are collected in the scan and merged; all others wait for the whole batch. What
would come out differently is refused: see `_uncoupled.py`. Each row has the PRNG key that it has in the whole batch.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.config import resolve
from equikd.metrics import StepTotals
from equikd.model import predictions
from equikd.model._interms import adding
from equikd.optim._average import wide
from equikd.sharding import micro_batches, spread_of
from equikd.train._cache import is_array
from equikd.train._core import value_and_gradients
from equikd.train._custom import with_intermediates
from equikd.train._init import strong_arrays
from equikd.train._state import TrainState, split, strong
from equikd.train._uncoupled import reads_predictions, reads_rows, refuse
from equikd.wiring import Context


def accumulated(config: Any, state: TrainState, whole: Context, only: tuple[str, ...]) -> Context:
    """The losses and gradients of a batch, and those metrics that read predictions, over `config.accumulate` parts.

    Args:
        config: `trainer.in_step`.
        state: the train state.
        whole: the context of the whole batch before anything is computed; rows of padding hold ordinary numbers.
        only: names of the losses that are differentiated.

    Returns:
        The context with losses, totals, params, grads, model_state and collected; without preds.

    Raises:
        WiringError: something would not equal the whole batch, or key paths lead nowhere.
    """
    refuse(config, whole, rows=whole.mask.shape[0])
    every = resolve(config.losses, root=config, path="losses")
    metrics = resolve(config.metrics, root=config, path="metrics")
    by_row = {name: loss for name, loss in every.items() if reads_rows(loss)}
    once = {name: loss for name, loss in every.items() if name not in by_row}
    early = {name: metric for name, metric in metrics.items() if reads_predictions(metric)}
    params, rest = split(whole.model, state.trainable)
    weights = {name: loss.weight_at(whole.step) for name, loss in every.items()}
    counts = {name: jnp.maximum(loss.normaliser(whole), 1) for name, loss in by_row.items()}

    def part_loss(trained: Any, rest: Any, part: Context, keys: Any) -> tuple[jax.Array, dict[str, Any]]:
        """What a micro-batch adds to the total loss."""
        params, zeros = trained
        part = part.replace(model=eqx.combine(params, rest), params=params)
        with adding(zeros):
            found = predictions(config, part.model, part, key=keys, model_state=part.model_state, whole=whole)
        part = part.replace(preds=found.preds, interms=found.interms)
        refuse(config, part, rows=whole.mask.shape[0])
        states = {name: loss.from_context(part) for name, loss in by_row.items()}
        shares = [weights[n] * (s.total / counts[n].astype(s.total.dtype)) for n, s in states.items() if n in only]
        return sum(shares, jnp.zeros(())), {"losses": states, **found._asdict()}

    def penalty(params: Any, rest: Any) -> tuple[jax.Array, dict[str, Any]]:
        """What reads no rows."""
        context = whole.replace(model=eqx.combine(params, rest), params=params)
        states = {name: loss.from_context(context) for name, loss in once.items()}
        return sum([weights[name] * states[name].mean() for name in states if name in only], jnp.zeros(())), states

    statics: list[Any] = []
    carried, constant = eqx.partition(state.model_state, is_array)

    def scanned(so_far: tuple[Any, Any], row_parts: Any) -> tuple[Any, Any]:
        sums, before = so_far
        data, mask, keys = row_parts
        part = whole.replace(batch=data, mask=mask, model_state=eqx.combine(before, constant))
        if not config.per_example:  # all that is drawn for a micro-batch is drawn from a key of its own
            part = part.replace(key=keys)
        of_part = lambda trained, rest: part_loss(trained, rest, part, keys)
        (_, computed), grads, of_interms = with_intermediates(config, of_part, params, rest)
        part = part.replace(params=params, grads_of_interms=of_interms, **computed)
        found = {"losses": part.losses, "metrics": {name: one.from_context(part) for name, one in early.items()}}
        found, static = eqx.partition(strong_arrays(found), is_array)
        statics.append(static)
        after = strong(eqx.filter(part.model_state, is_array), before)
        # A micro-batch of nothing but padding leaves no trace, not even in running statistics.
        after = jax.tree.map(lambda new, old: jnp.where(mask.any(), new, old), after, before)
        return (jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, grads), after), found

    grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide(leaf.dtype)), params)
    (grads, model_state), found = jax.lax.scan(scanned, (grads, carried), _parts(config, whole))
    found = eqx.combine(found, statics[-1])
    losses = {name: one.reduce() for name, one in found["losses"].items()}
    if once:
        (_, states), more = value_and_gradients(penalty, params, rest)
        losses |= states
        grads = jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), grads, more)
    terms = strong({name: jnp.asarray(weights[name] * losses[name].mean()) for name in every})
    return whole.replace(
        params=params,
        grads=jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), grads, params),
        losses={name: losses[name] for name in every},
        totals=StepTotals.of(terms, losses),
        model_state=eqx.combine(model_state, constant),
        collected={name: one.reduce() for name, one in found["metrics"].items()},
    )


def _parts(config: Any, whole: Context) -> tuple[Any, Any, Any]:
    """Data, mask and PRNG keys of the micro-batches, the axis of these first."""
    rows, count = whole.mask.shape[0], config.accumulate
    picks, real = split_rows(rows, count)
    keys = jax.random.split(whole.key, rows if config.per_example else count)

    def parted(array: Any) -> jax.Array:
        array = jnp.asarray(array)
        return array.reshape(count, rows // count, *array.shape[1:]) if real.all() else array[picks]

    data, mask = jax.tree.map(parted, (whole.batch, whole.mask))
    data, mask = micro_batches((data, mask & real), spread_of(config))
    return data, mask, parted(keys) if config.per_example else keys


def split_rows(rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows each micro-batch holds, in order.

    Their sizes differ by one at most, so that none is empty; the smaller ones repeat a row, lest a model meets numbers
    that no row has.

    Args:
        rows: of the batch, at least `count`.
        count: of micro-batches.

    Returns:
        Row numbers, int `count size`, and which of them are no repetition, bool of the same shape.

    Example:
        >>> picks, real = split_rows(5, 2)
        >>> picks.tolist(), real.tolist()
        ([[0, 1, 2], [3, 4, 4]], [[True, True, True], [True, True, False]])
    """
    sizes = np.full(count, rows // count) + (np.arange(count) < rows % count)
    places = np.arange(sizes.max())
    starts = np.cumsum(sizes) - sizes
    real = places < sizes[:, None]
    return starts[:, None] + np.minimum(places, sizes[:, None] - 1), real
