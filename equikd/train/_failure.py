"""The other half of the guard: what has failed on the device is told on the host.

The guard's leaf of the train state (`_guard.py`) is read with the results of an interval, or with a state that is read
as a whole anyway, before it is saved or handed out. Parameters can turn bad although losses and gradients are finite: a
rate of inf, a norm of zero. The next step would show it; here it is found before the state leaves the loop.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import NonFiniteError, listing, message
from equikd.train._guard import Counts, RollBack, SkipNonFinite, guard_of, places
from equikd.train._state import TrainState
from equikd.tree import join, named_leaves, parse


def refuse_failed(config: Any, counts: Counts | None, state: Callable[[], TrainState]) -> None:
    """Raise where training has failed.

    Args:
        config: `trainer.in_step`.
        counts: what the guard knows, on the host; None: there is no guard.
        state: gives the train state.

    Raises:
        NonFiniteError: with step and path.
    """
    if counts is None or not counts.failed:
        return
    frozen = state()
    bad = bad_parameters(frozen)
    if bad:  # what the last update that was made has done
        step = counts.failed - counts.consecutive
        what = f"step {step}: the update has made parameters that are not finite"
        raise _error(config, what, step, bad[0], frozen, bad)
    path, guard = places(config, frozen)[counts.first], guard_of(config)
    what = f"step {counts.failed}: {path} is not finite"
    if isinstance(guard, SkipNonFinite):
        what += f", and so were the {guard.max_consecutive} steps before it"
    raise _error(config, what, counts.failed, path, frozen)


def refuse_bad(config: Any, state: TrainState) -> None:
    """Raise where training has failed, or a parameter of a state is not finite.

    Args:
        config: `trainer.in_step`.
        state: the train state, which is read.

    Raises:
        NonFiniteError: with step and path.
    """
    if state.guard is None:
        return
    counts = Counts.on_host(state.guard.counts)
    refuse_failed(config, counts, lambda: state)
    bad = bad_parameters(state)
    if bad:
        step = int(state.step) - counts.consecutive
        what = f"step {step}: parameters are not finite, after an update whose losses and gradients are"
        raise _error(config, what, step, bad[0], state, bad)


def check_finite(trainer: Any, state: TrainState) -> None:
    """Raise where the guard has stopped training, or a parameter is not finite: for loops of one's own.

    At a bad step `ek.train.step` changes no parameter, and none from then on; it says nothing, since that would read
    the device.

    Args:
        trainer: a `Trainer`, or its `in_step`.
        state: a train state of it, which is read.

    Raises:
        NonFiniteError: with step and path.

    Example:
        >>> import equinox as eqx, numpy as np, optax, equikd as ek
        >>> x = np.full((16, 2), np.nan, np.float32)
        >>> trainer = ek.Trainer(
        ...     model=ek.lazy(eqx.nn.Linear)(2, 2),
        ...     inputs={"x": "batch.x"},
        ...     losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        ...     optimizer=ek.lazy(optax.sgd)(0.1),
        ...     train_data=ek.data.InMemory({"x": x}, batch_size=16),
        ...     num_steps=3,
        ... )
        >>> state, aux = ek.train.step(trainer, trainer.init(), {"x": x})
        >>> ek.train.check_finite(trainer, state)
        Traceback (most recent call last):
        equikd.errors.NonFiniteError: step 1: losses.mse is not finite
          ...
    """
    refuse_bad(getattr(trainer, "in_step", trainer), state)


@jax.jit
def _finite(leaves: list[Any]) -> Any:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])


def bad_parameters(state: TrainState) -> list[str]:
    """Paths of parameters, and of values of the model's `eqx.nn.State`, that are not finite.

    The optimizer's state is not looked at: some optimizers begin with inf there.
    """
    parts = {"params": state.params(), "model_state": eqx.filter(state.model_state, eqx.is_inexact_array)}
    named = {name: named_leaves(part) for name, part in parts.items()}
    leaves = {join((name, *parse(path))): leaf for name, part in named.items() for path, leaf in part.items()}
    flags = np.asarray(_finite(list(leaves.values()))) if leaves else ()
    return [path for path, finite in zip(leaves, flags, strict=True) if not finite]


def refuse_bad_start(config: Any, state: TrainState) -> None:
    """Raise where training would start from parameters that are not finite.

    Raises:
        NonFiniteError: of step 0.
    """
    bad = bad_parameters(state) if state.guard is not None else []
    if bad:
        what = "the parameters that training starts from are not finite"
        fix = "a constant of the model is no parameter: trainable=ek.optim.freeze(...)\nguard=None trains on"
        text = message(what, got=f"nan or inf in {listing(bad, 6)}", fix=fix)
        raise NonFiniteError(text, step=0, path=bad[0], state=state)


def _error(
    config: Any, what: str, step: int, path: str, state: TrainState, bad: list[str] | None = None
) -> NonFiniteError:
    """The error; `bad` are parameters that an update has broken, which cannot be taken back."""
    ways = ["look for nan in the data, labels out of range, logarithms and roots of 0, and too large a learning rate"]
    if not isinstance(guard_of(config), SkipNonFinite | RollBack):
        ways += ["guard=ek.train.SkipNonFinite() leaves such steps out"] if bad is None else []
        ways += ["guard=ek.train.RollBack() goes back to the last checkpoint, with smaller updates"]
    ways += ["guard=None trains on"]
    got = "nan or inf" if bad is None else f"nan or inf in {listing(bad, 6)}"
    state = dataclasses.replace(state, opt_state=None)
    return NonFiniteError(message(what, got=got, fix="\n".join(ways)), step=step, path=path, state=state)
