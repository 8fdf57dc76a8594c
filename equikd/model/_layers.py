"""Statistics of what each layer of a model returns, in one forward pass.

The numbers are computed where a value is, by the `reduce` of its mark, so that a value need not be kept: per example,
and per iteration where the layer stands in a scan. They are merged on the host. What is masked, and what a branch that
is not taken does not compute, counts nothing; mean and standard deviation are those of the finite numbers.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.intermediates import Options
from equikd.intermediates._capture import run_tapped
from equikd.intermediates._mark import Name
from equikd.intermediates._paths import is_callable
from equikd.intermediates._tap import nodes
from equikd.tree import join, named_leaves, parse


class Moments(NamedTuple):
    """Of some numbers; with axes for examples and iterations in front.

    Attributes:
        count: float32, how many there are.
        finite: float32, how many are finite.
        mean: float32, of the finite ones.
        spread: float32, the sum of the squares of their distances to the mean.
        zeros: float32, how many are 0.
        nans: float32, how many are nan.
    """

    count: Any
    finite: Any
    mean: Any
    spread: Any
    zeros: Any
    nans: Any


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape and dtype of a value, no array itself."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one call of a layer has returned.

    Attributes:
        path: as in a key path after `interms.`; with the number of the call where there are several, and behind it the
            place in what it returned where that is no single array.
        shape: of one example, or of the batch where the model takes whole batches; axes for scans first.
        dtype: its name.
        parameters: numbers in the arrays of the layer and all below it, 0 for a function.
        mean: of the finite numbers; nan where there are none.
        std: likewise, the standard deviation of the population.
        zeros: the fraction of zeros, from 0 to 1.
        non_finite: the fraction of numbers that are nan or infinite, from 0 to 1.
        iterations: of the scans around it, outermost first.
        order: when it was called, rising with time: that of all that one scan computes, and its own within that.
        first_nan: the first iteration of the outermost scan with a nan; 0 without a scan, None without a nan.
        first_non_finite: likewise of nan and infinite numbers.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    parameters: int
    mean: float
    std: float
    zeros: float
    non_finite: float
    iterations: tuple[int, ...]
    order: tuple[int, int]
    first_nan: int | None
    first_non_finite: int | None


def moments(value: Any) -> dict[str, tuple[Spec, Moments]]:
    """Of each array of real numbers in a value, by its place there."""
    is_state = lambda part: isinstance(part, eqx.nn.State)
    value = jax.tree.map(lambda part: None if is_state(part) else part, value, is_leaf=is_state)
    leaves = {path: leaf for path, leaf in named_leaves(value).items() if eqx.is_array(leaf) and _is_real(leaf)}
    return {path: (Spec(leaf.shape, leaf.dtype.name), _moments(leaf)) for path, leaf in leaves.items()}


def _is_real(array: Any) -> bool:
    return any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)) and array.size > 0


def _moments(array: Any) -> Moments:
    values = jax.lax.stop_gradient(array).astype(jnp.float32)
    finite = jnp.isfinite(values)
    kept = finite.sum(dtype=jnp.float32)
    mean = jnp.where(finite, values, 0).sum() / jnp.maximum(kept, 1)
    spread = jnp.where(finite, (values - mean) ** 2, 0).sum()
    count = kept + (~finite).sum(dtype=jnp.float32)  # not the size: under vmap it gets the axes that the others have
    zeros, nans = ((flags).sum(dtype=jnp.float32) for flags in (values == 0, jnp.isnan(values)))
    return Moments(count, kept, mean, spread, zeros, nans)


class AllLayers:
    """Asks a call of a model for what every layer returns; used in place of `Asked`.

    Attributes:
        added: nothing is added to any value.
    """

    def __init__(self, model: Any, reduce: Callable[[Any], Any] | None) -> None:
        """Ask.

        Args:
            model: which is called.
            reduce: what is kept of each value; None: all.
        """
        self.added: dict[Name, list[Any]] = {}
        self.names = [Name(at, reduce=reduce) for at, node in nodes(model) if at and is_callable(node)]

    def run(self, function: Callable[..., Any], model: Any, arguments: Any, added: Any) -> tuple[Any, Any]:
        """What the function returns, and for each name its calls: scans around it, order and what is kept."""
        del added
        options = Options(while_loops="last", absent="zeros")
        got = run_tapped(function, model, (arguments,), {}, names=self.names, options=options)
        calls = {
            name: [(call.loops, (call.order, call.at), call.value) for call in of_name if call.refused is None]
            for name, of_name in got.calls.items()
        }
        return got.out, calls

    def made(self, calls: Any) -> Any:
        """The calls as they are."""
        return calls


def layers_of(model: Any, calls: dict[Name, list[Any]], mask: Any, *, per_example: bool) -> list[Layer]:
    """The layers in the order of the model.

    Args:
        model: which was called.
        calls: what `AllLayers` has given, on the host.
        mask: bool `b`, which rows count.
        per_example: whether the moments have a batch axis.
    """
    rows = np.asarray(mask) if per_example else None
    return [
        layer
        for at, node in nodes(model)
        for layer in _of_name(Name(at, reduce=moments), calls.get(Name(at, reduce=moments), []), node, rows)
    ]


def _of_name(name: Name, calls: list[Any], node: Any, rows: np.ndarray | None) -> Iterable[Layer]:
    arrays = jax.tree.leaves(eqx.filter(node, eqx.is_inexact_array))
    parameters = sum(leaf.size for leaf in arrays)
    for number, (loops, order, values) in enumerate(calls):
        for place, (spec, found) in values.items():
            path = path_of(name, number, len(calls), loops, place)
            yield _layer(path, spec, Moments(*found), loops, rows, parameters, order)


def path_of(name: Name, number: int, calls: int, loops: int, place: str) -> str:
    """The path of a part of what one call of a layer returns, as a key path has it after `interms.`.

    Args:
        name: of the layer.
        number: of the call.
        calls: how many there are.
        loops: scans around it.
        place: of the part, in what is returned.
    """
    keys = parse(place)
    begins_with_index = bool(keys) and isinstance(keys[0], int)
    # The first index of an item would be taken for the number of the call, or for the iteration of a scan.
    call = (number,) if calls > 1 or (begins_with_index and not loops) else ()
    return join((*name.at, *call, *keys))


def _layer(
    path: str, spec: Spec, found: Moments, loops: int, rows: np.ndarray | None, parameters: int, order: tuple[int, int]
) -> Layer:
    found = Moments(*(np.asarray(one, np.float64) for one in found))
    found = found if rows is None else Moments(*(one[rows] for one in found))
    first = 0 if rows is None else 1
    iterations = found.count.shape[first : first + loops]
    total, kept, zeros = (float(one.sum()) for one in (found.count, found.finite, found.zeros))
    mean = float((found.finite * found.mean).sum()) / kept if kept else np.nan
    squares = float((found.spread + found.finite * (found.mean - mean) ** 2).sum()) if kept else np.nan
    bad = found.count - found.finite

    def first_of(numbers: Any) -> int | None:
        others = tuple(axis for axis in range(numbers.ndim) if axis != first)
        by_iteration = numbers.sum(axis=others) if loops else numbers.sum()[None]
        return int(np.argmax(by_iteration > 0)) if numbers.any() else None

    return Layer(
        path=path,
        shape=(*found.count.shape[first:], *spec.shape),
        dtype=spec.dtype,
        parameters=parameters,
        mean=mean,
        std=float(np.sqrt(squares / kept)) if kept else np.nan,
        zeros=zeros / total if total else np.nan,
        non_finite=float(bad.sum()) / total if total else np.nan,
        iterations=iterations,
        order=order,
        first_nan=first_of(found.nans),
        first_non_finite=first_of(bad),
    )


def first_non_finite(layers: list[Layer]) -> dict[str, str]:
    """The paths of the first call with an infinite number and of the first with a nan, by "inf" and "nan".

    Infinite numbers may be meant, as in a mask for attention, or be where it began: a reader can tell. Of a layer in a
    scan it is the path of the iteration, `blocks.attention[3]`. One call with both is told as "nan"; empty: all numbers
    are finite.
    """
    found: dict[str, tuple[Layer, int]] = {}
    for kind in ("inf", "nan"):
        firsts = [(layer, layer.first_nan if kind == "nan" else layer.first_non_finite) for layer in layers]
        bad = [(layer.order[0], at, layer.order[1], layer) for layer, at in firsts if at is not None]
        if bad:
            _, at, _, layer = min(bad, key=lambda one: one[:3])
            found[kind] = layer, at
    if "nan" in found and found["inf"] == found["nan"]:
        del found["inf"]
    paths = {kind: (layer.path, at, layer.iterations) for kind, (layer, at) in found.items()}
    return {kind: f"{path}[{at}]" if iterations else path for kind, (path, at, iterations) in paths.items()}
