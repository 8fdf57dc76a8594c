"""What may be split over micro-batches: that of which each row has a value of its own, and the whole is a sum of parts.

A loss or metric says by its class and its key paths what it reads. One that reads rows (`batch`, `mask`, `preds`) is
computed for each micro-batch; what couples rows there, or needs what only the whole batch has, would come out as
another number. All of it is refused at once, with its config path.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.config import resolve
from equikd.errors import WiringError, listing, message, report
from equikd.losses import Loss
from equikd.metrics import Metric
from equikd.metrics._base import is_numeric
from equikd.model._interms import GRADIENTS, is_below
from equikd.tree import is_glob, join, parse, walk
from equikd.wiring import UNSET, Context, arguments_of, lookup, root_of, shared_axes

_PREDICTIONS = ("preds", "interms")
_ROWS = ("batch", "mask", *_PREDICTIONS)
_WHOLE = ("losses", "grads", "updates", "opt_state", "key")


def _roots(owner: Any, *, mask: bool = True) -> set[str]:
    """The names of the context that an owner reads; with or without its mask."""
    paths = [path for name, path in owner.reads().items() if mask or name != "mask"]
    return {"interms" if is_below(path, GRADIENTS) else root_of(path) for path in paths}


def reads_rows(loss: Loss) -> bool:
    """Whether a loss has values for rows; a penalty on parameters has none, and counts once."""
    return not _roots(loss, mask=False).isdisjoint(_ROWS)


def reads_predictions(owner: Any) -> bool:
    """Whether a loss or metric reads what is there for one micro-batch at a time."""
    return not _roots(owner).isdisjoint(_PREDICTIONS)


def refuse(config: Any, context: Context, *, rows: int) -> None:
    """Refuse what accumulation would change.

    Args:
        config: `trainer.in_step`.
        context: of the whole batch or of a micro-batch, with or without predictions.
        rows: of the whole batch.

    Raises:
        WiringError: losses, metrics or the number of micro-batches; all at once.
    """
    found = refusals(config, context, rows=rows)
    if found:
        raise WiringError(report(f"accumulate={config.accumulate} would change {len(found)} results", found))


def refusals(config: Any, context: Context, *, rows: int) -> list[str]:
    """The messages of `refuse`."""
    if config.accumulate == 1:
        return []
    if config.accumulate > rows:
        got = f"accumulate={config.accumulate}, batches of {rows} rows"
        return [message("accumulate: there are more micro-batches than rows", got=got, expected=f"at most {rows}")]
    found: list[str] = []
    for part, reasons in (("losses", _of_loss), ("metrics", _of_metric)):
        for name, owner in resolve(getattr(config, part), root=config, path=part).items():
            where = join((part, name))
            found += list(reasons(owner, where, config.accumulate, rows)) or _of_values(
                owner, where, config.accumulate, context, rows
            )
    return found


def _of_loss(loss: Loss, where: str, count: int, rows: int) -> Iterator[str]:
    del rows
    kind, got = type(loss).__qualname__, f"accumulate={count}"
    if not reads_rows(loss):
        return
    if loss.depends_on == "batch":
        what = f"{where}: {kind} couples the rows of a batch, of which a micro-batch sees a part"
        yield message(what, got=got, expected="accumulate=1, or a loss of single rows", fix="a smaller batch_size")
    if loss.mask is not None and root_of(loss.mask) in (*_PREDICTIONS, "losses"):
        what = f"{where}.mask = {loss.mask!r}: what the loss is divided by would depend on predictions"
        expected = "a mask from the batch, which is known before anything is predicted"
        yield message(what, got=got, expected=expected, fix="return 0 from `values` where nothing is to count")
    if "key" in _roots(loss):
        what = f"{where}: {kind} draws from `key`, the same for each micro-batch"
        yield message(what, got=got, expected="accumulate=1", fix="draw in the model, which gets a key for each row")


def _of_metric(metric: Any, where: str, count: int, rows: int) -> Iterator[str]:
    kind, got = type(metric).__qualname__, f"accumulate={count}"
    if not reads_predictions(metric):
        return
    whole = sorted(_roots(metric).intersection(_WHOLE))
    if whole:
        what = f"{where}: reads predictions, of one micro-batch at a time, and {listing(whole)}, of the whole batch"
        yield message(what, got=got, expected="accumulate=1, or a metric of one of them")
    if any(part.couples_rows for _, part in walk(metric) if isinstance(part, Metric)):
        what = f"{where}: {kind} of predictions couples the rows of a batch, of which a micro-batch sees a part"
        yield message(what, got=got, expected="accumulate=1, or what is no prediction: grads, params, batch")
    if rows % count and not metric.takes_mask:
        what = f"{where}: {kind} takes no mask, so rows that fill up micro-batches would count"
        yield message(what, got=f"{got}, batches of {rows} rows", expected=f"a divisor of {rows}, or a mask")


def _of_values(owner: Any, where: str, count: int, context: Context, rows: int) -> Iterator[str]:
    """What only shapes tell, as far as the context knows them; key paths that lead nowhere are told elsewhere."""
    paths = {name: path for name, path in owner.reads().items() if root_of(path) in _ROWS or is_below(path, GRADIENTS)}
    split = reads_rows(owner) if isinstance(owner, Loss) else reads_predictions(owner)
    if not split or (context.preds is UNSET and reads_predictions(owner)):
        return
    mixed = [name for name, path in paths.items() if not _keeps_rows(context, path, rows)]
    for name in mixed:
        what = f"{where}.{name} = {paths[name]!r}: its first axis is not the rows of the batch, in their order"
        expected = "accumulate=1, or a path that leaves the batch axis as it is, such as preds[:, 0]"
        yield message(what, got=f"accumulate={count}", expected=expected)
    if isinstance(owner, Loss) and owner.mask is None and not mixed and _is_scalar(owner, context):
        what = f"{where}: {type(owner).__qualname__} makes one number of all rows, of which a micro-batch sees a part"
        yield message(what, got=f"accumulate={count}", expected="accumulate=1, or a value for each row")


def _keeps_rows(context: Context, path: str, rows: int) -> bool:
    """Whether row i of what a key path names is row i of the batch."""
    keys, value = parse(path), context
    if is_below(path, ("interms",)) or is_below(path, GRADIENTS):
        try:
            value = lookup(context, path, many=True)
        except WiringError:
            return True
        return all(leaf.shape[:1] == context.mask.shape for leaf in jax.tree.leaves(value) if is_numeric(leaf))
    if is_glob(path):
        try:
            found = lookup(context, path, many=True).values()
        except WiringError:
            return True
        return all(leaf.shape[:1] == context.mask.shape for leaf in found)
    for depth in range(1, len(keys) + 1):
        try:
            value = lookup(context, join(keys[:depth]))
        except WiringError:
            return True
        if not is_numeric(value):
            continue
        if value.ndim == 0 or value.shape[0] != context.mask.shape[0]:
            return False
        # Each element of a stand-in is the number of its row; a view, which takes no memory.
        numbers = np.arange(rows).reshape(rows, *(1,) * (value.ndim - 1))
        stand_in = np.broadcast_to(numbers, (rows, *(max(size, 1) for size in value.shape[1:])))
        for key in keys[depth:]:
            stand_in = stand_in[key]
        first = (slice(None), *(0,) * (stand_in.ndim - 1))
        return stand_in.ndim > 0 and np.array_equal(stand_in[first], np.arange(rows))
    return all(leaf.shape[:1] == context.mask.shape for leaf in jax.tree.leaves(value) if is_numeric(leaf))


def _is_scalar(loss: Loss, context: Context) -> bool:
    try:
        arguments = loss.connect(context)
        if "mask" in arguments_of(type(loss).values)[0]:
            arguments["mask"] = context.mask
        with shared_axes(context, type(loss).values, rows=False):
            return jnp.ndim(jax.eval_shape(lambda: loss.values(**arguments))) == 0
    except Exception:  # whatever it is, the loss itself will say so
        return False
