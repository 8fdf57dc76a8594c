"""The layers of a model in one forward pass, as a training step makes it; and the first that went wrong."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from equikd.data import Batch, InMemory, as_batch
from equikd.errors import NonFiniteError
from equikd.model import predictions, with_hyperparameters
from equikd.model._layers import AllLayers, Layer, first_non_finite, layers_of, moments, path_of
from equikd.train._check import abstract
from equikd.train._setup import Setup
from equikd.train._state import TrainState
from equikd.train._step import begin
from equikd.tree import join, named_leaves, parse

_MOST = 1000  # steps of data that can only be read from the start; more of it might take as long as the run


def _calls(config: Any, state: TrainState, batch: Any, inference: bool, reduce: Any) -> Any:
    model = with_hyperparameters(config, state.model, state.hyperparameter)
    context = begin(config, state, batch, model)
    key, asked = None if inference else context.key, AllLayers(model, reduce)
    given = {"key": key, "model_state": state.model_state, "inference": inference}
    return predictions(config, model, context, asked=asked, **given).interms


@eqx.filter_jit
def _moments(config: Any, state: TrainState, batch: Any, inference: bool) -> Any:
    return _calls(config, state, batch, inference, moments)


def statistics(config: Any, state: TrainState, batch: Any, *, inference: bool = False) -> list[Layer]:
    """What each layer returns on a batch, by one forward pass.

    Args:
        config: `trainer.in_step`.
        state: the train state; its step and key are those of the step that comes next.
        batch: a `Batch`, or a bare pytree.
        inference: inference mode, without PRNG key.
    """
    batch = as_batch(batch)
    calls = jax.device_get(_moments(config, state, batch, inference))
    return layers_of(state.model, calls, batch.mask, per_example=config.per_example)


def called(config: Any, state: Any, spec: Batch) -> dict[str, jax.ShapeDtypeStruct]:
    """Path of each part of what each call of a layer returns -> its shape; nothing is computed.

    Args:
        config: `trainer.in_step`.
        state: the train state, or its shapes.
        spec: a batch, or its shapes.
    """
    paths: list[str] = []

    def arrays(config: Any, state: Any, batch: Any) -> list[Any]:
        calls = _calls(config, state, batch, False, None)
        found = {
            path_of(name, number, len(calls[name]), loops, place): leaf
            for name in AllLayers(state.model, None).names  # in the order of the model
            for number, (loops, _, value) in enumerate(calls.get(name, ()))
            for place, leaf in named_leaves(value, is_leaf=lambda part: isinstance(part, eqx.nn.State)).items()
            if eqx.is_array(leaf)
        }
        paths[:] = found
        return list(found.values())

    return dict(zip(paths, abstract(arrays, config, state, spec), strict=True))


def located_in_layer(error: NonFiniteError, setup: Setup) -> NonFiniteError:
    """The error, whose text also says which layer was the first to return a number that is not finite.

    The batch of the step that failed is read again. Where that cannot be, or where a step of one's own calls the model
    in another way, the error stays as it is: what it says is true in any case.
    """
    if parse(error.path)[0] in ("params", "model_state"):  # they are bad before the model is called
        return error
    if not isinstance(setup.data, InMemory) and error.step > _MOST:
        return error
    try:
        batch = as_batch(next(iter(setup.data.batches(error.step - 1, setup.seed))))
        bad = _not_finite(batch)
        first = first_non_finite(statistics(setup.config, error.state, batch))
    except Exception:  # of the user's data or model; the run has ended for another reason
        return error
    if bad:
        return error.saying("batch", bad)
    if not first:
        return error.saying("layer", "all layers return finite numbers on this batch: look at losses and gradients")
    told = [f"{join(('interms', *parse(path)))} is the first that returns {kind}" for kind, path in first.items()]
    return error.saying("layer", f"{', '.join(told)}; it arose there or right before")


def _not_finite(batch: Batch) -> str | None:
    """What of the data is not finite."""
    rows = np.asarray(batch.mask)
    for path, leaf in named_leaves(batch.data).items():
        array = np.asarray(leaf)
        if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array[rows]).all():
            bad = ~np.isfinite(array).reshape(len(rows), -1).all(axis=1) & rows
            where = join(("batch", *parse(path)))
            return f"{where} itself holds nan or inf, in {int(bad.sum())} of {int(rows.sum())} rows"
    return None
