"""A step of one's own: the gradient of any scalar of the model, and what such a step may get wrong, told in words.

The pieces of the default step (`_step.py`) are there to be put together in another way. `gradients` is the one below
them: it takes the model apart, differentiates with respect to what is trained, and gives the context that
`apply_updates` and `collect` read. `called` is how the trainer calls a step: what it returns is looked at once a trace.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.errors import ConfigError, EquikdError, WiringError, listing, message, nearest, report
from equikd.metrics import Aux, BaseMetric, State
from equikd.model import with_hyperparameters
from equikd.model._call import name_of
from equikd.model._interms import Intermediates, adding, gradients_asked_for, has_field_interms
from equikd.train._core import value_and_gradients
from equikd.train._remat import rematerialised
from equikd.train._state import TrainState, split
from equikd.tree import join, named_leaves, parse
from equikd.wiring import UNSET, Context, standing_at

_COMPUTED = ("step", "key", "batch", "mask", "preds", "interms", "losses", "extra", "model_state", "totals")


def gradients(config: Any, state: TrainState, loss: Callable[[Any], tuple[Any, Context]]) -> Context:
    """The gradient of a scalar with respect to the trainable leaves of the model.

    Args:
        config: `trainer.in_step`.
        state: the train state.
        loss: a function of the model, hyperparameters of this step included, to `(scalar, context)`; the context is
            what `forward(config, state, batch, model=model)` and `losses_of` give.

    Returns:
        That context, with params and grads.

    Raises:
        WiringError: `loss` returns something else.

    Example:
        >>> import equinox as eqx, numpy as np, optax, equikd as ek
        >>> def decayed(config, state, batch):
        ...     def loss(model):
        ...         context = ek.train.forward(config, state, batch, model=model)
        ...         total, context = ek.train.losses_of(config, context)
        ...         return total + 0.1 * jnp.sum(model.weight**2), context
        ...     state, context = ek.train.apply_updates(config, state, ek.train.gradients(config, state, loss))
        ...     return state, ek.train.collect(config, context)
        >>> x = np.ones((64, 2), np.float32)
        >>> trainer = ek.Trainer(
        ...     model=ek.lazy(eqx.nn.Linear)(2, 2),
        ...     inputs={"x": "batch.x"},
        ...     losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.x")},
        ...     optimizer=ek.lazy(optax.sgd)(0.1),
        ...     step=decayed,
        ...     train_data=ek.data.InMemory({"x": x}, batch_size=16),
        ...     num_steps=3,
        ...     writers=(),
        ... )
        >>> int(trainer.train().state.step)
        3
    """

    def scalar(trained: tuple[Any, Any], rest: Any) -> tuple[jax.Array, dict[str, Any]]:
        params, zeros = trained
        with adding(zeros):
            value, context = _pair(loss(eqx.combine(params, rest)))
        return value, {name: getattr(context, name) for name in _COMPUTED}

    model = with_hyperparameters(config, state.model, state.hyperparameter)
    params, rest = split(model, state.trainable)
    (_, computed), grads, of_interms = with_intermediates(config, scalar, params, rest)
    return Context(model=model, params=params, grads=grads, grads_of_interms=of_interms, config=config, **computed)


def with_intermediates(
    config: Any, scalar: Callable[[Any, Any], tuple[jax.Array, dict[str, Any]]], params: Any, rest: Any
) -> tuple[tuple[jax.Array, dict[str, Any]], Any, Intermediates | None]:
    """Gradients of a scalar with respect to parameters, and to those intermediates whose gradient something reads.

    Args:
        config: `trainer.in_step`.
        scalar: of `(params, zeros)`, zeros being added to intermediates, and `rest`; gives what is computed besides,
            `interms` among it.
        params: the trainable leaves of the model.
        rest: its other leaves.

    Returns:
        `((value, computed), gradients of parameters, gradients of intermediates or None)`.
    """
    paths = () if has_field_interms(params) else gradients_asked_for(config)
    zeros = {}
    if paths:  # the shapes are those that a call of the model gives
        shapes = eqx.filter_eval_shape(lambda params: scalar((params, {}), rest)[1]["interms"], params)
        zeros = shapes.zeros(paths) if isinstance(shapes, Intermediates) else {}  # a loss of one's own may have none
    around = functools.partial(rematerialised, config)
    (value, computed), (grads, of_zeros) = value_and_gradients(scalar, (params, zeros), rest, around)
    of_interms = computed["interms"].gradients(of_zeros) if zeros else None
    return (value, computed), grads, of_interms


def _pair(out: Any) -> tuple[jax.Array, Context]:
    fits = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Context)
    if fits and eqx.is_array_like(out[0]) and jnp.issubdtype(jnp.result_type(out[0]), jnp.floating):
        if jnp.shape(out[0]) == ():
            return jnp.asarray(out[0]), out[1]
    fix = "total, context = ek.train.losses_of(config, context)\nreturn total + ..., context"
    expected = "(scalar, context): a real number, and a context such as `forward` gives"
    raise WiringError(
        message("gradients: the loss returns something else", got=_spelt(out), expected=expected, fix=fix)
    )


def chosen(config: Any, only: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the losses that are differentiated; None: all.

    Raises:
        WiringError: there is no loss of that name.
    """
    names = tuple(config.losses) if only is None else (only,) if isinstance(only, str) else tuple(only)
    errors = [
        message(f"only: there is no loss {name!r}", near=nearest(name, config.losses), expected=listing(config.losses))
        for name in names
        if name not in config.losses
    ]
    if errors:
        raise WiringError(report(f"{len(errors)} losses are not there", errors))
    return names


def state_of(owner: Any, context: Context, *at: str) -> Any:
    """The state of a loss or metric, which messages name by where it stands: a step of one's own is told by them."""
    with standing_at(join(at)):
        return owner.from_context(context)


def check_updatable(context: Context) -> None:
    """Refuse to update without parameters and gradients of one structure.

    Raises:
        WiringError: what is missing, or the paths in which the two differ.
    """
    missing = [name for name in ("model", "params", "grads") if getattr(context, name) is UNSET]
    if missing:
        fix = "context = ek.train.loss_and_gradients(config, state, batch), or ek.train.gradients(config, state, loss)"
        what = f"apply_updates: the context has no {' and no '.join(missing)}"
        raise WiringError(message(what, expected="model, params and grads", fix=fix))
    params, grads = named_leaves(context.params), named_leaves(context.grads)
    names = {path: join(("grads", *parse(path))) for path in grads}
    lines = [f"grads has no {path}" for path in params if path not in grads]
    lines += [f"{names[path]} is no parameter" for path in grads if path not in params]
    lines += [
        f"{names[path]} is {_spelt(grad)}, its parameter {_spelt(params[path])}"
        for path, grad in grads.items()
        if path in params and jnp.shape(grad) != jnp.shape(params[path])
    ]
    if lines:
        fix = "put parts into a whole: eqx.tree_at(lambda g: g.encoder, context.grads, new)\nzeros where nothing moves"
        what = "apply_updates: the gradients do not have the structure of the parameters"
        raise WiringError(message(what, got=listing(lines, 8).replace(", grads", "\ngrads"), fix=fix))


def called(step: Any, config: Any, state: TrainState, batch: Any) -> tuple[TrainState, Aux]:
    """What a step returns.

    Raises:
        ConfigError: it takes other arguments.
        EquikdError: it returns no state and losses, or a state whose step number has stayed.
    """
    _check_arguments(step)
    out = step(config, state, batch)
    fix = "return state, ek.train.collect(config, context)"
    if not isinstance(out, tuple) or len(out) != 2:
        raise EquikdError(message(f"{_named(step)} returns something else", got=_spelt(out), expected=_BOTH, fix=fix))
    new, aux = out
    if not isinstance(new, TrainState):
        fix = "state, context = ek.train.apply_updates(config, state, context), and return that state first"
        what = f"{_named(step)} returns no train state"
        raise EquikdError(message(what, got=_spelt(new), expected=_BOTH, fix=fix))
    states = {**aux.losses, **aux.metrics} if isinstance(aux, Aux) else {}
    wrong = {name: one for name, one in states.items() if not isinstance(one, State)}
    if not isinstance(aux, Aux) or wrong:
        what = f"{_named(step)} returns what is no {'losses and metrics' if not wrong else 'state of a metric'}"
        got = "\n".join(f"{name}: {_spelt(one)}" for name, one in wrong.items()) or _spelt(aux)
        fix += '\na number of its own: ek.train.Aux(metrics={"norm": ek.metrics.Average.of(norm[None])})'
        raise EquikdError(message(what, got=got, expected=_BOTH, fix=fix))
    if new.step is state.step:
        fix = "let ek.train.apply_updates make the new state, or set its step: state.step + 1"
        what = f"{_named(step)} returns the step number that it was given, so each step would be the same one"
        raise EquikdError(message(what, expected="state.step + 1", fix=fix))
    return dataclasses.replace(new, step=state.step + 1), aux  # also where it has updated twice


_BOTH = "(state, aux): an ek.train.TrainState and an ek.train.Aux"


def _named(step: Any) -> str:
    return f"step: {name_of(step)}"


def _check_arguments(step: Any) -> None:
    expected = "a function (config, state, batch) -> (state, aux)"
    if not callable(step):
        raise ConfigError(message("step: what it resolves to cannot be called", got=_spelt(step), expected=expected))
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a builtin, whose arguments are its own affair
        return
    try:
        signature.bind(None, None, None)
    except TypeError:
        fix = "to give it more: a node, step=ek.lazy(make_step)(rate=0.1), or a config class with __call__"
        what = f"{_named(step)} does not take what a step is given"
        raise ConfigError(message(what, got=str(signature), expected=expected, fix=fix)) from None


def _spelt(value: Any) -> str:
    """A value in few words."""
    if eqx.is_array_like(value):
        return f"{jnp.result_type(value)}{list(jnp.shape(value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_spelt, value))})"
    if isinstance(value, BaseMetric):
        return f"the metric {type(value).__qualname__}, not its state"
    return "None" if value is None else f"a {type(value).__qualname__}"
