"""`ek.testing.check_loss(loss)`: that a loss and its gradient are those of the rows that count, and of no others.

    def test_my_loss():
        ek.testing.check_loss(MyLoss(preds="preds", targets="batch.y"))

The laws of `check_metric` hold for the state of a loss, which is trained and reported over batches and micro-batches.
More are about its gradient: it is finite, though padding holds nan; it is that of the rows that count alone, so it is
0 for the others; and it is the sum over *micro-batches* of the gradients of total / count, where the total is that of
the micro-batch, and the count that of all rows. A loss that couples the rows of a batch (`depends_on = "batch"`) is not
split.
"""

import dataclasses
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import message
from equikd.losses import Loss
from equikd.metrics import State
from equikd.testing._batches import Batch, Drawn
from equikd.testing._laws import Broken, Laws
from equikd.testing._parts import DrawError
from equikd.testing._running import LawOptions, all_options, instance_of, run
from equikd.tree import parse
from equikd.wiring import Context, key_paths


def check_loss(loss: Any, **options: Unpack[LawOptions]) -> None:
    """Check that a loss and its gradient are exact whatever the batches, the padding and the devices.

    That devices do not matter is checked where there are several; a CPU is eight if the environment variable
    `XLA_FLAGS=--xla_force_host_platform_device_count=8` is set before JAX starts.

    Args:
        loss: the loss, or its class, of which an instance is drawn. Arguments are drawn from the annotations of
            `values`, and masked by rows, as padding is. Gradients are those by arguments whose key path does not lead
            into `batch`, or by all where each does.
        **options: what is drawn and how much of it, `axes`, `where`, `given`, `values`, `shared`, `examples` and
            `rtol`; `ek.testing.LawOptions` describes each.

    Raises:
        AssertionError: a law is broken; the text has the law, the batch and both values.
        DrawError: annotations or options from which nothing can be drawn.
        TypeError: an unknown option.

    Example:
        >>> from equikd.losses import SquaredError
        >>> check_loss(SquaredError(preds="preds", targets="batch.y"), examples=2)
    """
    chosen = all_options("check_loss", options)
    rtol = chosen["rtol"]
    loss = instance_of(loss)
    if not isinstance(loss, Loss):
        raise DrawError(message("check_loss checks a loss", got=repr(loss), expected="ek.losses.Loss"))
    rewired = _Rewired(loss)

    def of(batch: Batch) -> State:
        return rewired.compiled("state", batch)

    def check(drawn: Drawn) -> None:
        rows = drawn.batch
        if rows.mask.ndim > 1:  # rows of padding; a mask of elements is the loss's own affair
            rows = dataclasses.replace(rows, mask=rows.mask.any(axis=tuple(range(1, rows.mask.ndim))))
        drawn = dataclasses.replace(drawn, batch=rows)

        def traced(arguments: dict[str, Any], mask: Any) -> State:
            return rewired(jax.tree.leaves(arguments), mask, rows.rowed, rows.tree)

        has_rows = any(rows.rowed)
        splits = has_rows and loss.depends_on != "batch"
        if has_rows and not drawn.stacked:
            _check_gradients(rewired, drawn, rtol)
        if splits and not drawn.stacked:
            _check_micro_batches(rewired, drawn, rtol)
        Laws(of, traced, has_rows, splits, rtol).check(drawn)

    run(check, loss.values, chosen)


class _Rewired:
    """A loss whose key paths lead to the arguments that are drawn: those with rows to `batch`, others to `extra`."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.paths = loss, [name for name in key_paths(loss) if name != "mask"]
        self.programs: dict[Any, Any] = {}
        from_batch = {name for name, path in key_paths(loss).items() if parse(path)[0] == "batch"}
        self.trained = set(self.paths) - from_batch or set(self.paths)

    def __call__(self, leaves: list[Any], mask: Any, rowed: list[bool], tree: Any) -> Any:
        arguments = tree.unflatten(leaves)
        rows = {name: any(jax.tree.leaves(part)) for name, part in tree.unflatten(rowed).items()}
        unknown = [name for name in arguments if name not in self.paths]
        if unknown:
            raise DrawError(message("arguments that no key path fills", got=", ".join(unknown)))
        paths = {name: f"{'batch' if rows[name] else 'extra'}.{name}" for name in arguments}
        own = {} if self.loss.mask is None else {"mask": "mask"}
        loss = dataclasses.replace(self.loss, **paths, **own)
        return loss.from_context(Context(batch=arguments, extra=arguments, mask=jnp.asarray(mask)))

    def compiled(self, what: Literal["state", "gradients"], batch: Batch) -> Any:
        """The state, or the gradients of the training loss by each array (None where there is none).

        Losses are compiled in training, and here a compilation costs less than the operations one by one.
        """
        arrays = [isinstance(leaf, np.ndarray) for leaf in batch.leaves]
        others = [leaf for leaf, one in zip(batch.leaves, arrays, strict=True) if not one]
        named = {
            name: jax.tree.map(lambda _, n=name: n in self.trained, part) for name, part in batch.arguments.items()
        }
        floats = [
            trained and one and jnp.issubdtype(leaf.dtype, jnp.inexact)
            for leaf, one, trained in zip(batch.leaves, arrays, jax.tree.leaves(named), strict=True)
        ]

        def state(by: list[Any], rest: list[Any], mask: Any) -> Any:
            by_, rest_, others_ = iter(by), iter(rest), iter(others)
            sources = [
                by_ if trained else rest_ if one else others_ for trained, one in zip(floats, arrays, strict=True)
            ]
            return self([next(source) for source in sources], mask, batch.rowed, batch.tree)

        def gradients(by: list[Any], rest: list[Any], mask: Any) -> Any:
            return jax.grad(lambda by: state(by, rest, mask).mean())(by)

        key = what, batch.tree, tuple(batch.rowed), tuple(arrays), tuple(floats), repr(others)
        program = self.programs.setdefault(key, jax.jit(state if what == "state" else gradients))
        by = [leaf for leaf, one in zip(batch.leaves, floats, strict=True) if one]
        rest = [leaf for leaf, one, trained in zip(batch.leaves, arrays, floats, strict=True) if one and not trained]
        result = program(by, rest, batch.mask)
        if what == "state":
            return result
        results = iter(result)
        return [np.asarray(next(results)) if one else None for one in floats]


def _check_gradients(rewired: _Rewired, drawn: Drawn, rtol: float) -> None:
    batch = drawn.batch.filled(drawn.junk)
    told = f"{batch!r}\nmasked rows hold {drawn.junk}"
    kept = batch.mask
    names = _names(batch)
    every = rewired.compiled("gradients", batch)
    alone = rewired.compiled("gradients", batch.take(kept)) if kept.any() else [None] * len(every)
    for name, rowed, gradient, subset in zip(names, batch.rowed, every, alone, strict=True):
        if gradient is None:
            continue
        if not np.all(np.isfinite(gradient)):
            raise Broken(message(f"the gradient by {name} is not finite", where=told, got=str(gradient.tolist())))
        if rowed and np.any(gradient[~kept]):
            what = f"the gradient by {name} is not 0 in rows that do not count"
            raise Broken(message(what, where=told, got=str(gradient[~kept].tolist())))
        if subset is None:
            continue
        part = gradient[kept] if rowed else gradient
        if not np.allclose(part, subset, rtol=rtol, atol=rtol / 10):
            what = f"the gradient by {name} is not that of the rows that count alone"
            raise Broken(message(what, where=told, got=f"{part.tolist()} and {subset.tolist()}"))


def _check_micro_batches(rewired: _Rewired, drawn: Drawn, rtol: float) -> None:
    """Ragged micro-batches, padded to the size of the whole, for which all programs are compiled already."""
    batch, junk = drawn.batch, drawn.junk
    cut = int(drawn.random.integers(1, batch.rows)) if batch.rows > 1 else 1
    parts = [(slice(0, cut), batch.take(slice(0, cut)).padded(batch.rows - cut, junk))]
    if cut < batch.rows:
        parts.append((slice(cut, None), batch.take(slice(cut, None)).padded(cut, junk)))
    parts.append((slice(0, 0), batch.nothing(junk)))
    count = lambda part: max(int(rewired.compiled("state", part).count), 1)
    whole, size = rewired.compiled("gradients", batch), count(batch)
    added = [None if gradient is None else np.zeros_like(gradient) for gradient in whole]
    for rows, part in parts:
        factor = count(part) / size  # what is trained is total / count of this part alone
        for total, gradient, rowed in zip(added, rewired.compiled("gradients", part), batch.rowed, strict=True):
            if total is not None:
                to = total[rows] if rowed else total
                to += (gradient[: len(to)] if rowed else gradient) * factor
    for name, total, gradient in zip(_names(batch), added, whole, strict=True):
        if total is not None and not np.allclose(total, gradient, rtol=rtol, atol=rtol / 10):
            what = f"the gradient by {name}, added over micro-batches, is not that of the whole batch"
            sizes = f"micro-batches of {cut} and {batch.rows - cut} rows, and one of padding that holds {junk}"
            got = f"{total.tolist()} and {gradient.tolist()}"
            raise Broken(message(what, where=f"{batch!r}\n{sizes}", got=got))


def _names(batch: Batch) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(batch.arguments)[0]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
