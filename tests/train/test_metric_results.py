"""What metrics compute is looked at before training: scalars, each under a name of its own."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equikd as ek
from equikd.errors import EquikdError, WiringError
from equikd.metrics import static_field, sum_field
from tests.train._small import evaluated, small


@pytest.fixture
def refused(snapshot: Any) -> Callable[..., str]:
    """`refused(name, trainer)`: the error that `init` ends with equals the snapshot `name`."""

    def check(name: str, trainer: ek.Trainer, kind: type[Exception] = WiringError) -> str:
        with pytest.raises(kind) as error:
            trainer.init()
        notes = [note for note in getattr(error.value, "__notes__", []) if "JAX has removed" not in note]
        text = "\n".join([*([str(error.value)] if isinstance(error.value, EquikdError) else []), *notes])
        snapshot(name, text)
        return text

    return check


class Computed(ek.metrics.State):
    """A state whose result is chosen by a static name."""

    total: jax.Array = sum_field()
    kind: str = static_field(default="dict")
    calls: ClassVar[list[str]] = []

    def compute(self) -> Any:
        if self.kind == "raises":
            raise KeyError("no such thing")
        if self.kind == "numpy":
            return float(np.asarray(self.total))
        if self.kind == "mixed":
            self.calls.append(self.kind)
            return {"b": self.total, "c": {"shown": ek.metrics.Texts(("x",))}}
        made = {"dict": {"b": self.total}, "vector": jnp.stack([self.total] * 3), "text": "good", "none": None}
        return made[self.kind]


@ek.config.config
class Compute(ek.metrics.Metric):
    """Gives `Computed`."""

    values: ek.KeyPath
    kind: str = "dict"

    def from_values(self, values: Any) -> Computed:
        return Computed(jnp.sum(values), self.kind)


@pytest.mark.parametrize("kind", ["vector", "text", "none"])
def test_a_metric_that_computes_no_scalar(kind, refused):
    refused(f"computes_{kind}", small(metrics={"mine": Compute("batch.x", kind)}))


def test_a_metric_whose_compute_raises_is_named(refused):
    text = refused("compute_raises", small(metrics={"mine": Compute("batch.x", "raises")}), KeyError)
    assert "metric 'mine' (Computed.compute)" in text


def test_two_results_of_one_name(refused):
    refused("results_of_one_name", small(metrics={"a": Compute("batch.x"), "a/b": ek.metrics.Mean("batch.x")}))


@pytest.mark.parametrize("part", ["b", "c.shown"])
def test_a_scalar_and_a_summary_of_one_name(part, refused):
    metrics = {"a": Compute("batch.x", "mixed"), f"a/{part}": ek.metrics.Mean("batch.x")}
    refused(f"a_summary_of_one_name_{part}", small(metrics=metrics))


def test_a_dict_may_hold_scalars_and_summaries():
    state = Computed(jnp.ones(()), "mixed")
    aux = ek.train.Aux(metrics={"a": state})
    Computed.calls.clear()
    scalars, summaries = aux.computed()
    assert (scalars, summaries) == ({"a/b": 1}, {"a/c.shown": ek.metrics.Texts(("x",))})
    assert len(Computed.calls) == 1
    assert (aux.results(), aux.summaries()) == (scalars, summaries)


def test_a_metric_may_compute_with_numpy_on_the_host():
    small(metrics={"mine": Compute("batch.x", "numpy")}).init()


def test_an_eval_with_metrics_of_its_own_is_looked_at_too(refused):
    evals = {
        name: ek.override(one, {"metrics": {"mine": Compute("batch.x", "vector")}}) for name, one in evaluated().items()
    }
    refused("in_an_eval", small(evals=evals))
