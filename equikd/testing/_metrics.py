"""`ek.testing.check_metric(metric)`: what makes a metric exact, as laws on drawn batches.

    def test_my_metric():
        ek.testing.check_metric(MyMetric(preds="preds", targets="batch.y"))

With `of` for `metric.from_values` and `|` for the merge of states:

- associative: `(a | b) | c` is `a | (b | c)`, and the empty state changes nothing on either side;
- batches do not matter: `of(a ++ b)` is `of(a) | of(b)`, and neither does the order of rows, unless fields keep it;
- padding does not matter, whatever it holds: nan, infinity, labels of no class; a batch of padding adds nothing;
- `lax.scan` over batches, and `vmap` with `reduce`, give what `|` gives;
- devices do not matter: rows spread over all of them, sharded automatically under jit, give what one device gives.

What is compared is what `compute` returns: to the bit where the states hold whole numbers, whose sums do not round.
The laws themselves are in `_laws.py`.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from equikd.errors import message
from equikd.metrics import Metric, State
from equikd.testing._batches import Batch, is_array
from equikd.testing._laws import Laws
from equikd.testing._parts import DrawError
from equikd.testing._rules import rules_of
from equikd.testing._running import LawOptions, all_options, instance_of, run


def check_metric(metric: Any, **options: Unpack[LawOptions]) -> None:
    """Check that a metric is exact whatever the batches, the padding, the order and the devices.

    Floats are drawn as whole numbers in half of the batches, and normally distributed in the others; ints are indices
    of classes, from 0 to below the smallest last axis of the floats. Arrays with as many rows as the mask are split.

    That devices do not matter is checked where there are several, and the metric takes a mask, with which rows are
    padded to a multiple of their number. A CPU is eight devices if the environment variable
    `XLA_FLAGS=--xla_force_host_platform_device_count=8` is set before JAX starts.

    Args:
        metric: the metric, or its class, of which an instance is drawn.
        **options: what is drawn and how much of it, `axes`, `where`, `given`, `values`, `shared`, `examples` and
            `rtol`; `ek.testing.LawOptions` describes each.

    Raises:
        AssertionError: a law is broken; the text has the law, the batch and both values.
        DrawError: annotations or options from which nothing can be drawn.
        TypeError: an unknown option.

    Example:
        >>> from equikd.metrics import Mean
        >>> check_metric(Mean(values="preds"), examples=2)
    """
    chosen = all_options("check_metric", options)
    metric = instance_of(metric)
    if not isinstance(metric, Metric):
        raise DrawError(message("check_metric checks a metric", got=repr(metric), expected="ek.metrics.Metric"))
    takes = "mask" in rules_of(metric.from_values)[0].signature.parameters

    def traced(arguments: dict[str, Any], mask: Any) -> State:
        return metric.from_values(**arguments, **({"mask": mask} if takes else {}))

    def of(batch: Batch) -> State:
        return traced(jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, batch.arguments), batch.mask)

    splits = takes and not metric.couples_rows
    run(Laws(of, traced, metric.takes_mask, splits, chosen["rtol"]).check, metric.from_values, chosen)
