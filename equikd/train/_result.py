"""What training gives, and the predictions of a trained model."""

import dataclasses
from typing import Any

import equinox as eqx
import jax

from equikd.data import Batch, as_batch, batch_size, pad
from equikd.evals import eval_context, view_of
from equikd.metrics import Summary
from equikd.optim import averaged
from equikd.sharding import filled_rows, settle, spread_of
from equikd.train._in_step import InStep
from equikd.train._state import TrainState
from equikd.train._writers import Record


class Result:
    """What training gives.

    Attributes:
        trainer: what was trained, whose hyperparameters `predict` uses.
        state: the final train state.
        metrics: newest value of each result, by `split/name`.
        summaries: newest image, text or histogram of each metric that computes one, by `split/name`.
        history: all rows of this session, in order: step, split, metrics and seconds of each; without summaries, which
            writers alone get at every step.
    """

    def __init__(
        self,
        trainer: Any,
        state: TrainState,
        metrics: dict[str, float],
        summaries: dict[str, Summary],
        history: tuple[Record, ...],
    ) -> None:
        self.trainer, self.state, self.metrics, self.history = trainer, state, metrics, history
        self.summaries = summaries

    @property
    def model(self) -> Any:
        """The trained model."""
        return self.state.model

    @property
    def averaged_model(self) -> Any:
        """The model with the averages of its parameters, where the optimizer is an `ek.optim.Ema` or `Swa`.

        Raises:
            ConfigError: it keeps no average.
        """
        return averaged(self.state.model, self.state.opt_state)

    def predict(self, batch: Any, *, model: Any = None) -> Any:
        """Predictions on a batch, in inference mode.

        Args:
            batch: a `Batch` or a bare pytree, with what the model's inputs need.
            model: another model than the trained one, such as `averaged_model`.

        Returns:
            What the model gives, batch axis first.
        """
        return predict(self.trainer, self.state, batch, model=model)


@eqx.filter_jit
def _predict(config: InStep, view: Any, batch: Batch) -> Any:
    return eval_context(config, view, batch).preds


def predict(trainer: Any, state: TrainState, batch: Any, *, model: Any = None) -> Any:
    """Predictions of a state's model on a batch, in inference mode.

    Args:
        trainer: the trainer, whose hyperparameters are used.
        state: a train state.
        batch: a `Batch` or a bare pytree, with what the model's inputs need.
        model: in place of the state's; one of another structure keeps its own hyperparameters.

    Returns:
        What the model gives, batch axis first.
    """
    view = view_of(state)
    if model is not None:
        alike = jax.tree.structure(model) == jax.tree.structure(state.model)
        hyperparameter = state.hyperparameter if alike else (False,) * len(jax.tree.leaves(model))
        view = dataclasses.replace(view, model=model, hyperparameter=hyperparameter)
    config, batch = trainer.in_step, as_batch(batch)
    spread = spread_of(config)
    if spread is None:
        return _predict(config, view, batch)
    rows = batch_size(batch)
    padded = filled_rows(config, rows)
    preds = _predict(config, settle(view, spread), spread.batch(pad(batch, padded), padded))
    spread.wait(preds)
    has_rows = lambda leaf: rows < padded and eqx.is_array(leaf) and leaf.ndim > 0 and leaf.shape[0] == padded
    return jax.tree.map(lambda leaf: leaf[:rows] if has_rows(leaf) else leaf, preds)
