"""Norms of trees: how large the parameters, gradients or updates are, in all and leaf by leaf."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from equikd.config import config
from equikd.errors import WiringError, listing, message, nearest, report
from equikd.metrics._base import Metric
from equikd.metrics._elements import wide
from equikd.metrics._state import State, sum_field
from equikd.tree import matches, named_leaves, parse
from equikd.typing import Array, Bool, Float, Int, Num, PyTree
from equikd.wiring import KeyPath, place_of


class Norms(State):
    """Norms of the leaves of a tree, summed over steps.

    Attributes:
        total: of all leaves together, float32.
        leaves: by path, float32; empty where only the total is wanted.
        steps: how many steps these are, int32.

    Example:
        >>> state = Norms(jnp.float32(5), {"weight": jnp.float32(4)}, jnp.int32(1))
        >>> {name: norm.item() for name, norm in (state | state).compute().items()}
        {'total': 5.0, 'weight': 4.0}
    """

    total: Float[Array, ""] = sum_field()
    leaves: dict[str, Float[Array, ""]] = sum_field()
    steps: Int[Array, ""] = sum_field()

    def compute(self) -> Any:
        """The means over the steps: the total, or a dict of it and of the leaves; nan of no step."""
        steps = self.steps.astype(self.total.dtype)
        if not self.leaves:
            return self.total / steps
        results: OrderedDict[Any, Any] = OrderedDict(total=self.total / steps)
        for path, norm in self.leaves.items():
            *parents, name = parse(path)
            place = results
            for key in parents:
                place = place.setdefault(key, OrderedDict())
            place[name] = norm / steps
        return results


@config
class Norm(Metric):
    """The Euclidean norm of a tree, sqrt(sum of |x|^2 over its leaves), as `optax.tree.norm`; a mean over steps.

    With `per_leaf`, results are `total` and the norm of each leaf under its path, `layers[0].weight`. Steps without a
    row that counts are left out; of no step it is nan.

    Example:
        >>> grads = {"layers": [{"weight": jnp.array([3.0, 4.0]), "bias": jnp.array([12.0])}]}
        >>> norms = lambda **options: Norm(tree="grads", **options).from_values(grads, jnp.ones(1, bool)).compute()
        >>> norms().item()
        13.0
        >>> norms(leaves=("**.weight",), per_leaf=True)["layers"][0]["weight"].item()
        5.0
    """

    tree: KeyPath
    """Key path of any tree of arrays: `params`, `grads`, `updates`, `grads.encoder`, `batch.image`."""
    leaves: tuple[str, ...] = ()
    """Globs of the leaves' paths below `tree`, such as `**.weight` and `layers[*].bias`; none: all leaves."""
    per_leaf: bool = False
    """Whether each leaf gives a result of its own."""

    def from_values(self, tree: PyTree[Num[Array, "..."]], mask: Bool[Array, "..."]) -> Norms:
        """The norms in this step.

        Raises:
            WiringError: no leaf fits the glob, with near paths; or a leaf is named as the total is.
        """
        every = named_leaves(tree)
        idle = [glob for glob in self.leaves if not any(matches(glob, path) for path in every)]
        if idle:
            raise WiringError(report(f"{len(idle)} globs fit no leaf", [self._idle(glob, every) for glob in idle]))
        globs = self.leaves or ("**",)
        chosen = {path: leaf for path, leaf in every.items() if any(matches(glob, path) for glob in globs)}
        if self.per_leaf and any(path and parse(path)[0] == "total" for path in chosen):
            what = f"{self.tree!r} has a part named 'total', as the norm of all leaves is"
            raise WiringError(message(what, fix=f"tree={self.tree + '.total'!r}"))
        squares = {path: jnp.square(jnp.abs(wide(leaf))).sum() for path, leaf in chosen.items()}
        counts = mask.any()
        norm = lambda square: jnp.where(counts, jnp.sqrt(square), jnp.zeros_like(square)).astype(jnp.float32)
        by_path = {path: norm(square) for path, square in squares.items() if path and self.per_leaf}
        return Norms(norm(sum(squares.values(), jnp.zeros(()))), by_path, counts.astype(jnp.int32))

    def _idle(self, glob: str, paths: Iterable[str]) -> str:
        return message(
            f"{glob!r} fits no leaf of {self.tree!r}",
            where=f"{place_of(self)}.leaves",
            near=nearest(glob.replace("*", ""), paths),
            expected=f"a glob of {listing(paths)}",
        )
