"""What a step or an eval reports: loss states and metric states by name, merged over batches, read as named results."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from equikd.errors import WiringError, message
from equikd.metrics._state import State, empty_state, gathered, growing_fields, max_field, sum_field
from equikd.metrics._summaries import Summary
from equikd.metrics._sums import TwoFloat
from equikd.tree import named_leaves


class StepTotals(State):
    """Weighted losses summed over steps; the total of an interval is the mean of its steps' totals.

    Attributes:
        terms: loss name -> sum of its weighted means and its error; plain arrays will do.
        steps: loss name -> how many steps were summed, without those in which no row of that loss counts.
    """

    terms: dict[str, TwoFloat] = sum_field(exact=True)
    steps: dict[str, Int[Array, ""]] = sum_field()

    @classmethod
    def of(cls, terms: dict[str, Any], losses: dict[str, Any]) -> "StepTotals":
        """The totals of one step.

        Args:
            terms: loss name -> weight x mean, a scalar.
            losses: loss name -> `LossState`.
        """
        return cls(terms, {name: (losses[name].count > 0).astype(jnp.int32) for name in terms})

    def weighted(self, means: dict[str, Any]) -> dict[str, Any]:
        """Weighted mean of each loss over the steps; 0 of none, which is finite for an optimizer that reads it."""
        del means
        steps = {name: jnp.maximum(count, 1) for name, count in self.steps.items()}
        return {name: term.value / steps[name].astype(term.high.dtype) for name, term in self.terms.items()}

    def compute(self) -> Any:
        """The total."""
        return sum(self.weighted({}).values())

    def over_no_steps(self, total: dict[str, Any], weighted: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Results, with nan in place of a mean over no steps: of a loss, or of the total where no loss has any."""
        some = {name: steps > 0 for name, steps in self.steps.items()}
        either = functools.reduce(operator.or_, some.values(), False)
        weighted = {name: jnp.where(some[name], value, jnp.nan) for name, value in weighted.items()}
        return {name: jnp.where(either, value, jnp.nan) for name, value in total.items()}, weighted


class EvalWeights(State):
    """The losses' weights at the step of an eval; the total is the sum of weight x mean over all rows."""

    weights: dict[str, Float[Array, ""]] = max_field()  # the same for all batches: only the identity, -inf, matters

    def weighted(self, means: dict[str, Any]) -> dict[str, Any]:
        """Weight x mean of each loss."""
        return {name: weight * means[name] for name, weight in self.weights.items()}

    def compute(self) -> Any:
        """The weights; a total needs the means, see `Aux.results`."""
        return self.weights


class Results(NamedTuple):
    """What merged states report, by result name.

    Attributes:
        scalars: real numbers.
        summaries: what is no number: images, texts, histograms.
    """

    scalars: dict[str, Any]
    summaries: dict[str, Summary]


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
            f"metric {name!r}: {type(state).__qualname__}.{path} = concat_field()"
            for name, state in self.metrics.items()
            for path in growing_fields(state)
        )
        if got:
            fix = (
                "give room for a number of rows: concat_field(size=N), or size=N of a shipped metric\n"
                "or compute the metric in evals alone: Eval(metrics={...})"
            )
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
        """Result name -> scalar: `loss`, `losses/NAME`, `weighted/NAME`, and each metric under its name.

        A metric that computes a dict gives one result for each of its leaves, `NAME/KEY`.

        Raises:
            Exception: as `computed`.
        """
        return self.computed().scalars

    def summaries(self) -> dict[str, Summary]:
        """Result name -> image, text, histogram, named as in `results`.

        Raises:
            Exception: as `computed`.
        """
        return self.computed().summaries

    def computed(self) -> Results:
        """Results and summaries; each metric computes once.

        Raises:
            WiringError: a metric computes what is no number and no summary, or two results have one name.
            OverflowError: a count does not fit its dtype; with a note that names the metric.
            Exception: what the `compute` of a metric raises, with a note that names the metric.
        """
        # Through the class: Equinox makes a bound method a module, which costs more than what these compute.
        means = {name: type(state).compute(type(state).finalize(state)) for name, state in self.losses.items()}
        values: dict[str, Any] = {}
        summaries: dict[str, Summary] = {}
        if self.total is not None:
            weighted = self.total.weighted(means)
            values = {"loss": sum(weighted.values())}
            if isinstance(self.total, StepTotals):
                values, weighted = self.total.over_no_steps(values, weighted)
            values |= {f"losses/{name}": value for name, value in means.items()}
            values |= {f"weighted/{name}": value for name, value in weighted.items()}
        names: dict[str, list[str]] = {}
        for name, state in self.metrics.items():
            for result, leaf in _results_of(name, state).items():
                (summaries if isinstance(leaf, Summary) else values)[result] = leaf
                names.setdefault(name, []).append(result)
        _check_names(self, names)
        return Results(values, summaries)


def _results_of(name: str, state: State) -> dict[str, Any]:
    """Result name -> scalar or summary, of one metric."""
    try:
        value = type(state).compute(type(state).finalize(state))
    except Exception as error:
        error.add_note(f"while computing {_called(name, state)}")
        raise
    parts = named_leaves(value, is_leaf=lambda part: part is None) if isinstance(value, dict) else {"": value}
    for part, leaf in parts.items():
        if not isinstance(leaf, Summary) and not _is_number(leaf):
            raise _no_number(name, state, part, leaf)
    return {f"{name}/{part}" if part else name: leaf for part, leaf in parts.items()}


def _check_names(aux: Aux, names: dict[str, list[str]]) -> None:
    """Refuse results of one name; `names` are those of each metric."""
    owners: dict[str, str] = {}
    for name, results in names.items():
        for result in results:
            if result in owners:
                both = (owners[result], name)
                got = "\n".join(_called(one, aux.metrics[one]) for one in both)
                raise WiringError(
                    message(f"two results have the name {result!r}", got=got, fix="rename one of the metrics")
                )
            owners[result] = name


def _called(name: str, state: State) -> str:
    return f"metric {name!r} ({type(state).__qualname__}.compute)"


def _is_number(value: Any) -> bool:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return value.dtype.kind in "biuf" or jnp.issubdtype(value.dtype, jnp.floating)  # bfloat16 has a kind of its own
    return isinstance(value, bool | int | float)


_EXPECTED = "a real scalar, a summary (such as ek.metrics.Images, or Values of any array), or a dict of these"


def _no_number(name: str, state: State, part: str, value: Any) -> WiringError:
    at = f" at {part}" if part else ""
    got = f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else f"{type(value).__name__} {value!r:.80}"
    return WiringError(message(f"{_called(name, state)} gives no scalar{at}", got=got, expected=_EXPECTED))


_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def check_results(aux: Aux) -> None:
    """Check that results are scalars or summaries with names of their own, before there are any.

    Args:
        aux: empty, on the host. Its results are computed for their shapes alone where the metrics can be traced.

    Raises:
        WiringError: a metric computes neither, or two results have one name.
        Exception: a metric fails, traced and on the host; with a note that names it.
    """
    names: dict[str, list[str]] = {}

    def check(aux: Aux) -> dict[str, Any]:
        for name, state in aux.metrics.items():
            results = _results_of(name, state)
            for result, leaf in results.items():
                if not isinstance(leaf, Summary) and np.shape(leaf):
                    raise _no_number(name, state, result[len(name) + 1 :], leaf)
            names[name] = list(results)
        dataclasses.replace(aux, metrics={}).computed()
        return {}

    try:
        eqx.filter_eval_shape(check, aux)
    except WiringError as error:
        raise WiringError(str(error)) from None
    except Exception:  # some compute with numpy, which takes no tracers, as summaries do; the others are still traced
        for part in (dataclasses.replace(aux, metrics={}), *(Aux(metrics={n: s}) for n, s in aux.metrics.items())):
            _check_alone(check, part)
    _check_names(aux, names)


def _check_alone(check: Callable[[Aux], dict[str, Any]], aux: Aux) -> None:
    """Check the losses or one metric, on the host over no rows where it cannot be traced."""
    try:
        eqx.filter_eval_shape(check, aux)
    except WiringError as error:
        raise WiringError(str(error)) from None
    except Exception as error:
        with np.errstate(all="ignore"):
            try:
                check(aux)
            except WiringError:
                raise
            except Exception:
                if not isinstance(error, _NEEDS_VALUE):
                    raise  # otherwise it may be the lack of rows that it fails on
