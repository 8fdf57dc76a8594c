"""The stepper: the fast host-side driver of the step.

From Python, `filter_jit` walks the whole model on each call. The stepper partitions once, closes over the static half,
keeps the state as one flat list of leaves that it donates from step to step, and rebuilds the module only when somebody
asks for it. Losses and metrics are merged into accumulators, a second donated list; `swap` hands them out and puts
fresh ones in. What it drives is a `Program` (see there), which all trainers of one structure share. The public `step`
runs the very same programs on copies.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from equikd._compat import Tracer
from equikd.data import Batch, as_batch, batch_size
from equikd.data._pipeline import all_real, own_batch
from equikd.metrics import Aux
from equikd.sharding import place
from equikd.train._cache import is_array
from equikd.train._compilations import Compilations, watched_by
from equikd.train._in_step import InStep
from equikd.train._program import ONE, Kind, program_for, step_once
from equikd.train._state import TrainState


class Fed(NamedTuple):
    """Batches for one dispatch.

    Attributes:
        kind: how they come.
        steps: how many there are, at most `kind.most`.
        data: pytree of arrays `b ...` of one batch, `most b ...` of several; or the row numbers, int32 `b` or `most b`.
        mask: bool, of the shape of the row numbers.
        table: pytree of arrays on the device that the row numbers are of, or None.
    """

    kind: Kind
    steps: int
    data: Any
    mask: Any
    table: Any = None


def copies(leaves: list[Any], where: Any) -> list[jax.Array]:
    """Copies at a place, or each at its own of a list (None: where they are); nothing is compiled for them."""
    if isinstance(where, list):  # on its way to more devices JAX takes an array for its own copy on the first one
        leaves = jax.device_put(leaves, where)
    return jax.device_put(leaves, where, may_alias=False)


class Stepper:
    """Drives the step of a trainer from a state that stays the caller's.

    Example:
        >>> import equinox as eqx, numpy as np, optax, equikd as ek
        >>> x = np.ones((64, 2), np.float32)
        >>> trainer = ek.Trainer(
        ...     model=ek.lazy(eqx.nn.Linear)(2, 2),
        ...     inputs={"x": "batch.x"},
        ...     losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        ...     optimizer=ek.lazy(optax.sgd)(0.1),
        ...     train_data=ek.data.InMemory({"x": x}, batch_size=16),
        ...     num_steps=3,
        ... )
        >>> stepper = Stepper(trainer, trainer.init())
        >>> for batch, _ in zip(trainer.batches(stepper.state), range(3)):
        ...     stepper.step(batch)
        >>> int(stepper.state.step), sorted(stepper.swap().results())
        (3, ['loss', 'losses/mse', 'weighted/mse'])
    """

    def __init__(
        self,
        trainer: Any,
        state: TrainState,
        *,
        spec: Any = None,
        accumulators: Aux | None = None,
        max_compilations: int | None = None,
    ) -> None:
        """Copy the state and find the program.

        Args:
            trainer: a `Trainer`; or its `in_step`, and `spec`.
            state: where to start; copied.
            spec: a `Batch` of arrays or shapes like those that will come; those of `trainer.train_data` by default.
            accumulators: losses and metrics to go on from (a checkpoint's), empty by default.
            max_compilations: how often the step may be compiled; None: what the trainer says.
        """
        spec = as_batch(trainer.spec() if spec is None else spec)
        config = trainer if isinstance(trainer, InStep) else trainer.in_step
        self._program = program_for(config, state, spec)
        self._spread = self._program.spread
        self._config_leaves = jax.device_put(jax.tree.leaves(config), self._program.where)
        leaves = copies(jax.tree.leaves(eqx.filter(state, is_array)), self._program.where_state)
        self._changing, self._kept = self._program.parted(leaves)
        given = None if accumulators is None else jax.tree.leaves(eqx.filter(accumulators, is_array))
        self._accumulators = self._program.fresh() if given is None else copies(self._program.packed(given), None)
        if max_compilations is None and not isinstance(trainer, InStep):
            max_compilations = trainer.max_compilations
        self.compilations = Compilations(max_compilations)
        self._all_real = all_real(batch_size(spec))
        self._mask = jax.device_put(self._all_real, self._program.where_rows)

    @staticmethod
    def empty(config: Any, state: TrainState, spec: Any) -> Aux:
        """Empty accumulators for these structures, on the host."""
        return program_for(config, state, spec).empty

    def step(self, batch: Any) -> None:
        """One update; returns as soon as it is dispatched.

        Args:
            batch: a `Batch` or a bare pytree of arrays; another shape compiles once more.

        Raises:
            DataError: it is no batch, or the devices of a mesh do not divide its rows.
            CompilationError: it would compile the step once more than is allowed.
        """
        # The mask of full batches is one shared array, sent once. It says that their arrays are checked and ours:
        # others are copied, since what has been dispatched may read them after their owner has written over them.
        if type(batch) is not Batch or batch.mask is not self._all_real:
            batch = own_batch(batch)
        self.run(Fed(ONE, 1, batch.data, batch.mask))

    def run(self, fed: Fed) -> None:
        """The updates of one dispatch; returns as soon as it is dispatched.

        Args:
            fed: batches that nobody writes over, of the shape of the `spec`.

        Raises:
            CompilationError: it would compile the step once more than is allowed.
        """
        kind, steps, data, mask, table = fed
        if self._spread is not None:
            data = place(data, self._spread, 0 if kind.most == 1 else 1)
            mask = mask if mask is self._all_real else place(mask, self._spread, 0 if kind.most == 1 else 1)
        if mask is self._all_real:
            mask = self._mask
        given = (self._changing, self._accumulators, self._kept, self._config_leaves, data, mask)
        if kind is not ONE:
            given = (*given, table, np.int32(steps) if kind.most > 1 else None)
        watched_by(self.compilations)
        try:
            self._changing, self._accumulators = self._program.runner(kind)(*given)
        finally:
            watched_by(None)

    def guard(self) -> Any:
        """A copy of what the guard knows, to be read later; None where there is no guard."""
        at = self._program.guard_at
        return None if at is None else copies([self._leaves()[at]], self._program.where)[0]

    def _leaves(self) -> list[jax.Array]:
        return self._program.joined(self._changing, self._kept)

    def swap(self) -> Aux:
        """Losses and metrics since the last swap; the stepper goes on with empty ones and never donates these."""
        handed_out, self._accumulators = self._program.aux(self._accumulators), self._program.fresh()
        return handed_out

    @property
    def measured(self) -> dict[Any, int]:
        """What was found out about the speed of its program."""
        return self._program.measured

    @property
    def device(self) -> jax.sharding.SingleDeviceSharding | None:
        """Where the steps run; None: on several devices."""
        where = self._program.where
        return where if isinstance(where, jax.sharding.SingleDeviceSharding) else None

    @property
    def state(self) -> TrainState:
        """A copy of the train state, valid whatever the stepper does next."""
        return self._program.state(copies(self._leaves(), self._program.where_state))

    @property
    def changed(self) -> TrainState:
        """Of each array of the train state, whether steps change it; None elsewhere."""
        return jax.tree.unflatten(self._program.state_tree, self._program.changed)

    def borrow(self) -> tuple[TrainState, Aux]:
        """State and accumulators without a copy: to be used before the next `step`, which donates them."""
        return self._program.state(self._leaves()), self._program.aux(self._accumulators)


def stepper_for(setup: Any, state: TrainState, accumulators: Aux | None = None) -> Stepper:
    """The stepper of a checked experiment."""
    most = setup.max_compilations
    return Stepper(setup.config, state, spec=setup.spec, accumulators=accumulators, max_compilations=most)


def run_once(config: Any, state: TrainState, batch: Any) -> tuple[TrainState, Aux]:
    """One step on copies: the state given stays valid. Inside a trace, the pure step itself."""
    batch = own_batch(batch)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((config, state, batch))):
        return step_once(config, state, batch)
    program = program_for(config, state, batch)
    leaves = copies(jax.tree.leaves(eqx.filter(state, is_array)), program.where_state)
    changing, kept = program.parted(leaves)
    config_leaves = jax.tree.leaves(config)
    if program.spread is not None:
        config_leaves = jax.device_put(config_leaves, program.where)
    data, mask = place((batch.data, batch.mask), program.spread)
    changing, accumulators = program.run(changing, program.fresh(), kept, config_leaves, data, mask)
    return program.state(program.joined(changing, kept)), program.aux(accumulators)
