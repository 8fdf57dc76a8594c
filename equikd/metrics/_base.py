"""Metrics: from the arrays of one step or eval batch to a state that merges.

    @ek.config.config
    class MyError(ek.metrics.Metric):
        preds: ek.KeyPath
        targets: ek.KeyPath

        class State(ek.metrics.State): ...

        def from_values(self, preds: Float[Array, " b"], targets: Float[Array, " b"], mask: Bool[Array, " b"]) -> State:
            ...

A metric is a config class. Its `KeyPath` fields name the arguments of `from_values` and where they come from; the
shapes in `from_values` are checked on each trace, without a decorator. `mask` says which rows count: the batch's own
mask by default, which marks the rows of padding; a mask of your own is narrowed by it, so padding counts nowhere.
"""

import abc
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np

from equikd.config import config
from equikd.errors import WiringError, message
from equikd.metrics._state import State
from equikd.typing import provenance, typechecked
from equikd.wiring import UNSET, Context, KeyPath, arguments_of, fill, key_paths, place_of, shared_axes


class BaseMetric(abc.ABC):
    """What a step or an eval asks of a metric; derive from `Metric`, or wrap one as `SkipIfMissing` does."""

    @property
    @abc.abstractmethod
    def takes_mask(self) -> bool:
        """Whether rows of padding are left out; a metric for which this is False does not fit padded data."""

    @property
    @abc.abstractmethod
    def inner(self) -> "Metric":
        """The metric itself, or what a wrapper is around in the end."""

    @abc.abstractmethod
    def reads(self) -> dict[str, str]:
        """The key paths: field, `preds` or `metric.preds`, -> path."""

    @abc.abstractmethod
    def connect(self, context: Context) -> dict[str, Any]:
        """The arguments of `from_values`, looked up in the context.

        Raises:
            WiringError: all key paths that lead nowhere, and arguments that no field fills.
        """

    @abc.abstractmethod
    def from_context(self, context: Context) -> State:
        """The state of what a step or eval has computed.

        Raises:
            WiringError: key paths lead nowhere, or the mask does not fit; names key paths and shapes.
            ShapeError: a shape does not fit the annotations of `from_values`.
        """


@config(kw_only=True)
class Metric(BaseMetric):
    """Base of all metrics of one's own.

    Example:
        >>> from equikd.metrics import Average
        >>> @config
        ... class Largest(Metric):
        ...     x: KeyPath
        ...     def from_values(self, x, mask) -> Average:
        ...         return Average.of(x.max(axis=-1), mask)
        >>> context = Context(batch=jnp.array([[1.0, 2.0], [9.0, 9.0]]), mask=jnp.array([True, False]))
        >>> Largest(x="batch").from_context(context).compute().item()
        2.0
    """

    couples_rows: ClassVar[bool] = False
    """Whether the state of a batch is another one than its parts' merged, as that of a norm in each step is. On the
    predictions of a step that accumulates gradients over micro-batches, such a metric is refused."""

    mask: KeyPath | None = "mask"
    """Which rows (or elements of rows) count, bool; None: all of them, which padded data refuses."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "from_values" in cls.__dict__:
            cls.from_values = checked(cls.__dict__["from_values"])

    @abc.abstractmethod
    def from_values(self, *args: Any, **kwargs: Any) -> State:
        """The state of these arrays; arguments are named as the `KeyPath` fields, with the batch axis first.

        An argument `mask` (bool, `b *m`) is filled from the field `mask`. Masked rows may hold nan: use `jnp.where`,
        as `Average.of(values, mask)` does, and never `x * mask`.
        """

    @property
    def takes_mask(self) -> bool:
        """Whether rows of padding are left out: there is a mask, and `from_values` takes it."""
        return self.mask is not None and "mask" in arguments_of(type(self).from_values)[0]

    @property
    def inner(self) -> "Metric":
        """The metric itself."""
        return self

    @final
    def reads(self) -> dict[str, str]:
        """The key paths by field."""
        return key_paths(self)

    @final
    def connect(self, context: Context) -> dict[str, Any]:
        """See `BaseMetric.connect`."""
        return connect(self, type(self).from_values, context, mask=self.takes_mask)

    @final
    def from_context(self, context: Context) -> State:
        """See `BaseMetric.from_context`."""
        return self.from_arguments(self.connect(context), context)

    @final
    def from_arguments(self, arguments: dict[str, Any], context: Context) -> State:
        """The state of arguments that are looked up already.

        Args:
            arguments: of `from_values`, as `connect` gives them; the mask still without the rows of padding.
            context: where they come from.

        Raises:
            WiringError: the mask does not fit, or `from_values` gives no state; names key paths and shapes.
            ShapeError: a shape does not fit the annotations of `from_values`.
        """
        with explained(self, type(self).from_values, arguments, context):
            if self.takes_mask:
                arguments = {**arguments, "mask": kept_and_real(arguments["mask"], context)[0]}
            elif "mask" in arguments_of(type(self).from_values)[0]:
                arguments = {**arguments, "mask": all_kept(arguments)}
            state = self.from_values(**arguments)
            if not isinstance(state, State):
                got = _spec(state) if is_numeric(state) else f"a {type(state).__qualname__}"
                fix = "return ek.metrics.Average.of(values, mask), or a State of your own"
                what = f"from_values of {type(self).__qualname__} gives no state"
                raise WiringError(message(what, got=got, expected="ek.metrics.State", fix=fix))
            return state


def checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose shapes are checked, and which takes numpy arrays for JAX arrays."""
    inner = typechecked(method)

    def to_jax(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) and is_numeric(leaf) else leaf

    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(to_jax, (args, kwargs))
        return inner(self, *args, **kwargs)

    return call


def connect(owner: Any, function: Callable[..., Any], context: Context, *, mask: bool) -> dict[str, Any]:
    """The arguments of a method, from the key paths of its owner.

    Args:
        owner: a config with `KeyPath` fields.
        function: its method, unbound.
        context: what the step has computed so far.
        mask: whether to look up the field `mask`, wanted by the method or not.
    """
    return fill(owner, _stand_in(function, mask), context)


def is_numeric(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers or bools (and not of PRNG keys, say)."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_)


@functools.lru_cache(maxsize=1024)
def _stand_in(function: Callable[..., Any], mask: bool) -> Callable[..., Any]:
    """Something with the arguments of `function`, and with or without `mask` among them.

    So that a wrong path of the mask is reported together with the others.
    """
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [
        p for name, p in inspect.signature(function).parameters.items() if name != "mask" and p.kind not in kinds
    ]
    if mask:
        parameters.append(inspect.Parameter("mask", inspect.Parameter.KEYWORD_ONLY))

    def stand_in() -> None: ...

    stand_in.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]  # read by inspect
    return stand_in


def kept_and_real(own: Any, context: Context) -> tuple[Any, Any]:
    """The mask that counts, bool `b *n`, and the batch's own, bool `b`.

    Args:
        own: what the field `mask` names; None for no mask of one's own.
        context: its mask says which rows are no padding; it may be unset, and all rows are real then.

    Returns:
        `own` without the rows of padding, and the mask of real rows; None where neither restricts anything.

    Raises:
        WiringError: `own` is not bool, or its first axis is not the batch.
    """
    rows = None if context.mask is UNSET else context.mask
    if own is None or own is rows:
        return rows, rows
    if getattr(own, "dtype", None) != jnp.bool_:
        raise WiringError(message("a mask is a bool array", got=_spec(own), fix="make it bool in the data: x > 0"))
    if rows is None:
        return own, None
    if own.shape[:1] != rows.shape:
        raise WiringError(
            message(
                "the mask does not have the batch axis first",
                got=f"mask {list(own.shape)}, batch of {rows.shape[0]} rows",
                expected=f"a mask of shape [{rows.shape[0]}] or [{rows.shape[0]}, ...]",
            )
        )
    return own & rows.reshape(rows.shape + (1,) * (own.ndim - 1)), rows


def all_kept(arguments: Any) -> jax.Array:
    """A mask of nothing but True for the first array among some arguments, along its first axis if it has one."""
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if is_numeric(leaf)]
    return jnp.ones(arrays[0].shape[:1] if arrays else (), bool)


@contextlib.contextmanager
def explained(owner: Any, function: Any, arguments: dict[str, Any], context: Context) -> Iterator[None]:
    """Shares the axes of the step, and adds to an error which key paths the arguments came from.

    Args:
        owner: a config with `KeyPath` fields.
        function: its method that is called inside.
        arguments: of the method.
        context: what the step has computed so far.
    """
    sources = {name: f"{place_of(owner)}.{name} = {path!r}" for name, path in key_paths(owner).items()}
    lines = [f"{source}: {_spec(arguments[name])}" for name, source in sources.items() if name in arguments]
    try:
        with shared_axes(context, function, rows=owner.mask is not None), provenance(sources, function):
            yield
    except WiringError as error:  # its text goes into reports, where a note would be lost
        headline, _, answers = str(error).partition("\n")
        raise WiringError(f"{message(headline, where=chr(10).join(lines))}\n{answers}".rstrip()) from error


def _spec(value: Any) -> str:
    if is_numeric(value):
        return f"{value.dtype}{list(value.shape)}"
    shapes = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(value) if is_numeric(leaf)]
    return f"{type(value).__name__} of {', '.join(shapes[:4])}{', ...' if len(shapes) > 4 else ''}"
