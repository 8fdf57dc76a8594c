"""What type checkers see of configs and nodes; pyright runs over it in CI, no test runs it.

Each line with an ignore is an expected error: were it none, the ignore itself would be one.
"""

# pyright: standard, reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import equinox as eqx
import optax

import equikd as ek
from equikd.config import config, field


@config
class Opt:
    """A config class."""

    learning_rate: float
    steps: int = field(dynamic=True, default=10)


@config(kw_only=True)
class Run:
    """A config class with keyword-only fields."""

    opt: Opt
    name: str = "run"


@config
class LongRun(Opt):
    """A config class that inherits."""

    epochs: int = 1


def never_called() -> None:
    """Only checkers read it."""
    opt = Opt(0.1, steps=3)
    assert_type(opt.learning_rate, float)
    assert_type(opt.steps, int)
    assert_type(LongRun(0.1, 3, epochs=2), LongRun)
    assert_type(Run(opt=opt), Run)
    assert_type(ek.override(opt, {"learning_rate": 0.2}), Opt)

    opt.learning_rate = 0.2  # pyright: ignore[reportAttributeAccessIssue]  # frozen
    Opt()  # pyright: ignore[reportCallIssue]  # learning_rate is missing
    Opt("fast")  # pyright: ignore[reportArgumentType]  # a string for a float
    Opt(0.1, stepz=3)  # pyright: ignore[reportCallIssue]  # misspelt
    Run(opt)  # pyright: ignore[reportCallIssue]  # keyword-only
    LongRun(0.1, epochs="two")  # pyright: ignore[reportArgumentType]  # an inherited config checks its own fields

    optimizer = ek.lazy(optax.adamw)(learning_rate=3e-4, b1=0.9)
    assert_type(optimizer, optax.GradientTransformationExtraArgs)
    ek.lazy(optax).adamw(3e-4)
    ek.lazy(optax.chain)(ek.lazy(optax.clip_by_global_norm)(1.0), ek.lazy(optax.sgd)(ek.optim.Constant(0.1)))
    assert_type(ek.lazy(Opt)(0.1), Opt)
    assert_type(ek.lazy(eqx.nn.MLP)(64, 10, 128, 2), eqx.nn.MLP)  # the PRNG key is not missing

    ek.lazy(optax.adamw)(learning_rat=3e-4)  # pyright: ignore[reportCallIssue]  # misspelt
    ek.lazy(optax.adamw)(3e-4, nesterov="yes")  # pyright: ignore[reportArgumentType]  # a string for a bool
    ek.lazy(Opt)(0.1, stepz=3)  # pyright: ignore[reportCallIssue]  # misspelt
    ek.lazy(optax).adamww(3e-4)  # pyright: ignore[reportAttributeAccessIssue]  # no such function
    ek.lazy(optax.chain)(ek.lazy(optax.sgd)(lr=0.1))  # pyright: ignore[reportCallIssue]  # at every depth

    ek.Trainer(optimizer=optimizer, train_data=None, num_steps="many")  # pyright: ignore[reportArgumentType]
    ek.Trainer(optimizer=optimizer, train_data=None)  # pyright: ignore[reportCallIssue]  # num_steps is missing
    ek.losses.SquaredError(preds="preds", targetz="batch.y")  # pyright: ignore[reportCallIssue]
