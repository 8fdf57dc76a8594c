"""The stepper: the fast host-side driver of the step.

From Python, `filter_jit` walks the whole model on each call. The stepper partitions once, closes over the static half,
keeps the state as one flat list of leaves that it donates from step to step, and rebuilds the module only when somebody
asks for it. What a step hands back as it came (the PRNG key, frozen parameters) is no part of that list. Losses and
metrics are merged into accumulators, a second donated list; `swap` hands them out and puts fresh ones in. Compiled
programs live in one bounded process-wide cache, keyed by the structure of config, state and batch, so a second trainer
of the same structure compiles nothing. The public `step` runs the very same programs on copies.
"""

import itertools
from typing import Any

import equinox as eqx
import jax
import numpy as np

from equikd._compat import Tracer, is_weak
from equikd.config import resolve
from equikd.data import Batch, as_batch, batch_size
from equikd.data._pipeline import all_real, own_batch
from equikd.errors import EquikdError, message
from equikd.metrics import Aux
from equikd.metrics._aux import check_results
from equikd.sharding import Home, Spread, SpreadStep, home, place, spread_of
from equikd.train._cache import Cache, is_array, structure_key
from equikd.train._custom import called
from equikd.train._guard import guarded, without_skipped
from equikd.train._in_step import InStep
from equikd.train._packing import layout_of, pack, unpack
from equikd.train._state import TrainState, strong
from equikd.train._step import default_step
from equikd.tree import named_leaves

_PROGRAMS: "Cache[Program]" = Cache(most=128)


def step_of(config: Any) -> Any:
    """The step function of a trainer: its own, or `default_step`."""
    return default_step if config.step is None else resolve(config.step, root=config, path="step")


class Program:
    """The compiled step for one structure of config, state and batch.

    The pure step is a jit of its own inside the donating one: `eval_shape` here and the compilation later share its
    trace.
    """

    def __init__(self, config: Any, state: TrainState, batch: Any, places: Home | Spread) -> None:
        config_tree = jax.tree.structure(config)
        arrays, static = eqx.partition(state, is_array)
        self.state_tree, self.static = jax.tree.structure(arrays), static
        numbered = jax.tree.unflatten(self.state_tree, range(self.state_tree.num_leaves))
        self.guard_at: int | None = None if state.guard is None else numbered.guard.counts
        traced: dict[str, Any] = {}

        def pure_step(state_leaves: Any, config_leaves: Any, batch: Any) -> tuple[Any, Any]:
            config = jax.tree.unflatten(config_tree, config_leaves)
            new, aux = _pure_step(config, self.state(state_leaves), batch)
            new, (aux, traced["aux_static"]) = eqx.filter(new, is_array), eqx.partition(aux, is_array)
            traced["aux_tree"] = jax.tree.structure(aux)
            leaves = _fitting(jax.tree.unflatten(self.state_tree, state_leaves), new)
            changed = [old is not new for old, new in zip(state_leaves, leaves, strict=True)]
            if traced.setdefault("changed", changed) != changed:
                raise EquikdError(message("the step, traced again, changes other leaves of the state than before"))
            return list(itertools.compress(leaves, changed)), jax.tree.leaves(aux)

        pure = jax.jit(pure_step)
        _, shapes = jax.eval_shape(pure, jax.tree.leaves(arrays), jax.tree.leaves(config), batch)
        self.aux_tree, self.aux_static = traced["aux_tree"], traced["aux_static"]
        self.changed: list[bool] = traced["changed"]
        aux = self._aux(shapes)
        aux.check_fixed()
        self._empty = jax.tree.leaves(eqx.filter(aux.empty(), is_array))
        check_results(self.empty)
        self._layout = layout_of(self._empty)
        self._fresh = self.packed(self._empty)
        for array in (*self._empty, *self._fresh):
            array.flags.writeable = False  # shared by all steppers

        # A dict and a mask are flattened faster than the Batch that holds them.
        def flat_step(
            changing: Any, accumulators: Any, kept: Any, config_leaves: Any, data: Any, mask: Any
        ) -> tuple[Any, Any]:
            new, aux = pure(self.joined(changing, kept), config_leaves, Batch(data, mask))
            merged = self._aux(unpack(self._layout, accumulators)).merge(self._aux(aux))
            return new, pack(self._layout, jax.tree.leaves(eqx.filter(merged, is_array)))

        self.spread = places if isinstance(places, Spread) else None
        self.where, self.where_rows = places.whole, places.rows
        self.where_state = places.each(jax.tree.leaves(arrays))
        placed = places.options(*self.parted(jax.tree.leaves(arrays)))
        self.run: Any = jax.jit(flat_step, donate_argnums=(0, 1), **placed)
        if self.spread is not None:
            changing, kept = self.parted(jax.tree.leaves(arrays))
            given = (changing, self._fresh, kept, jax.tree.leaves(config), batch.data, batch.mask)
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)
            self.run = SpreadStep(self.run, shapes, self.spread)

    def parted(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """State leaves that the step changes, and those that it keeps."""
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for leaf, changes in zip(leaves, self.changed, strict=True):
            parts[changes].append(leaf)
        return parts[True], parts[False]

    def joined(self, changing: list[Any], kept: list[Any]) -> list[Any]:
        """State leaves in their order."""
        parts = {True: iter(changing), False: iter(kept)}
        return [next(parts[changes]) for changes in self.changed]

    def state(self, leaves: Any) -> TrainState:
        """The train state that flat leaves stand for."""
        return eqx.combine(jax.tree.unflatten(self.state_tree, leaves), self.static)

    def _aux(self, leaves: Any) -> Aux:
        aux = jax.tree.unflatten(self.aux_tree, leaves)
        return eqx.combine(aux, self.aux_static) if jax.tree.leaves(self.aux_static) else aux

    def aux(self, packed: list[Any]) -> Aux:
        """The losses and metrics that packed accumulators stand for."""
        return self._aux(unpack(self._layout, jax.device_put(packed, self.where)))

    def packed(self, leaves: list[Any]) -> list[Any]:
        """Packed accumulators from leaves on the host."""
        return pack(self._layout, leaves, np.stack)

    def fresh(self) -> list[Any]:
        """Empty accumulators, on the host: jit sends them faster than `device_put`, and donates its own copy."""
        return list(self._fresh)

    @property
    def empty(self) -> Aux:
        """Empty losses and metrics, on the host."""
        return self._aux(self._empty)


def _fitting(old: Any, new: Any) -> list[Any]:
    """The leaves of the new state, strong like those of the old one.

    Raises:
        EquikdError: the step gave the state another structure, or a leaf another shape or dtype; with all paths.
    """
    before, after = named_leaves(old), named_leaves(new)
    lines = [f"{path} is gone" for path in before if path not in after]
    lines += [f"{path} is new: {_spec(after[path])}" for path in after if path not in before]
    lines += [
        f"{path} was {_spec(leaf)}, and is {_spec(after[path])}"
        for path, leaf in before.items()
        if path in after and _spec(leaf) != _spec(after[path])
    ]
    if not lines and jax.tree.structure(old) != jax.tree.structure(new):
        lines = [f"{jax.tree.structure(old)} has become {jax.tree.structure(new)}"]
    if lines:
        fix = "return a state with the modules, containers, shapes and dtypes of the one given"
        raise EquikdError(
            message("the step changes the structure of the train state", got="\n".join(lines)[:2000], fix=fix)
        )
    return [strong(leaf) if is_weak(leaf) else leaf for leaf in jax.tree.leaves(new)]


def _spec(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _pure_step(config: Any, state: TrainState, batch: Any) -> tuple[TrainState, Aux]:
    new, aux = called(step_of(config), config, state, batch)
    new = guarded(config, state, new, aux.total)
    return new, without_skipped(config, new, aux)


def program_for(config: Any, state: TrainState, batch: Any) -> Program:
    """The program for these structures, from the cache where it is known."""
    places = spread_of(config) or Home(home(state))
    if isinstance(places, Spread):
        places.check_rows(batch_size(batch))
    key = structure_key(config, state, batch), places
    return _PROGRAMS.get(key, lambda: Program(config, state, batch, places))


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

    def __init__(self, trainer: Any, state: TrainState, *, spec: Any = None, accumulators: Aux | None = None) -> None:
        """Copy the state and find the program.

        Args:
            trainer: a `Trainer`; or its `in_step`, and `spec`.
            state: where to start; copied.
            spec: a `Batch` of arrays or shapes like those that will come; those of `trainer.train_data` by default.
            accumulators: losses and metrics to go on from (a checkpoint's), empty by default.
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
        """
        # The mask of full batches is one shared array, sent once. It says that their arrays are checked and ours:
        # others are copied, since what has been dispatched may read them after their owner has written over them.
        if type(batch) is not Batch or batch.mask is not self._all_real:
            batch = own_batch(batch)
        data, mask = batch.data, batch.mask
        data = place(data, self._spread)
        mask = self._mask if mask is self._all_real else place(mask, self._spread)
        self._changing, self._accumulators = self._program.run(
            self._changing, self._accumulators, self._kept, self._config_leaves, data, mask
        )

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


def run_once(config: Any, state: TrainState, batch: Any) -> tuple[TrainState, Aux]:
    """One step on copies: the state given stays valid. Inside a trace, the pure step itself."""
    batch = own_batch(batch)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((config, state, batch))):
        return _pure_step(config, state, batch)
    program = program_for(config, state, batch)
    leaves = copies(jax.tree.leaves(eqx.filter(state, is_array)), program.where_state)
    changing, kept = program.parted(leaves)
    config_leaves = jax.tree.leaves(config)
    if program.spread is not None:
        config_leaves = jax.device_put(config_leaves, program.where)
    data, mask = place((batch.data, batch.mask), program.spread)
    changing, accumulators = program.run(changing, program.fresh(), kept, config_leaves, data, mask)
    return program.state(program.joined(changing, kept)), program.aux(accumulators)
