"""Norms of trees: how large the parameters, gradients or updates are, in all and leaf by leaf."""

from typing import Any

import jax.numpy as jnp

from equikd.config import config
from equikd.errors import WiringError, message
from equikd.metrics._base import Metric
from equikd.metrics._elements import wide
from equikd.metrics._state import State, sum_field
from equikd.metrics._sums import TwoFloat, count_dtype
from equikd.tree import nested, parse
from equikd.typing import Array, Bool, Int, Num, PyTree
from equikd.wiring import KeyPaths, leaves_at


class Norms(State):
    """Norms of the leaves of a tree, summed over steps.

    Attributes:
        total: of all leaves together, float32 and its error.
        leaves: by path, as `total`; empty where only the total is wanted.
        steps: how many steps these are, int32 (int64 under x64).

    Example:
        >>> state = Norms(jnp.float32(5), {"weight": jnp.float32(4)}, jnp.int32(1))
        >>> {name: norm.item() for name, norm in (state | state).compute().items()}
        {'total': 5.0, 'weight': 4.0}
    """

    total: TwoFloat = sum_field(exact=True)
    leaves: dict[str, TwoFloat] = sum_field(exact=True)
    steps: Int[Array, ""] = sum_field()

    def compute(self) -> Any:
        """The means over the steps: the total, or a dict of it and of the leaves; nan of no step."""
        norms = {"total": self.total, **self.leaves}
        means = {path: norm.value / self.steps.astype(norm.high.dtype) for path, norm in norms.items()}
        return nested(means) if self.leaves else means["total"]


@config
class Norm(Metric):
    """The Euclidean norm of a tree, sqrt(sum of |x|^2 over its leaves), as `optax.tree.norm`; a mean over steps.

    With `per_leaf`, results are `total` and the norm of each leaf under its path, `layers[0].weight`. Steps without a
    row that counts are left out; of no step it is nan.

    Example:
        >>> from equikd.wiring import Context
        >>> grads = {"layers": [{"weight": jnp.array([3.0, 4.0]), "bias": jnp.array([12.0])}]}
        >>> context = Context(grads=grads, mask=jnp.ones(1, bool))
        >>> Norm("grads").from_context(context).compute().item()
        13.0
        >>> Norm("grads.**.weight", per_leaf=True).from_context(context).compute()["layers"][0]["weight"].item()
        5.0
    """

    couples_rows = True

    tree: KeyPaths
    """Key path of any tree of arrays, such as `params`, `grads.encoder` and `batch.image`, or a pattern of the leaves:
    `grads.**.weight`, `params.layers[*].bias`."""
    per_leaf: bool = False
    """Whether each leaf gives a result of its own."""

    def from_values(self, tree: PyTree[Num[Array, "..."]], mask: Bool[Array, "..."]) -> Norms:
        """The norms in this step.

        Raises:
            WiringError: a leaf is named as the total is.
        """
        leaves = leaves_at(self.tree, tree)
        if self.per_leaf and any(path and parse(path)[0] == "total" for path in leaves):
            what = f"{self.tree!r} has a part named 'total', as the norm of all leaves is"
            raise WiringError(message(what, fix=f"tree={self.tree + '.total'!r}"))
        squares = {path: jnp.square(jnp.abs(wide(leaf))).sum() for path, leaf in leaves.items()}
        counts = mask.any()
        norm = lambda square: jnp.where(counts, jnp.sqrt(square), jnp.zeros_like(square)).astype(jnp.float32)
        by_path = {path: TwoFloat.of(norm(square)) for path, square in squares.items() if path and self.per_leaf}
        total = TwoFloat.of(norm(sum(squares.values(), jnp.zeros(()))))
        return Norms(total, by_path, counts.astype(count_dtype()))
