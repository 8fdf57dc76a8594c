"""Making the first train state: the model, its optimizer's state and its PRNG key, at the fixed point of the step.

Init runs eagerly: under jit the parameter init of a deep model took 9.7 s to compile against 1.5 s eager, and saved
0.3 s on a tiny one. Dtypes are strong from the start, so nothing compiles a second time at step 2.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from equikd.config import resolve
from equikd.errors import ConfigError, message, report
from equikd.model import Twin, build, live_twin, twin, with_state
from equikd.optim import as_optimizer
from equikd.optim._masks import trained
from equikd.optim._select import collecting_problems
from equikd.sharding import settle, spread_of
from equikd.train._guard import guard_state
from equikd.train._state import TrainState, split, strong
from equikd.train._weights import Values
from equikd.tree import named_leaves


def initial_state(
    config: Any, seed: Any, model: Any = None, model_state: Any = None, weights: Values | None = None
) -> TrainState:
    """The train state before the first update.

    Args:
        config: `trainer.in_step`.
        seed: uint32; the model's key is the first of `jax.random.split(jax.random.key(seed))`, the run's the second.
        model: a live model to start from; it must have the structure of `config.model`, where there is one.
        model_state: the live model's `eqx.nn.State`, where the model no longer holds its initial one.
        weights: what the model starts from; the optimizer's state and `extra` are made of it.

    Returns:
        The state; arrays of a live model are shared with the caller until the stepper copies them.

    Raises:
        ConfigError: the live model has another structure, or there is no model at all.
    """
    model_key, run_key = jax.random.split(jax.random.key(jnp.asarray(seed, jnp.uint32)))
    model, model_state, verdict = _model(config, model_key, model, model_state)
    model, model_state = strong_model(model, verdict.hyperparameter), strong_arrays(model_state)
    problems: list[str] = []
    trainable = _trainable(config, verdict, problems)
    _check_precision(config, verdict, problems)
    if weights is not None:
        model, model_state = weights.fill(model, model_state)
    spread = spread_of(config)
    if spread is not None:  # first of all, so that what the optimizer makes of it need not fit one device
        model = settle(model, spread)
    params, _ = split(model, trainable)
    opt_state = _optimizer_state(config, params, problems)
    extra = resolve(config.init_extra, root=config, path="init_extra")
    extra = extra(model) if callable(extra) else extra
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        model=model,
        opt_state=strong_arrays(opt_state),
        model_state=model_state,
        key=run_key,
        extra=strong_arrays(extra),
        trainable=trainable,
        hyperparameter=verdict.hyperparameter,
        guard=guard_state(config),
    )
    return settle(state, spread)


def optimizer_of(config: Any) -> optax.GradientTransformationExtraArgs:
    """The optax transformation that the optimizer of a step's config means.

    Raises:
        ConfigError: it is no optimizer.
    """
    return as_optimizer(resolve(config.optimizer, root=config, path="optimizer"))


def _optimizer_state(config: Any, params: Any, problems: list[str]) -> Any:
    """The optimizer's first state.

    Raises:
        ConfigError: all `problems` so far, and patterns of the optimizer that match nothing; or it is no optimizer.
    """
    optimizer = optimizer_of(config)
    try:
        with collecting_problems("optimizer", problems):
            state = optimizer.init(params)
    except Exception:
        _refuse(problems)  # what it says may come of a pattern that is wrong
        raise
    _refuse(problems)
    _refuse_lookahead(state)
    return state


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(report(f"{len(problems)} patterns are wrong", problems))


def _refuse_lookahead(state: Any) -> None:
    """Refuse `optax.lookahead`, whose update would fail on parameters that are not its own pairs."""
    parts = named_leaves(state, is_leaf=lambda part: isinstance(part, optax.LookaheadState))
    if any(isinstance(part, optax.LookaheadState) for part in parts.values()):
        what = "optimizer: optax.lookahead wants parameters of a type of its own, optax.LookaheadParams"
        raise ConfigError(message(what, fix="ek.optim.Lookahead(optimizer, slow_rate=0.5, every=5) computes the same"))


def _model(config: Any, key: jax.Array, model: Any, model_state: Any) -> tuple[Any, Any, Twin]:
    if config.model is None and model is None:
        raise ConfigError(
            message("there is no model", fix="give Trainer(model=ek.lazy(MyModel)(...)), or init(model=my_model)")
        )
    if model is None:
        verdict = twin(config)
        built, state = build(config, key)
        return verdict.fit(built), verdict.fit_state(state), verdict
    if model_state is None:
        model, model_state = _live_state(model)
    if config.model is None:
        return model, model_state, live_twin(model, model_state)
    verdict = twin(config)
    model = verdict.fit(model, live=True)
    return _with_config(config, model, verdict.hyperparameter), verdict.fit_state(model_state), verdict


def _live_state(model: Any) -> tuple[Any, Any]:
    """A live model without its initial `eqx.nn.State`, and that state."""
    try:
        return with_state(lambda: model)
    except ValueError as error:
        if "make_with_state" not in str(error):  # what Equinox says where the initial state has been taken out
            raise
        raise ConfigError(
            message(
                "the live model no longer holds its initial eqx.nn.State",
                fix="give it too: init(model=model, model_state=state), and the same for train",
            )
        ) from None


def _with_config(config: Any, model: Any, hyperparameter: tuple[bool, ...]) -> Any:
    """A live model whose hyperparameters are those of the config; the program computes nothing else."""
    if not any(hyperparameter):
        return model
    leaves, structure = jax.tree.flatten(model)
    fresh = iter(_hyperparameters(config, hyperparameter))
    pairs = zip(leaves, hyperparameter, strict=True)
    return structure.unflatten([next(fresh) if hyper else leaf for leaf, hyper in pairs])


@eqx.filter_jit
def _hyperparameters(config: Any, hyperparameter: tuple[bool, ...]) -> list[Any]:
    leaves = jax.tree.leaves(build(config, jax.random.key(0))[0])
    return [leaf for leaf, hyper in zip(leaves, hyperparameter, strict=True) if hyper]


def strong_model(model: Any, hyperparameter: tuple[bool, ...]) -> Any:
    """A model whose arrays and hyperparameters are strong JAX arrays; its other Python numbers are part of the program.

    A pinned number stays a Python number: as an array it would be computed with in another way (x / q is x * (1 / q)
    where q is known), so results would differ in their last bits from those of a loop that has it as a constant.
    """
    leaves, structure = jax.tree.flatten(model)
    pairs = zip(leaves, hyperparameter, strict=True)
    leaves = [jnp.asarray(leaf) if hyper else leaf for leaf, hyper in pairs]
    return structure.unflatten([_strong_array(leaf) if is_any_array(leaf) else leaf for leaf in leaves])


def is_any_array(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX or numpy."""
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray)


def strong_arrays(tree: Any) -> Any:
    """A tree whose numbers and arrays are JAX arrays with a fixed dtype."""
    return jax.tree.map(_strong_array, tree)


def _strong_array(leaf: Any) -> Any:
    """Numbers and weakly typed arrays as strong arrays; what is no number stays."""
    if isinstance(leaf, np.ndarray | np.generic | float | int) and not isinstance(leaf, bool):
        leaf = jnp.asarray(leaf)
    return strong(leaf) if eqx.is_array(leaf) else leaf


def _trainable(config: Any, verdict: Twin, problems: list[str]) -> tuple[bool, ...]:
    """The twin's verdicts, narrowed by the trainer's patterns; those that match nothing are added to `problems`."""
    wanted = resolve(config.trainable, root=config, path="trainable")
    params, _ = split(verdict.model, verdict.trainable)
    with collecting_problems("trainable", problems):
        chosen = iter(trained(wanted, params))
    return tuple(may and next(chosen) for may in verdict.trainable)


def _check_precision(config: Any, verdict: Twin, problems: list[str]) -> None:
    """Add patterns of the precision that match nothing to `problems`."""
    precision = resolve(config.precision, root=config, path="precision")
    if precision is not None:
        with collecting_problems("precision", problems):
            precision.check(split(verdict.model, tuple(not yes for yes in verdict.hyperparameter))[0])
