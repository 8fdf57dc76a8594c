"""A metric that is skipped wherever it stands is misspelt, and says nothing by itself."""

from collections.abc import Mapping
from typing import Any

from equikd.data import Batch
from equikd.errors import WiringError, listing, message, nearest, report
from equikd.metrics import Aux
from equikd.metrics._wrappers import Skipped
from equikd.tree import join
from equikd.wiring import Context, available


def refuse_skipped(trainer: Any, training: Aux, spec: Batch, evals: Mapping[str, tuple[Aux, Batch]]) -> None:
    """Refuse a `SkipIfMissing` whose path is missing in training and in all evals that have the metric.

    Args:
        trainer: the experiment.
        training: the empty accumulators of its step.
        spec: shapes of a training batch.
        evals: eval name -> its empty accumulators, and the shapes of its batches.

    Raises:
        WiringError: with the config path of each such metric, and near paths.
    """
    inheriting = [name for name in evals if trainer.evals[name].metrics is None]
    errors = []
    for name in _skipped(training):
        having = [one for one in inheriting if name in evals[one][0].metrics]
        if all(name in _skipped(evals[one][0]) for one in having):
            others = f" and in {listing(join(('evals', one)) for one in having)}" if having else ""
            errors.append(_message(("metrics", name), training.metrics[name], f"in training{others}", spec))
    for one in (one for one in evals if one not in inheriting):
        aux, batch = evals[one]
        errors += [
            _message(("evals", one, "metrics", name), aux.metrics[name], "there", batch) for name in _skipped(aux)
        ]
    if errors:
        raise WiringError(report(f"{len(errors)} metrics are skipped wherever they stand", errors))


def _skipped(aux: Aux) -> list[str]:
    return [name for name, state in aux.metrics.items() if isinstance(state, Skipped)]


def _message(at: tuple[str, ...], state: Any, where: str, spec: Batch) -> str:
    what, path = f"{join(at)}: the path that may be missing is missing {where}", state.missing
    near = nearest(path, available(Context(batch=spec.data)))
    return message(what, got=f"missing={path!r}", near=near, fix="correct it, or leave the metric out")
