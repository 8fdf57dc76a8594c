"""The functional core: a train step from a loss function and an optimizer, no wiring and no nodes.

    init, step = ek.train.make_step(loss, optimizer=lambda hp: optax.adamw(hp.learning_rate))
    state = init(hp, model, key)
    state, aux = step(hp, state, batch)

`hp` is any config class of one's own; its floats are traced, so new values compile nothing, and the step vmaps and
differentiates with respect to them. The trainer's step is built of the same `value_and_gradients` and `update`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from equikd.config import resolve
from equikd.errors import ConfigError, message
from equikd.model import live_twin, with_state
from equikd.model._twin import check_arrays
from equikd.optim import as_optimizer
from equikd.train._init import strong_arrays, strong_model
from equikd.train._state import TrainState, split, strong


class Step(eqx.Module):
    """What a step of the functional core reports.

    Attributes:
        loss: the scalar loss before the update.
        aux: what the loss function returned beside it, or None.
    """

    loss: jax.Array
    aux: Any = None


def make_step(
    loss: Callable[..., Any], *, optimizer: Callable[[Any], optax.GradientTransformation]
) -> tuple[Callable[..., TrainState], Callable[..., tuple[TrainState, Step]]]:
    """`init` and `step` for a loss function.

    Args:
        loss: `loss(model, batch, hp, key) -> scalar` or `(scalar, aux)`; `model` is the whole model, `key` the step's
            own PRNG key.
        optimizer: `optimizer(hp)`, an optax optimizer, or what else
            `equikd.optim.as_optimizer` takes; called inside the trace, where the floats of `hp` are tracers.

    Returns:
        `init(hp, model, key) -> state` and `step(hp, state, batch) -> (state, aux)`; `aux.loss` is the loss before the
        update. Every inexact array of the model that is not held by a config is trained; its Python numbers are part
        of the program. Both are jitted, donate nothing, and go through `eqx.filter_jit`, `eqx.filter_vmap` and
        `eqx.filter_grad`; through `jax.jit`, `jax.vmap` and `lax.scan` too where all leaves of the model are arrays
        (an activation function is a leaf that is none: `eqx.partition` the state first).

    Raises:
        ConfigError: `optimizer` is built already.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp, optax
        >>> from equikd.config import config
        >>> @config
        ... class Hyper:
        ...     learning_rate: float = 0.1
        >>> def loss(model, batch, hp, key):
        ...     return jnp.mean(jax.vmap(model)(batch) ** 2)
        >>> init, step = make_step(loss, optimizer=lambda hp: optax.sgd(hp.learning_rate))
        >>> hp = Hyper()
        >>> state = init(hp, eqx.nn.Linear(2, 1, key=jax.random.key(0)), jax.random.key(1))
        >>> state, aux = step(hp, state, jnp.ones((4, 2)))
        >>> int(state.step), aux.loss.shape
        (1, ())
    """
    if isinstance(optimizer, optax.GradientTransformation) or not callable(optimizer):
        raise ConfigError(
            message(
                "make_step: the optimizer is built already, so it cannot follow hp",
                got=type(optimizer).__name__,
                expected="a function of hp that returns an optax optimizer",
                fix="optimizer=lambda hp: optax.adamw(hp.learning_rate)",
            )
        )

    def init(hp: Any, model: Any, key: jax.Array) -> TrainState:
        check_arrays(model)  # here, since inside jit one array given twice is two
        return jitted_init(hp, model, key)

    @eqx.filter_jit
    def jitted_init(hp: Any, model: Any, key: jax.Array) -> TrainState:
        return core_state(as_optimizer(optimizer(resolve(hp))), model, key)

    @eqx.filter_jit
    def step(hp: Any, state: TrainState, batch: Any) -> tuple[TrainState, Step]:
        hp = resolve(hp)
        key = jax.random.fold_in(state.key, state.step)

        def scalar_loss(params: Any, rest: Any) -> tuple[jax.Array, Any]:
            out = loss(eqx.combine(params, rest), batch, hp, key)
            return out if isinstance(out, tuple) else (out, None)

        params, rest = split(state.model, state.trainable)
        (value, aux), grads = value_and_gradients(scalar_loss, params, rest)
        new, _, _ = update(as_optimizer(optimizer(hp)), state, grads, params, rest, value=value)
        return new, Step(value, aux)

    return init, step


def core_state(optimizer: optax.GradientTransformation, model: Any, key: jax.Array) -> TrainState:
    """The first state for a live model, all of whose inexact arrays are trained."""
    model, model_state = with_state(lambda: model)
    verdict = live_twin(model, model_state)
    model = strong_model(model, verdict.hyperparameter)
    params, _ = split(model, verdict.trainable)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        model=model,
        opt_state=strong_arrays(optimizer.init(params)),
        model_state=strong_arrays(model_state),
        key=key,
        extra=None,
        trainable=verdict.trainable,
        hyperparameter=verdict.hyperparameter,
    )


def value_and_gradients(
    loss: Callable[[Any, Any], tuple[jax.Array, Any]],
    params: Any,
    rest: Any,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Any:
    """`((value, aux), gradients)` of a scalar loss of the parameters; aux may hold what is no array.

    `around` is put around the function of arrays that is differentiated, as `jax.checkpoint` is. The gradient of a
    complex parameter is the direction of steepest ascent, as optax expects: the conjugate of JAX's.
    """
    static: list[Any] = []

    def with_arrays(params: Any) -> tuple[jax.Array, Any]:
        value, aux = loss(params, rest)
        arrays, others = eqx.partition(aux, eqx.is_array)  # what is no array cannot leave a trace
        static.append(others)
        return value, arrays

    (value, arrays), grads = jax.value_and_grad(around(with_arrays), has_aux=True)(params)
    grads = jax.tree.map(lambda grad: jnp.conj(grad) if jnp.iscomplexobj(grad) else grad, grads)
    return (value, eqx.combine(arrays, static[-1])), grads


def update(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    grads: Any,
    params: Any,
    rest: Any,
    *,
    value: Any,
    model_state: Any = None,
    scale: Any = None,
) -> tuple[TrainState, Any, Any]:
    """The state after one optimizer update, the updates, and the optimizer's state.

    Args:
        optimizer: what `as_optimizer` has made.
        state: before the update.
        grads: of the loss, as `params`.
        params: the trainable leaves of the model.
        rest: its other leaves, which the new state takes as they are.
        value: the loss, for optimizers that look at it.
        model_state: the model's new `eqx.nn.State`; that of `state` by default.
        scale: what updates are multiplied by; None: nothing.
    """
    if jax.tree.leaves(params):
        scaled = {} if scale is None else {"update_scale": scale}
        updates, opt_state = optimizer.update(grads, state.opt_state, params, value=value, **scaled)
    else:  # nothing is trained, and optimizers with weight decay would ask for the parameters
        updates, opt_state = grads, state.opt_state
    model = eqx.combine(optax.apply_updates(params, updates), rest)
    new = TrainState(
        step=state.step + 1,
        model=strong(model, state.model),
        opt_state=strong(opt_state, state.opt_state),
        model_state=state.model_state if model_state is None else strong(model_state, state.model_state),
        key=state.key,
        extra=state.extra,
        trainable=state.trainable,
        hyperparameter=state.hyperparameter,
        guard=state.guard,
    )
    return new, updates, opt_state
