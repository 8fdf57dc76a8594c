"""The guard: a step whose losses or gradients are not finite changes nothing.

It is the half that is traced. `apply_updates` looks at the losses and gradients, which costs one pass over these, and
notes in the guard's leaf of the train state what was not finite first. When the step is done, `guarded` takes each new
leaf of the state only where nothing was noted (but for the optimizer's, see there). The leaf also says at which step
training has failed; from then on no step changes anything. The loop reads the leaf with the results of an interval, so
it costs no read of its own: see `_failure.py`.

    guard=ek.train.StopOnNonFinite()                # the default
    guard=ek.train.SkipNonFinite(max_consecutive=10)
    guard=ek.train.RollBack(factor=0.5, max_returns=3)

A step of one's own is guarded likewise where it calls `apply_updates`, `extra` included; of one that does not, the
losses that it reports are looked at, after the update.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from equikd.config import config, resolve
from equikd.train._state import TrainState
from equikd.tree import join, named_leaves, parse
from equikd.wiring import Context


@config
class StopOnNonFinite:
    """Training stops at the first step whose losses or gradients are not finite.

    The `NonFiniteError` holds the state before that step, without the optimizer's.
    """


@config
class SkipNonFinite:
    """A step whose losses or gradients are not finite is left out, in results too; the next batch comes as usual.

    As `optax.apply_if_finite`, but that bad numbers are never applied, and that the state of batch normalisation and
    `extra` stay too. Schedules of the optimizer do not advance. The training result `skipped_steps` counts these steps,
    from the start of the run on.
    """

    max_consecutive: int = 10
    """How many may be skipped in a row; one more ends the run. A good step in between sets the count to zero."""

    def validate(self) -> None:
        """Refuse less than one."""
        if self.max_consecutive < 1:
            raise ValueError(f"max_consecutive must be at least 1, got {self.max_consecutive}")


@config
class RollBack:
    """Training goes back to the last checkpoint, and on from there with smaller updates.

    What the optimizer gives is multiplied, which is a smaller learning rate for each optimizer that scales by one;
    averages and `Lookahead` see the smaller updates. The factor is part of the state, so a resume keeps it. Where
    training fails again without having got further, it goes back one checkpoint more; without a checkpoint it starts
    again from the first state. Rows of what is left are dropped, as at a resume, and the result's history begins anew.
    """

    factor: float = 0.5
    """What updates are multiplied by at each return, in (0, 1). The order of the batches stays the same."""
    max_returns: int = 3
    """How many returns there may be in one call of `train`; one more failure ends it."""

    def validate(self) -> None:
        """Refuse a factor that makes nothing smaller, and less than one return."""
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must lie between 0 and 1, got {self.factor}")
        if self.max_returns < 1:
            raise ValueError(f"max_returns must be at least 1, got {self.max_returns}")


class Counts(NamedTuple):
    """What the guard knows: scalars in a trace, ints on the host.

    Attributes:
        failed: the number of the step at which training has failed, the first one being 1; 0: none.
        first: what was not finite there first, an index of `places`.
        consecutive: bad steps in a row, those before the one that failed included.
        skipped: steps that were skipped in all.
        bad: within a step, 1 + the index of what is not finite; 0: nothing.
    """

    failed: Any
    first: Any
    consecutive: Any
    skipped: Any
    bad: Any

    @classmethod
    def on_host(cls, leaf: Any) -> "Counts":
        """Those that a leaf holds, read from the device."""
        return cls(*np.asarray(leaf).tolist())


class GuardState(eqx.Module):
    """The guard's part of the train state.

    Attributes:
        counts: int32 `5`, see `Counts`: one leaf, since a step pays for each.
        scale: float32 scalar that updates are multiplied by, or None.
    """

    counts: Int[Array, "5"]
    scale: Float[Array, ""] | None


def guard_of(config: Any) -> Any:
    """The guard of a step's config."""
    return resolve(config.guard, root=config, path="guard")


def guard_state(config: Any) -> GuardState | None:
    """The guard's part of the first train state."""
    guard = guard_of(config)
    if guard is None:
        return None
    return GuardState(jnp.zeros(5, jnp.int32), jnp.ones((), jnp.float32) if isinstance(guard, RollBack) else None)


def guard_again(config: Any, saved: dict[str, Any] | None) -> GuardState | None:
    """The guard's part of a state that was saved, maybe under another guard: what the two have in common goes on.

    Args:
        config: `trainer.in_step`.
        saved: name -> array, of a `GuardState`; None: there was no guard.
    """
    first = guard_state(config)
    if first is None or saved is None:
        return first
    scale = None if first.scale is None else saved.get("scale", first.scale)
    return GuardState(saved.get("counts", first.counts), scale)


def places(config: Any, state: TrainState) -> list[str]:
    """What an index means: the losses, the gradients, and losses that a step of one's own reports besides."""
    grads = [join(("grads", *parse(path))) for path in named_leaves(state.params())]
    return [*(join(("losses", name)) for name in config.losses), *grads, "losses"]


def checked(config: Any, state: TrainState, new: TrainState, context: Context) -> TrainState:
    """The new state, with a note where losses or gradients are not finite.

    Args:
        config: `trainer.in_step`.
        state: before the update.
        new: after it.
        context: with `grads`, and `totals` where there are losses.
    """
    if state.guard is None:
        return new
    bad = _bad(config, state, context.totals, jax.tree.leaves(context.grads))
    return dataclasses.replace(new, guard=_noted(state.guard, bad))


def _noted(guard: GuardState, bad: Any) -> GuardState:
    before = Counts(*guard.counts)
    bad = jnp.where(before.bad == 0, bad, before.bad)  # a step may update twice
    return GuardState(jnp.stack(before._replace(bad=bad)).astype(jnp.int32), guard.scale)


def guarded(config: Any, state: TrainState, new: TrainState, totals: Any) -> TrainState:
    """The new state where it is good and no step has failed before; else what stays.

    Only `SkipNonFinite` goes on from what stays, so only there does the optimizer's state stay too. To choose between
    its leaves makes a step of the tiny model on CPU 1.7 times as long: XLA then computes moments and parameters apart,
    from copies. Elsewhere nobody goes on from that state, and the error leaves it out.

    Args:
        config: `trainer.in_step`.
        state: before the step.
        new: after it, with what `checked` has noted.
        totals: the losses that it reports, for a step that has not called `checked`; or None.
    """
    if state.guard is None or jax.tree.structure(new) != jax.tree.structure(state):  # which is refused elsewhere
        return new
    guard, after, whole = guard_of(config), new.guard, True
    if after.counts is state.guard.counts:
        after = _noted(after, _bad(config, state, totals, []))
    else:
        whole = isinstance(guard, SkipNonFinite)
    counts = Counts(*after.counts)
    alive, finite = counts.failed == 0, counts.bad == 0
    consecutive = jnp.where(alive, jnp.where(finite, 0, counts.consecutive + 1), counts.consecutive)
    fails = alive & (consecutive > (guard.max_consecutive if isinstance(guard, SkipNonFinite) else 0))
    counts = Counts(
        failed=jnp.where(fails, state.step + 1, counts.failed),
        first=jnp.where(fails, counts.bad - 1, counts.first),
        consecutive=consecutive,
        skipped=counts.skipped + (alive & ~finite & ~fails),
        bad=jnp.zeros_like(counts.bad),
    )

    def take(one: Any, other: Any) -> Any:
        if one is other or not eqx.is_array(one) or jnp.shape(one) != jnp.shape(other):
            return one
        return jnp.where(alive & finite, one, other)

    opt_state = jax.tree.map(take, new.opt_state, state.opt_state) if whole else new.opt_state
    kept = jax.tree.map(take, dataclasses.replace(new, guard=state.guard, opt_state=state.opt_state), state)
    step = jnp.where(alive & ~fails, new.step, state.step)
    leaf = jnp.stack(counts).astype(jnp.int32)
    return dataclasses.replace(kept, step=step, opt_state=opt_state, guard=GuardState(leaf, after.scale))


def _bad(config: Any, state: TrainState, totals: Any, grads: list[Any]) -> Any:
    """1 + the first of `places` that is not finite, or 0; where there are no gradients, these are taken for good."""
    terms = {} if totals is None else dict(totals.weighted({}))
    of_losses = [[terms.pop(name)] if name in terms else [] for name in config.losses]
    of_grads = [[leaf] for leaf in grads] or [[] for _ in jax.tree.leaves(state.params())]
    return _first_bad([*of_losses, *of_grads, list(terms.values())])


def _first_bad(groups: list[list[Any]]) -> Any:
    """1 + the index of the first group of arrays that holds a number which is not finite, or 0.

    The arrays are shortened, and all that is left of them looked at together: on CPU each operation costs a microsecond
    or two, which for the gradients of a small model is more than what it computes.
    """
    arrays = [(at, _shortened(jnp.asarray(array))) for at, group in enumerate(groups, 1) for array in group]
    if not arrays:
        return jnp.zeros((), jnp.int32)
    none = len(groups) + 1
    places = np.concatenate([np.full(array.size, at, np.int32) for at, array in arrays])
    with jax.numpy_dtype_promotion("standard"):
        together = jnp.concatenate([array.ravel() for _, array in arrays])
    first = jnp.where(jnp.isfinite(together), none, places).min(initial=none)
    return jnp.where(first == none, 0, first).astype(jnp.int32)


_FEW = 256  # numbers that are not worth an operation of their own
_SMALL = 1e-30  # so small that no sum of finite numbers times it overflows, and not 0, lest XLA leave it all out


def _shortened(array: Any) -> Any:
    """A few numbers, which are finite if all of an array are: sums of it with small weights.

    As products with a vector, since XLA on CPU computes these many numbers at a time, and a sum one by one; but not of
    numbers of 16 bits, which it would convert first.
    """
    narrow = array.dtype.itemsize < 4
    while array.ndim > 1 or array.size > _FEW:  # axis by axis: to flatten a matrix may move it between devices
        axis = 0 if array.shape[0] > array.shape[-1] else array.ndim - 1
        if narrow or array.size <= _FEW:
            array = (array * 0).sum(axis)
        else:
            weights = jnp.full(array.shape[axis], _SMALL, array.dtype)
            array = jnp.tensordot(array, weights, (axis, 0), precision=jax.lax.Precision.HIGHEST)
    return array.astype(jnp.float32) if narrow else array


def without_skipped(config: Any, state: TrainState, aux: Any) -> Any:
    """What a step reports; of one that `SkipNonFinite` leaves out, nothing.

    Args:
        config: `trainer.in_step`.
        state: after the step.
        aux: its losses and metrics.
    """
    if state.guard is None or not isinstance(guard_of(config), SkipNonFinite):
        return aux
    good = Counts(*state.guard.counts).consecutive == 0
    return jax.tree.map(lambda one, empty: jnp.where(good, one, empty) if eqx.is_array(one) else one, aux, aux.empty())
