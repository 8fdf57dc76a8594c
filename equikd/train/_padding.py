"""Padded rows count nowhere; so a metric that cannot leave them out is refused as soon as there are any."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from equikd.config import resolve
from equikd.data import Batch, InMemory, Pipeline, batch_size
from equikd.errors import WiringError, listing, message
from equikd.sharding import filled_rows
from equikd.wiring import reads_rows


def without_mask(config: Any) -> list[str]:
    """Names of the metrics of a step's config that read rows and take no mask."""
    metrics = resolve(config.metrics, root=config, path="metrics")
    return [name for name, metric in metrics.items() if not metric.takes_mask and reads_rows(metric.reads().values())]


def refuse_padding(config: Any, where: str, data: Pipeline, *, training: bool, num_batches: int | None = None) -> None:
    """Refuse metrics without a mask on arrays whose last batch will be padded.

    Args:
        config: a step's config, with the metrics in question.
        where: config path of the metrics' owner, with a dot after it, or empty.
        data: its pipeline; of other pipelines than `InMemory` only their batches show whether they pad.
        training: whether the data is read for training, which drops a ragged end by default.
        num_batches: how many batches are read; None: all.

    Raises:
        WiringError: naming the metrics, the rows and the batch size; in an eval, also where several devices do not
            divide that.
    """
    if config.mesh is not None and not training:
        rows = batch_size(data.spec())
        names = without_mask(config) if filled_rows(config, rows) != rows else []
        if names:
            filled = filled_rows(config, rows)
            raise _error(names, where, f"batches of {rows} rows, filled up to {filled} for the devices")
    if not isinstance(data, InMemory) or (training and data.drop_remainder):
        return
    if data.rows % data.batch_size and (num_batches is None or num_batches > data.rows // data.batch_size):
        names = without_mask(config)
        if names:
            raise _error(names, where, f"{data.rows} rows in batches of {data.batch_size}")


def unpadded(batches: Iterator[Batch], config: Any, where: str) -> Iterator[Batch]:
    """The batches themselves, which must hold no padding where a metric takes no mask."""
    names = without_mask(config)
    return _checked(batches, names, where) if names else batches


def _checked(batches: Iterator[Batch], names: list[str], where: str) -> Iterator[Batch]:
    for number, batch in enumerate(batches):
        mask = np.asarray(batch.mask)
        if not mask.all():
            raise _error(names, where, f"batch {number} has {int(mask.sum())} real rows of {len(mask)}")
        yield batch


def _error(names: list[str], where: str, got: str) -> WiringError:
    metrics = listing([f"{where}metrics.{name}" for name in names])
    return WiringError(
        message(
            f"{metrics}: takes no mask, so rows of padding would count",
            got=got,
            expected="from_values(..., mask), or data without padding",
            fix="add the argument `mask` to from_values, or choose a batch_size that divides the rows",
        )
    )
