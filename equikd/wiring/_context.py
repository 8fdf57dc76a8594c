"""The context: what one step has computed so far, and the axis names that its parts share."""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from equikd.errors import WiringError
from equikd.tree import Path
from equikd.typing import Scope, ShapeError, declared


class ByPath(abc.ABC):
    """A part of the context that is looked up by a whole path, and not key by key: intermediates."""

    @abc.abstractmethod
    def read(self, path: str, *, many: bool) -> tuple[Any, Path, str | None]:
        """What the beginning of a path names.

        Args:
            path: a key path, the name of this part included.
            many: whether it may be a pattern.

        Returns:
            `(value, rest, why)`: `rest` are the keys that lead into the value, `why` what to say where they lead
            nowhere (None: what there is). Of a pattern, arrays by path.

        Raises:
            WiringError: it names nothing.
        """

    def tree_items(self) -> dict[Any, Any]:
        """No parts: it is not walked key by key."""
        return {}

    @abc.abstractmethod
    def named(self) -> dict[str, Any]:
        """The arrays that it holds by key path."""


class _Unset:
    """A name of the context that has no value at this point of the step."""

    def __repr__(self) -> str:
        return "(not computed here)"


UNSET: Any = _Unset()


@dataclasses.dataclass(frozen=True)
class Context:
    """What one step has computed so far, by name; every name is `UNSET` until then.

    Attributes:
        step: int32 scalar, the number of updates made before this step.
        key: PRNG key of the step.
        batch: the data of the batch, without its mask.
        mask: bool `b`, which rows of the batch are real.
        model: the model of this step, hyperparameters of the config included.
        preds: what the model returned, batch axis first.
        interms: intermediates that were asked for, by path.
        losses: loss states by name.
        params: the trainable leaves of the model, before the update.
        grads: gradients, as `params`.
        updates: what the optimizer adds to `params`.
        opt_state: the optimizer's state after the update.
        extra: the state's own `extra`.
        config: the part of the trainer that the step uses.
        model_state: the model's `eqx.nn.State` after the forward pass; carried along, no name for key paths.
        grads_of_interms: gradients with respect to intermediates, read as `grads.interms`; carried along.
        totals: the weighted losses of the step; carried along, no name for key paths.
        collected: metric states that are there already, by name; carried along, no name for key paths.
    """

    step: Any = UNSET
    key: Any = UNSET
    batch: Any = UNSET
    mask: Any = UNSET
    model: Any = UNSET
    preds: Any = UNSET
    interms: Any = UNSET
    losses: Any = UNSET
    params: Any = UNSET
    grads: Any = UNSET
    updates: Any = UNSET
    opt_state: Any = UNSET
    extra: Any = UNSET
    config: Any = UNSET
    model_state: Any = None
    grads_of_interms: ByPath | None = None
    totals: Any = None
    collected: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def replace(self, **values: Any) -> "Context":
        """A context with more names filled."""
        return dataclasses.replace(self, **values)

    def tree_items(self) -> dict[str, Any]:
        """The names that are filled."""
        named = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in named.items() if value is not UNSET}


NAMES = tuple(f.name for f in dataclasses.fields(Context) if f.default is UNSET)


@contextlib.contextmanager
def shared_axes(context: Any, function: Any, *, rows: bool = True) -> Iterator[None]:
    """The scope of axis names of a step: `b`, the rows of its batch, and what a typed batch declares.

    The model's call, losses and metrics share these names, since key paths connect them; what they call in turn has
    names of its own, so that the layers of a net may reuse letters.

    Args:
        context: what the step has computed so far.
        function: what is called inside.
        rows: whether it sees the batch axis; a model that is mapped over it, and a penalty, do not.

    Raises:
        WiringError: the batch does not fit its own annotations.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.typing import Array, Float, dim, typechecked
        >>> @typechecked
        ... def loss(x: Float[Array, " d"]):
        ...     return dim("b")
        >>> with shared_axes(Context(batch={"x": jnp.ones((4, 2))}, mask=jnp.ones(4, bool)), loss):
        ...     loss(jnp.ones(2))
        4
    """
    batch, mask = getattr(context, "batch", UNSET), getattr(context, "mask", UNSET)
    try:
        sizes = {} if batch is UNSET else declared(batch, "batch")
    except ShapeError as error:
        raise WiringError(f"the batch does not fit its own annotations: {error}") from None
    binders = dict.fromkeys(sizes, "the annotations of the batch")
    if mask is not UNSET and mask is not None:
        sizes, binders = {**sizes, "b": mask.shape[0]}, {**binders, "b": "the rows of the batch"}
    if not rows:
        sizes.pop("b", None)
    with Scope(of=function, sizes=sizes) as scope:
        scope.binders |= {name: binders[name] for name in sizes}
        yield


_PLACE: ContextVar[str | None] = ContextVar("equikd_place", default=None)


@contextlib.contextmanager
def standing_at(path: str) -> Iterator[None]:
    """Inside, messages name an owner of key paths by its config path."""
    token = _PLACE.set(path)
    try:
        yield
    finally:
        _PLACE.reset(token)


def place_of(owner: Any) -> str:
    """The config path at which an owner of key paths stands, where it is known, else its class."""
    return _PLACE.get() or type(owner).__qualname__
