"""Looking inside a model: what its layers return on one batch, and what there is to watch."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from equikd.data import as_batch
from equikd.errors import ConfigError, message
from equikd.inspect._tables import columns, short
from equikd.model._layers import Layer
from equikd.train import Trainer
from equikd.train._layers import called, statistics
from equikd.train._progress import rich_table
from equikd.train._setup import prepare
from equikd.train._state import TrainState
from equikd.tree import join, parse

_HEADER = ("path", "output", "parameters", "mean", "std", "zeros", "not finite", "remark")
_DEAD = 0.9  # a layer with more zeros than that is worth a word


@dataclasses.dataclass(frozen=True)
class Layers:
    """What each layer of a model returns on one batch; printed as a table, in a notebook as a bordered one.

    Attributes:
        rows: a `Layer` for each call, in the order of the model.
        examples: how many rows of the batch count; all, where the model takes whole batches.
    """

    rows: tuple[Layer, ...]
    examples: int

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, path: str) -> Layer:
        """The layer of a path, such as `blocks[0].attention`.

        Raises:
            KeyError: there is none.
        """
        return {row.path: row for row in self.rows}[path]

    def __str__(self) -> str:
        return "\n".join([self._title, *columns([_HEADER, *map(_cells, self.rows)])])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return rich_table(self._title, _HEADER, map(_cells, self.rows))._repr_mimebundle_(include or (), exclude or ())

    @property
    def _title(self) -> str:
        count = f"{self.examples} {'example' if self.examples == 1 else 'examples'}"
        return f"Layers, over {count}"


def _cells(row: Layer) -> tuple[str, ...]:
    numbers = (f"{row.mean:.3g}", f"{row.std:.3g}", f"{row.zeros:.1%}", f"{row.non_finite:.1%}")
    return (row.path, short(jax.ShapeDtypeStruct(row.shape, row.dtype)), f"{row.parameters:,}", *numbers, remark(row))


def remark(row: Layer) -> str:
    """What is worth a word about a layer."""
    if row.non_finite > 0:
        return "NOT FINITE"
    if row.zeros > _DEAD:
        return "nearly all zeros"
    if math.isnan(row.zeros):
        return "no example reaches it"
    return "constant" if row.std == 0 else ""


def layers(
    trainer: Trainer,
    state: TrainState | None = None,
    batch: Any = None,
    *,
    model: Any = None,
    model_state: Any = None,
    inference: bool = False,
) -> Layers:
    """What each layer of the model returns on one batch, by one forward pass.

    Args:
        trainer: the experiment.
        state: a train state of it; None: the first one.
        batch: a batch of its data; None: that of the state's next step.
        model: a live model, as in `Trainer.init`; used where `state` is None.
        model_state: its `eqx.nn.State`.
        inference: inference mode; else as a training step does it: with dropout, and the statistics of the batch.

    Returns:
        Per call of each submodule: output shape and dtype, parameters, and of the numbers in the output, over all rows
        that count: mean and standard deviation of the finite ones, the fraction of zeros and of those not finite.

    Raises:
        EquikdError: whatever `train` would refuse.

    Example:
        >>> import equinox as eqx, numpy as np, optax, equikd as ek
        >>> trainer = ek.Trainer(
        ...     model=ek.lazy(eqx.nn.MLP)(3, 1, 8, 1),
        ...     inputs={"x": "batch.x"},
        ...     losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        ...     optimizer=ek.lazy(optax.sgd)(0.1),
        ...     train_data=ek.data.InMemory({"x": np.ones((8, 3)), "y": np.ones((8, 1))}, 4),
        ...     num_steps=1,
        ... )
        >>> found = ek.inspect.layers(trainer)
        >>> [(row.path, row.shape, row.parameters) for row in found if row.parameters]
        [('layers[0]', (8,), 32), ('layers[1]', (1,), 9)]
    """
    if state is not None and model is not None:
        raise ConfigError(message("layers: two models", got="state and model", expected="one of them"))
    if state is None:
        state = trainer.init(model=model, model_state=model_state)
    if batch is None:
        batch = next(iter(trainer.batches(state)))
    found = statistics(trainer.in_step, state, batch, inference=inference)
    mask = as_batch(batch).mask
    return Layers(tuple(found), int(mask.sum()) if trainer.per_example else len(mask))


@dataclasses.dataclass(frozen=True)
class Intermediates:
    """What there is to watch in a model; printed as a table.

    Attributes:
        paths: key path -> shape and dtype as losses and metrics get it, the batch axis first; for each call where there
            are several.
    """

    paths: dict[str, jax.ShapeDtypeStruct]

    def __str__(self) -> str:
        rows = columns((path, short(shape)) for path, shape in self.paths.items()) if self.paths else ["  none"]
        return "\n".join(["Intermediates (key path, shape)", *rows])


def intermediates(trainer: Trainer, *, model: Any = None, model_state: Any = None) -> Intermediates:
    """The key paths of all that the submodules of a model return in a training step; nothing is computed.

    Args:
        trainer: the experiment.
        model: a live model, as in `Trainer.init`.
        model_state: its `eqx.nn.State`.

    Raises:
        EquikdError: whatever `train` would refuse.

    Example:
        >>> import equinox as eqx, numpy as np, optax, equikd as ek
        >>> trainer = ek.Trainer(
        ...     model=ek.lazy(eqx.nn.MLP)(3, 1, 8, 1),
        ...     inputs={"x": "batch.x"},
        ...     losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        ...     optimizer=ek.lazy(optax.sgd)(0.1),
        ...     train_data=ek.data.InMemory({"x": np.ones((8, 3)), "y": np.ones((8, 1))}, 4),
        ...     num_steps=1,
        ... )
        >>> print(ek.inspect.intermediates(trainer))
        Intermediates (key path, shape)
          interms.layers[0]         f32[4,8]
          interms.layers[1]         f32[4,1]
          interms.activation        f32[4,8]
          interms.final_activation  f32[4,1]
    """
    setup = prepare(trainer, model, model_state)
    found = called(setup.config, setup.state, setup.spec)
    return Intermediates({join(("interms", *parse(path))): shape for path, shape in found.items()})
