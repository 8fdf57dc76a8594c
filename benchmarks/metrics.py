"""What metrics cost: ten of them in a training step, and a state that merges against a sum and a count by hand.

*step*: the tiny model (64-128-128-10, batch 32, adam), one batch that lies on the device, again and again, through
`ek.train.Stepper`, whose accumulators are read out (`swap`) every 100 steps.
  `none`   without metrics (the loss is reported by both)
  `ten`    with ten typical ones: classification, calibration, spread, the norm of the gradients

*sums*: means of four columns of float32 values under one mask, 256 rows a batch, in one jitted `lax.scan` over 4096
batches. All mask by the same `where`, sum in float32 and count in int32; the carry is all that differs.
  `hand`   `total + x.sum()` and `count + mask.sum()` for each column
  `state`  a state of two `sum_field()`s, made by `masked_sum` and merged by `|`: the same precision as by hand
  `exact`  `ek.metrics.Average`, whose sum carries its rounding errors along: what the library's means are made of

A state compiles to what one would write by hand, with one operation more: its counts saturate where those of `hand`
wrap. How far each mean is from that in float64 is printed as well.

*one sum*: the same of one column, with nothing else in the loop. A loop body of few operations is cheap to run on a
CPU; `hand`'s is the largest of these, and any one operation more costs 0.3 us. `hand and an int`, which carries a
number besides, shows that cliff; no program that also computes the values is near it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import equikd as ek
from benchmarks._timing import Rounds, finish, interleave, quick, ratios, show, stopwatch, times
from benchmarks._tiny import BATCH, LOG_EVERY, load, make_trainer, stepping
from equikd.metrics import Average, State, empty_state, sum_field
from equikd.metrics._average import masked_sum
from equikd.typing import Array, Float, Int

ROWS = 256
TEN: dict[str, ek.metrics.Metric] = {
    "accuracy": ek.metrics.Accuracy("preds", "batch.label"),
    "top_5": ek.metrics.TopKAccuracy("preds", "batch.label", k=5),
    "precision": ek.metrics.Precision("preds", "batch.label"),
    "f1": ek.metrics.F1("preds", "batch.label"),
    "perplexity": ek.metrics.Perplexity("preds", "batch.label"),
    "calibration": ek.metrics.ExpectedCalibrationError("preds", "batch.label"),
    "mean": ek.metrics.Mean("preds"),
    "std": ek.metrics.Std("preds"),
    "max": ek.metrics.Max("preds"),
    "gradient": ek.metrics.Norm("grads"),
}


# --- the step ---


def steps_with(metrics: dict[str, Any], steps: int) -> Callable[[], None]:
    """`steps` steps of the stepper with these metrics."""
    trainer = ek.override(make_trainer(1), {"metrics": metrics})
    batch = ek.data.as_batch({name: jnp.asarray(column[:BATCH]) for name, column in load().items()})
    return stepping(trainer, batch, steps)


def race_steps(rounds: int, steps: int = 2 * LOG_EVERY) -> Rounds:
    """Both steps on one batch."""
    works = {"none": steps_with({}, steps), "ten": steps_with(TEN, steps)}
    return interleave({name: stopwatch(work, steps=steps) for name, work in works.items()}, rounds=rounds)


# --- the sums ---


class Sums(State):
    """A mean as one would write it with plain fields."""

    total: Float[Array, ""] = sum_field()
    count: Int[Array, ""] = sum_field()

    def compute(self) -> Any:
        """The mean."""
        return self.total / self.count


Scan = Callable[[Any, Any], Any]


def by_hand(columns: Any, masks: Any) -> Any:
    """Sums and counts, carried by a scan."""

    def step(sums: Any, batch: Any) -> tuple[Any, None]:
        columns, mask = batch
        sums = {
            name: (total + jnp.where(mask, columns[name], 0.0).sum(), count + mask.sum(dtype=jnp.int32))
            for name, (total, count) in sums.items()
        }
        return sums, None

    return jax.lax.scan(step, {name: (jnp.float32(0), jnp.int32(0)) for name in columns}, (columns, masks))[0]


def by_hand_and_an_int(columns: Any, masks: Any) -> Any:
    """As `by_hand`, with one operation more on a scalar."""

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
        (sums, number), (columns, mask) = carry, batch
        sums = {
            name: (total + jnp.where(mask, columns[name], 0.0).sum(), count + mask.sum(dtype=jnp.int32))
            for name, (total, count) in sums.items()
        }
        return (sums, 3 * number + 1), None

    empty = {name: (jnp.float32(0), jnp.int32(0)) for name in columns}
    sums, number = jax.lax.scan(step, (empty, jnp.int32(0)), (columns, masks))[0]
    return {name: (*pair, number) for name, pair in sums.items()}  # what nobody reads would not be computed


def by_state(of: Callable[[Any, Any], State]) -> Scan:
    """States, carried by a scan."""

    def scan(columns: Any, masks: Any) -> Any:
        def step(states: Any, batch: Any) -> tuple[Any, None]:
            columns, mask = batch
            return {name: states[name] | of(x, mask) for name, x in columns.items()}, None

        shape = jax.eval_shape(of, jnp.zeros(ROWS), masks[0])
        return jax.lax.scan(step, {name: empty_state(shape) for name in columns}, (columns, masks))[0]

    return scan


SCANS: dict[str, Scan] = {
    "hand": by_hand,
    "hand and an int": by_hand_and_an_int,
    "state": by_state(lambda x, mask: Sums(*masked_sum(x, mask))),
    "exact": by_state(Average.of),
}


def mean_of(result: Any) -> float:
    """The mean that a scan has arrived at."""
    if isinstance(result, State):
        return float(result.compute())
    total, count, *_ = result
    return float(total) / float(count)


def race_sums(rounds: int, names: str, batches: int = 4096) -> tuple[Rounds, dict[str, float]]:
    """All scans over the same values; and the relative error of their worst mean."""
    draw = np.random.default_rng(0)
    columns = {name: (100 + draw.normal(size=(batches, ROWS))).astype(np.float32) for name in names}
    masks = draw.random((batches, ROWS)) < 0.9
    expected = {name: column.mean(dtype=np.float64, where=masks) for name, column in columns.items()}
    on_device = jax.device_put((columns, masks))
    programs = {name: jax.jit(scan).lower(*on_device).compile() for name, scan in SCANS.items()}
    errors = {
        name: max(abs(mean_of(result) / expected[column] - 1) for column, result in run(*on_device).items())
        for name, run in programs.items()
    }

    def work(run: Any) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(run(*on_device))

    return interleave(
        {name: stopwatch(work(run), steps=batches) for name, run in programs.items()}, rounds=rounds
    ), errors


def main() -> None:
    """Run both races and print the figures."""
    short = quick(__doc__ or "")
    print("step: time of a step, and ratio to the one without metrics of the same round (quartiles)", flush=True)
    steps = race_steps(30 if short else 200)
    show(steps, "none")
    races = {}
    for kind, names in (("sums", "abcd"), ("one sum", "a")):
        print(f"{kind}: time of a batch of {ROWS} rows, and ratio to the sums by hand of the same round (quartiles)")
        races[kind], errors = race_sums(40 if short else 300, names)
        show(races[kind], "hand", unit="ns", per_second=1e9)
        print("relative error of the worst mean: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    sums, one = races["sums"], races["one sum"]
    finish(
        step_with_10_metrics_over_none=ratios(steps, "ten", "none"),
        sum_state_over_hand_sums=ratios(sums, "state", "hand"),
        exact_state_over_hand_sums=ratios(sums, "exact", "hand"),
        one_sum_state_over_hand_sum=ratios(one, "state", "hand"),
        one_hand_sum_and_an_int_over_hand_sum=ratios(one, "hand and an int", "hand"),
        step_without_metrics_us=times(steps, "none").times(1e6),
        step_with_10_metrics_us=times(steps, "ten").times(1e6),
    )


if __name__ == "__main__":
    main()
