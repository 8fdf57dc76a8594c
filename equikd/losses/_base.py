"""Losses: values for each row, a mask that says which of them count, and a weight that is a traced float or a schedule.

    @ek.config.config
    class Sparsity(ek.losses.Loss):
        x: ek.KeyPath

        def values(self, x: Float[Array, " b *n"]) -> Float[Array, " b"]:
            return jnp.abs(x).mean(axis=tuple(range(1, x.ndim)))

A loss gives a *state*, sum and count, which merges over micro-batches and batches like a metric's; what is trained is
weight x `state.mean()`, the mean over the rows that count, and 0 where none does.

Masked rows may hold nan or inf. A `where` on the values alone keeps those out of the loss but not out of its gradient
(the chain rule multiplies the 0 by the nan), so the arguments of `values` are made harmless first: `replace_masked`
puts an ordinary number where the mask is False. How far that may go is what a loss declares as `depends_on`.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Literal, final

import jax
import jax.numpy as jnp

from equikd.config import config, resolve
from equikd.config._values import is_node
from equikd.errors import ConfigError, message
from equikd.metrics import State, TwoFloat, sum_field
from equikd.metrics._average import masked_sum
from equikd.metrics._base import all_kept, checked, connect, explained, is_numeric, kept_and_real
from equikd.metrics._sums import count_dtype
from equikd.optim import Schedule
from equikd.tree import parse
from equikd.typing import Array, Bool, Inexact, Int
from equikd.wiring import Context, KeyPath, arguments_of, key_paths, lookup

_WITH_BATCH_AXIS = ("batch", "preds", "interms")


class LossState(State):
    """The mean of a loss over the rows that count, as sum and count.

    The sums of batches are added with their rounding errors, as in `Average`: the loss of a long run does not drift.

    Attributes:
        exact: sum of the unweighted values, float32 (float64 for 64-bit values) and its error; a plain array will do.
        count: what the sum is divided by, int32 (int64 under x64).

    Example:
        >>> (LossState(jnp.float32(3.0), jnp.int32(2)) | LossState(jnp.float32(0.0), jnp.int32(0))).compute().item()
        1.5
    """

    exact: TwoFloat = sum_field(exact=True)
    count: Int[Array, ""] = sum_field()

    @property
    def total(self) -> Inexact[Array, ""]:
        """The sum as a plain number."""
        return self.exact.value

    def mean(self) -> Inexact[Array, ""]:
        """The training loss, total / count to the bit, and 0 where nothing counts, finite like its gradient."""
        return self.total / jnp.maximum(self.count, 1).astype(self.total.dtype)

    def compute(self) -> Inexact[Array, ""]:
        """The reported loss, total / count; nan of nothing."""
        return self.total / self.count.astype(self.total.dtype)


@config(kw_only=True)
class Loss(abc.ABC):
    """Base of all losses.

    Example:
        >>> @config
        ... class Absolute(Loss):
        ...     x: KeyPath
        ...     def values(self, x):
        ...         return jnp.abs(x)
        >>> context = Context(preds=jnp.array([-1.0, jnp.nan]), mask=jnp.array([True, False]))
        >>> Absolute(x="preds", weight=0.5).from_context(context).mean().item()
        1.0
    """

    depends_on: ClassVar[Literal["element", "row", "batch"]] = "row"
    """What one value is a function of. `"row"`: the arguments' row of the same number, so that rows which do not count
    are replaced. `"element"`: even its own element alone, as in a cross entropy of each token, so that single masked
    elements are replaced too. `"batch"`: several rows, as in a contrastive loss; only padding is replaced."""

    weight: float | Schedule | Callable[[Any], Any] = 1.0
    """Factor in the total loss: a traced float, a schedule, or a node that makes a function of the step."""
    mask: KeyPath | None = "mask"
    """Which rows (or elements of rows) count, bool, batch axis first; None: every row that is no padding."""
    normalize_by: Literal["mask", "values"] = "mask"
    """What the sum is divided by: the number of values that the mask keeps, or that of all values in real rows."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.depends_on not in ("element", "row", "batch"):
            what = f"{cls.__qualname__}.depends_on: unknown"
            raise ConfigError(message(what, got=repr(cls.depends_on), expected="'element', 'row' or 'batch'"))
        if "values" in cls.__dict__:
            cls.values = checked(cls.__dict__["values"])

    @abc.abstractmethod
    def values(self, *args: Any, **kwargs: Any) -> Any:
        """The unweighted values, `b *n`, the batch axis first; arguments are named as the `KeyPath` fields.

        Axes that the mask does not have are averaged over. An argument `mask` gets the mask itself. A penalty without a
        batch axis sets `mask=None` and returns a scalar.
        """

    @final
    def reads(self) -> dict[str, str]:
        """The key paths by field."""
        return key_paths(self)

    @final
    def connect(self, context: Context) -> dict[str, Any]:
        """The arguments of `values` and the mask, looked up in the context.

        Raises:
            WiringError: all key paths that lead nowhere, and arguments that no field fills.
        """
        return connect(self, type(self).values, context, mask=self.mask is not None)

    @final
    def from_context(self, context: Context) -> LossState:
        """Sum and count of the unweighted values.

        Raises:
            WiringError: key paths lead nowhere, or the mask does not fit the values; names key paths and shapes.
            ShapeError: a shape does not fit the annotations of `values`.
        """
        arguments = self.connect(context)
        with explained(self, type(self).values, arguments, context):
            mask, real = kept_and_real(arguments.pop("mask", None), context)
            arguments = self._harmless(arguments, mask, real)
            if "mask" in arguments_of(type(self).values)[0]:
                arguments["mask"] = all_kept(arguments) if mask is None else mask
            values = jnp.asarray(self.values(**arguments))
            if mask is None or (self.mask is None and values.ndim == 0):
                mask = jnp.ones(values.shape[:1], bool)
            total, count = masked_sum(values, mask)
            if self.normalize_by == "values":
                count = masked_sum(values, _everything(mask, real))[1]
            return LossState(TwoFloat.of(total), count)

    @final
    def normaliser(self, context: Context) -> Int[Array, ""]:
        """What the sum of the values is divided by, known before any prediction: it needs masks only.

        Args:
            context: holds `mask`, bool `b`, and what the loss's own mask names.

        Returns:
            The `count` of `from_context`, for values with the batch axis first, and of its dtype.

        Raises:
            WiringError: the key path of the mask leads nowhere, or the mask does not have the batch axis first.

        Example:
            >>> from equikd.losses import SquaredError
            >>> loss = SquaredError(preds="preds", targets="batch.y", mask="batch.known")
            >>> known = jnp.array([True, False, True])
            >>> loss.normaliser(Context(batch={"known": known}, mask=jnp.array([True, True, False]))).item()
            1
        """
        own = None if self.mask is None else lookup(context, self.mask)
        with explained(self, type(self).values, {"mask": own}, context):
            mask, real = kept_and_real(own, context)
        return (_everything(mask, real) if self.normalize_by == "values" else mask).sum(dtype=count_dtype())

    @final
    def weight_at(self, step: Any) -> Any:
        """The weight at a step, a float scalar.

        Args:
            step: number of updates made before, int scalar; a schedule is read at it.
        """
        weight = resolve(self.weight) if is_node(self.weight) else self.weight
        return weight(step) if callable(weight) else weight

    def _harmless(self, arguments: dict[str, Any], mask: Any, real: Any) -> dict[str, Any]:
        """The arguments with ordinary numbers in all that the values which count do not depend on."""
        keep = real if self.depends_on == "batch" else mask
        if keep is None:
            return arguments
        paths = key_paths(self)
        elements = self.depends_on == "element"
        return {
            name: replace_masked(value, keep, elements=elements)
            if name in paths and parse(paths[name])[0] in _WITH_BATCH_AXIS
            else value
            for name, value in arguments.items()
        }


def _everything(mask: Any, real: Any) -> jax.Array:
    """A mask of the same shape that keeps all of each real row."""
    if real is None or mask.ndim == 0:
        return jnp.ones_like(mask)
    return jnp.broadcast_to(real.reshape(real.shape + (1,) * (mask.ndim - 1)), mask.shape)


def replace_masked(tree: Any, mask: Bool[Array, " b *m"], *, elements: bool = False) -> Any:
    """Arrays whose masked rows hold an ordinary number.

    It is 0.5 in floats, which log, sqrt, 1/x and log(1 - x) bear, and 0 in ints and bools.
    What is kept is kept to the bit. No gradient flows into what is replaced, not even a nan.

    Args:
        tree: pytree; its numeric arrays that have the batch axis first are treated, all else stays.
        mask: which rows to keep; a row of which any element is kept stays whole.
        elements: arrays whose first axes are those of the mask are replaced element by element.

    Example:
        >>> replace_masked({"x": jnp.array([1.0, jnp.nan])}, jnp.array([True, False]))["x"].tolist()
        [1.0, 0.5]
    """
    rows = mask.any(axis=tuple(range(1, mask.ndim)))

    def replace(leaf: Any) -> Any:
        if not is_numeric(leaf) or leaf.shape[:1] != rows.shape:
            return leaf
        keep = mask if elements and leaf.shape[: mask.ndim] == mask.shape else rows
        leaf = jnp.asarray(leaf)  # numpy's int64 becomes int32 first
        ordinary = 0.5 if jnp.issubdtype(leaf.dtype, jnp.inexact) else 0
        keep = keep.reshape(keep.shape + (1,) * (leaf.ndim - keep.ndim))
        return jnp.where(keep, leaf, jnp.asarray(ordinary, leaf.dtype))

    return jax.tree.map(replace, tree)


def widened(*arrays: Any) -> tuple[Any, ...]:
    """Arrays in their common float dtype, float32 at least: a log-softmax or a square in bf16 loses the small terms."""
    with jax.numpy_dtype_promotion("standard"):  # the caller may have made mixing an error
        dtype = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    return tuple(array.astype(dtype) for array in arrays)
