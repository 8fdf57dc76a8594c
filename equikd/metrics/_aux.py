"""What a step or an eval reports: loss states and metric states by name, merged over batches, read as named results."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from equikd.errors import WiringError, message
from equikd.metrics._state import State, empty_state, gathered, growing_fields, max_field, sum_field
from equikd.metrics._sums import TwoFloat
from equikd.tree import named_leaves


class StepTotals(State):
    """Weighted losses summed over steps; the total of an interval is the mean of its steps' totals.

    Attributes:
        terms: loss name -> sum of its weighted means and its error; plain arrays will do.
        steps: how many steps were summed.
    """

    terms: dict[str, TwoFloat] = sum_field(exact=True)
    steps: Int[Array, ""] = sum_field()

    def weighted(self, means: dict[str, Any]) -> dict[str, Any]:
        """Weighted mean of each loss over the steps."""
        del means
        return {name: term.value / self.steps.astype(term.high.dtype) for name, term in self.terms.items()}

    def compute(self) -> Any:
        """The total."""
        return sum(self.weighted({}).values())


class EvalWeights(State):
    """The losses' weights at the step of an eval; the total is the sum of weight x mean over all rows."""

    weights: dict[str, Float[Array, ""]] = max_field()  # the same for all batches: only the identity, -inf, matters

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

    def check_fixed(self) -> None:
        """Refuse metrics that cannot be accumulated on the device, where one shape serves all steps.

        Raises:
            WiringError: a state has a `concat_field`; with metric and field.
        """
        got = "\n".join(
            f"{name!r}: {type(state).__qualname__}.{path} = concat_field()"
            for name, state in self.metrics.items()
            for path in growing_fields(state)
        )
        if got:
            fix = "keep as many rows as are needed: ek.metrics.truncate_field(n)"
            raise WiringError(message("rows without a limit cannot be accumulated on the device", got=got, fix=fix))

    def parted(self) -> tuple["Aux", "Aux"]:
        """What keeps its shape when it merges, and the metrics that do not."""
        growing = {name: state for name, state in self.metrics.items() if growing_fields(state)}
        fixed = {name: state for name, state in self.metrics.items() if name not in growing}
        return Aux(self.losses, self.total, fixed), Aux(metrics=growing)

    def joined(self, others: Sequence["Aux"]) -> "Aux":
        """With the metrics of others, merged in order on the host; the inverse of `parted`."""
        names = others[0].metrics
        merged = {name: gathered([other.metrics[name] for other in others]) for name in names}
        return Aux(self.losses, self.total, self.metrics | merged)

    def merge(self, other: "Aux") -> "Aux":
        """The losses and metrics over the rows of both."""
        return jax.tree.map(lambda a, b: a.merge(b), self, other, is_leaf=lambda part: isinstance(part, State))

    def results(self) -> dict[str, Any]:
        """Result name -> value: `loss`, `losses/NAME`, `weighted/NAME`, and each metric under its name.

        A metric that computes a dict gives one result for each of its leaves, `NAME/KEY`.

        Raises:
            WiringError: a metric computes what is no number, or two results have one name.
            OverflowError: a count does not fit its dtype; with a note that names the metric.
            Exception: what the `compute` of a metric raises, with a note that names the metric.
        """
        # Through the class: Equinox makes a bound method a module, which costs more than what these compute.
        means = {name: type(state).compute(type(state).finalize(state)) for name, state in self.losses.items()}
        values: dict[str, Any] = {}
        if self.total is not None:
            weighted = self.total.weighted(means)
            values = {"loss": sum(weighted.values())}
            values |= {f"losses/{name}": value for name, value in means.items()}
            values |= {f"weighted/{name}": value for name, value in weighted.items()}
        owners: dict[str, str] = {}
        for name, state in self.metrics.items():
            try:
                value = type(state).compute(type(state).finalize(state))
            except Exception as error:
                error.add_note(f"while computing {_called(name, state)}")
                raise
            parts = named_leaves(value, is_leaf=lambda part: part is None) if isinstance(value, dict) else {"": value}
            for part, leaf in parts.items():
                result = f"{name}/{part}" if part else name
                if not _is_number(leaf):
                    raise _no_number(name, state, part, leaf)
                if result in owners:
                    raise WiringError(
                        message(
                            f"two results have the name {result!r}",
                            got=f"{_called(owners[result], self.metrics[owners[result]])}\n{_called(name, state)}",
                            fix="rename one of the metrics",
                        )
                    )
                owners[result], values[result] = name, leaf
        return values


def _called(name: str, state: State) -> str:
    return f"metric {name!r} ({type(state).__qualname__}.compute)"


def _is_number(value: Any) -> bool:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return value.dtype.kind in "biuf" or jnp.issubdtype(value.dtype, jnp.floating)  # bfloat16 has a kind of its own
    return isinstance(value, bool | int | float)


def _no_number(name: str, state: State, part: str, value: Any) -> WiringError:
    at = f" at {part}" if part else ""
    got = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else f"{type(value).__name__} {value!r:.80}"
    return WiringError(
        message(f"{_called(name, state)} gives no scalar{at}", got=got, expected="a real scalar, or a dict of them")
    )


_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def check_results(aux: Aux) -> None:
    """Check that results are scalars with names of their own, before there are any.

    Args:
        aux: empty, on the host. Its results are computed for their shapes alone where the metrics can be traced.

    Raises:
        WiringError: a metric computes no scalar, or two results have one name.
        Exception: a metric fails, traced and on the host; with a note that names it.
    """

    def scalars(aux: Aux) -> dict[str, Any]:
        values = aux.results()
        shapes = {name: np.shape(value) for name, value in values.items()}
        for name, state in aux.metrics.items():
            for result, shape in shapes.items():
                if shape and (result == name or result.startswith((f"{name}/", f"{name}["))):
                    raise _no_number(name, state, result[len(name) + 1 :], values[result])
        return {}

    try:
        eqx.filter_eval_shape(scalars, aux)
    except WiringError as error:
        raise WiringError(str(error)) from None
    except Exception as error:  # a metric may compute with numpy, which takes no tracers
        with np.errstate(all="ignore"):
            try:
                scalars(aux)
            except WiringError:
                raise
            except Exception:
                if not isinstance(error, _NEEDS_VALUE):
                    raise  # otherwise it may be the lack of rows that it fails on
