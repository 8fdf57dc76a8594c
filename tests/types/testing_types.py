"""What type checkers see of the options of laws; pyright runs over it in CI, no test runs it.

Each line with an ignore is an expected error: were it none, the ignore itself would be one.
"""

# pyright: standard, reportUnnecessaryTypeIgnoreComment=true

from hypothesis import strategies as st

import equikd as ek


def never_called() -> None:
    """Options are known by name and type."""
    metric, loss = ek.metrics.Mean("preds"), ek.losses.Value("preds")
    ek.testing.check_metric(metric)
    ek.testing.check_metric(metric, axes={"b": st.integers(1, 3)}, examples=2, rtol=1e-4, shared=["params"])
    ek.testing.check_loss(loss, values={"x": lambda random, shape: random.random(shape)}, where=lambda b: b > 1)
    ek.testing.check_metric(metric, axis={})  # pyright: ignore[reportCallIssue]
    ek.testing.check_loss(loss, examples="many")  # pyright: ignore[reportArgumentType]
    options: ek.testing.LawOptions = {"examples": 3}
    ek.testing.check_loss(loss, **options)
