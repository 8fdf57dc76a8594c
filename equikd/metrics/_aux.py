"""What a step or an eval reports: loss states and metric states by name, merged over batches, read as named results."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from equikd.metrics._state import State, empty_state, max_field, sum_field
from equikd.tree import named_leaves


class StepTotals(State):
    """Weighted losses summed over steps; the total of an interval is the mean of its steps' totals."""

    terms: dict[str, Float[Array, ""]] = sum_field()
    steps: Int[Array, ""] = sum_field()

    def weighted(self, means: dict[str, Any]) -> dict[str, Any]:
        """Weighted mean of each loss over the steps."""
        del means
        return {name: term / self.steps for name, term in self.terms.items()}

    def compute(self) -> Any:
        """The total."""
        return sum(self.weighted({}).values())


class EvalWeights(State):
    """The losses' weights at the step of an eval; the total is the sum of weight x mean over all rows."""

    weights: dict[str, Float[Array, ""]] = max_field()

    def weighted(self, means: dict[str, Any]) -> dict[str, Any]:
        """Weight x mean of each loss."""
        return {name: weight * means[name] for name, weight in self.weights.items()}

    def compute(self) -> Any:
        """The weights; a total needs the means, see `Aux.results`."""
        return self.weights


class Aux(eqx.Module):
    """The losses and metric states of a step, or of many steps merged.

    Attributes:
        losses: loss name -> state.
        total: weighted losses, or None where the step has none.
        metrics: metric name -> state.
    """

    losses: dict[str, State] = eqx.field(default_factory=dict)
    total: StepTotals | EvalWeights | None = None
    metrics: dict[str, State] = eqx.field(default_factory=dict)

    @property
    def loss(self) -> Any:
        """The total loss, a float scalar."""
        if self.total is None:
            raise AttributeError("this step reports no losses")
        return sum(self.total.weighted({name: state.compute() for name, state in self.losses.items()}).values())

    def empty(self) -> "Aux":
        """The same losses and metrics over no rows, as numpy arrays; `self` may hold shapes."""
        return jax.tree.map(empty_state, self, is_leaf=lambda part: isinstance(part, State))

    def merge(self, other: "Aux") -> "Aux":
        """The losses and metrics over the rows of both."""
        return jax.tree.map(lambda a, b: a.merge(b), self, other, is_leaf=lambda part: isinstance(part, State))

    def results(self) -> dict[str, Any]:
        """Result name -> value: `loss`, `losses/NAME`, `weighted/NAME`, and each metric under its name.

        A metric that computes a dict gives one result for each of its leaves, `NAME/KEY`.
        """
        # Through the class: Equinox makes a bound method a module, which costs more than what these compute.
        means = {name: type(state).compute(state) for name, state in self.losses.items()}
        values: dict[str, Any] = {}
        if self.total is not None:
            weighted = self.total.weighted(means)
            values = {"loss": sum(weighted.values())}
            values |= {f"losses/{name}": value for name, value in means.items()}
            values |= {f"weighted/{name}": value for name, value in weighted.items()}
        for name, state in self.metrics.items():
            value = type(state).compute(state)
            parts = named_leaves(value) if isinstance(value, dict) else {"": value}
            values |= {f"{name}/{part}" if part else name: leaf for part, leaf in parts.items()}
        return values
