"""The train state: everything that changes while training, and which of the model's leaves do."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray


class TrainState(eqx.Module):
    """Everything that changes while training.

    Attributes:
        step: int32 scalar, the number of updates made.
        model: the model; its hyperparameters are those of the last step.
        opt_state: the optimizer's state, over the trainable leaves.
        model_state: the model's `eqx.nn.State`, or None.
        key: PRNG key of the run; a step uses `fold_in(key, step)`.
        extra: any pytree, for steps of one's own (`Trainer(init_extra=...)`).
        guard: what the trainer's guard knows, or None where there is none.
        trainable: per leaf of `model`, whether it is a parameter.
        hyperparameter: per leaf of `model`, whether each step takes it from the config.
    """

    step: Int[Array, ""]
    model: Any
    opt_state: Any
    model_state: Any
    key: PRNGKeyArray
    extra: Any
    trainable: tuple[bool, ...] = eqx.field(static=True)
    hyperparameter: tuple[bool, ...] = eqx.field(static=True)
    guard: Any = None

    def params(self) -> Any:
        """The trainable leaves of the model, None elsewhere."""
        return split(self.model, self.trainable)[0]


def split(model: Any, trainable: tuple[bool, ...]) -> tuple[Any, Any]:
    """A model's parameters and the rest, by a verdict per leaf; `eqx.combine` joins them."""
    mask = jax.tree.unflatten(jax.tree.structure(model), trainable)
    return eqx.partition(model, mask)


def strong(tree: Any, like: Any = None) -> Any:
    """Arrays with a fixed dtype (that of `like`, where given), so that the next step finds what the last one found."""

    def fix(new: Any, old: Any) -> Any:
        if not isinstance(new, jax.Array | float | int) or isinstance(new, bool) or not eqx.is_array(old):
            return new
        if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            return new
        return jax.lax.convert_element_type(new, old.dtype)

    return jax.tree.map(fix, tree, tree if like is None else like)
