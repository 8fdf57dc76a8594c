"""The compiled step for one structure of config, state and batch.

The state is one flat list of leaves; what a step hands back as it came (the PRNG key, frozen parameters) is no part of
what is donated. Losses and metrics are merged into accumulators, packed into few arrays. Programs live in one bounded
process-wide cache, so a second trainer of the same structure compiles nothing.

A `Kind` says how batches come: one or up to `most` of them in a dispatch, as they are or as row numbers of data that
lies on the device. Each kind is a program of its own around the one traced step. A call of several batches is a loop
with a traced number of rounds over a stack of `most` of them, so one program serves every number up to it.
"""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd._compat import is_weak
from equikd.config import resolve
from equikd.data import Batch, batch_size
from equikd.errors import EquikdError, message
from equikd.metrics import Aux
from equikd.metrics._aux import check_results
from equikd.sharding import Home, Spread, SpreadStep, home, spread_of
from equikd.train._cache import Cache, is_array, structure_key
from equikd.train._compilations import Call, settings_of_jax, tell_traced
from equikd.train._custom import called
from equikd.train._guard import guarded, without_skipped
from equikd.train._packing import layout_of, pack, unpack
from equikd.train._state import TrainState, strong
from equikd.train._step import default_step
from equikd.tree import named_leaves


class Kind(NamedTuple):
    """How batches come to a program.

    Attributes:
        most: of them in one dispatch.
        gathered: they are row numbers, and the program takes the rows from data on the device.
    """

    most: int = 1
    gathered: bool = False


ONE = Kind()

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
            new, aux = step_once(config, self.state(state_leaves), batch)
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
        self.pure, self._config_tree = pure, config_tree
        self.spread = places if isinstance(places, Spread) else None
        self.places, self.where, self.where_rows = places, places.whole, places.rows
        self.where_state = places.each(jax.tree.leaves(arrays))
        self._runs: dict[Kind, Any] = {}
        self.measured: dict[Any, int] = {}  # see `_auto.py`
        self._shapes = jax.tree.map(_shape, (jax.tree.leaves(arrays), jax.tree.leaves(config), batch))

    @property
    def run(self) -> Any:
        """The jitted program for one batch as it is."""
        return self.runner(ONE)

    def runner(self, kind: Kind) -> Any:
        """The jitted program for a kind; its first two arguments are donated, and given back."""
        made = self._runs.get(kind)
        if made is None:
            made = self._runs[kind] = self._runner(kind)
        return made

    def _runner(self, kind: Kind) -> Any:
        # A dict and a mask are flattened faster than the Batch that holds them.
        def flat_step(
            changing: Any,
            accumulators: Any,
            kept: Any,
            config_leaves: Any,
            data: Any,
            mask: Any,
            table: Any = None,
            count: Any = None,
        ) -> tuple[Any, Any]:
            tell_traced(lambda: self._call(kind, changing, kept, config_leaves, data, mask, table))

            def one(carry: Any, data: Any, mask: Any) -> tuple[Any, Any]:
                changing, accumulators = carry
                if kind.gathered:  # row numbers are in range
                    data = jax.tree.map(lambda rows: rows.at[data].get(mode="promise_in_bounds"), table)
                new, aux = self.pure(self.joined(changing, kept), config_leaves, Batch(data, mask))
                merged = self._aux(unpack(self._layout, accumulators)).merge(self._aux(aux))
                return new, pack(self._layout, jax.tree.leaves(eqx.filter(merged, is_array)))

            if kind.most == 1:
                return one((changing, accumulators), data, mask)
            at = lambda stack, index: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)

            def turn(index: Any, carry: Any) -> Any:
                return one(carry, *jax.tree.map(lambda stack: at(stack, index), (data, mask)))

            return jax.lax.fori_loop(0, count, turn, (changing, accumulators))

        shapes = self._arguments(kind.most)
        options = self.places.options(shapes[0], shapes[2], several=kind.most > 1)
        run: Any = jax.jit(flat_step, donate_argnums=(0, 1), **options)
        return run if self.spread is None else SpreadStep(run, shapes, self.spread)

    def _arguments(self, most: int = 1) -> tuple[Any, ...]:
        """Shapes of what a program is called with, batches being fed as they are."""
        leaves, config_leaves, batch = self._shapes
        changing, kept = self.parted(leaves)
        rows = batch.data, batch.mask
        if most > 1:
            stack = lambda leaf: jax.ShapeDtypeStruct((most, *leaf.shape), leaf.dtype)
            rows = (*jax.tree.map(stack, rows), None, jax.ShapeDtypeStruct((), jnp.int32))
        return changing, jax.tree.map(_shape, self._fresh), kept, config_leaves, *rows

    def lowered(self) -> Any:
        """The program of one batch, lowered: what XLA's accounts of memory and operations are asked of."""
        return self.run.lower(*self._arguments())

    def _call(self, kind: Kind, changing: Any, kept: Any, config_leaves: Any, data: Any, mask: Any, table: Any) -> Call:
        """What has been traced, for the explanation of what will be traced after it."""
        rows = None if kind.gathered else (data, mask)
        config = jax.tree.unflatten(self._config_tree, config_leaves)
        state, device = self.state(self.joined(changing, kept)), "" if self.spread is not None else str(self.where)
        return Call(config, state, rows, table, kind.most, device, settings_of_jax())

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


def step_once(config: Any, state: TrainState, batch: Any) -> tuple[TrainState, Aux]:
    """The pure step, guarded: what a program compiles."""
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


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
