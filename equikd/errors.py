"""The exception types of equikd, and the one builder of their texts.

An error answers five questions, always in this order: *what* is wrong, *where* (config path, key, file and line), what
was *got*, what was *expected*, and how to *fix* it. `message` lays the answers out on a few lines, leaves out what is
not known, and adds near matches when a name was misspelt:

    optimizer.learning_rat: no such argument
      where:    --cfg.optimizer.learning_rat
      got:      'learning_rat'
      expected: one of learning_rate, b1, b2
      nearest:  'learning_rate'

Failures of one kind are reported together: `report` joins several messages under one headline.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class EquikdError(Exception):
    """Base of all errors that equikd raises on purpose; its text is meant to be read by the user."""


class ConfigError(EquikdError, TypeError):
    """A config class, node, path, override or JSON text is wrong."""


class WiringError(EquikdError, ValueError):
    """A key path leads nowhere, or something is connected wrongly."""


class CheckpointError(EquikdError, ValueError):
    """A checkpoint or saved model is missing, broken, or does not fit the template."""


class DataError(EquikdError, ValueError):
    """A data pipeline yields too little, or something of the wrong structure or shape."""


class NonFiniteError(EquikdError, ArithmeticError):
    """Training met numbers that are not finite.

    Attributes:
        step: the number of the update that failed, the first one being 1.
        path: what was not finite first, such as `losses.ce` or `grads.layers[0].weight`.
        state: the train state before that update, where `path` leads into `params` that after it, with the bad
            parameters; without the optimizer's state, which the guard may have let spoil.
    """

    def __init__(self, text: str, *, step: int, path: str, state: Any) -> None:
        self.step, self.path, self.state = step, path, state
        super().__init__(text)

    def located(self, where: str) -> "NonFiniteError":
        """The same error, whose text also says where the run is."""
        what, _, rest = str(self).partition("\n")
        return NonFiniteError(f"{message(what, where=where)}\n{rest}", step=self.step, path=self.path, state=self.state)

    def saying(self, label: str, text: str) -> "NonFiniteError":
        """The same error, with one more line below its headline."""
        what, _, rest = str(self).partition("\n")
        line = f"  {label + ':':<9} {text}"
        return NonFiniteError(f"{what}\n{line}\n{rest}", step=self.step, path=self.path, state=self.state)

    def again(self, returns: int) -> "NonFiniteError":
        """The same error, whose text also says how often the run went back before."""
        what, _, rest = str(self).partition("\n")
        text = f"{what}, after {returns} returns\n{rest}"
        return NonFiniteError(text, step=self.step, path=self.path, state=self.state)


# What other libraries call the things that are named here; spelling alone would not find them.
_ALIASES = {
    "lr": ("learning_rate",),
    "step_size": ("learning_rate",),
    "wd": ("weight_decay",),
    "momentum": ("b1", "decay"),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "epsilon": ("eps",),
    "epochs": ("num_steps",),
    "num_epochs": ("num_steps",),
    "max_epochs": ("num_steps",),
    "steps": ("num_steps",),
    "max_steps": ("num_steps",),
    "total_steps": ("num_steps",),
    "optim": ("optimizer",),
    "opt": ("optimizer",),
    "tx": ("optimizer",),
    "dataset": ("train_data",),
    "data": ("train_data",),
    "loss": ("losses",),
    "bs": ("batch_size",),
    "batchsize": ("batch_size",),
}


def nearest(name: str, options: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """The options most like `name`, best first: those that other libraries call so, then those spelt alike.

    Args:
        name: what was written.
        options: what exists.
        count: how many to give at most.

    Returns:
        At most `count` options; none where nothing is similar.

    Example:
        >>> nearest("learning_rat", ["learning_rate", "b1"])
        ('learning_rate',)
        >>> nearest("lr", ["learning_rate", "b1"])
        ('learning_rate',)
    """
    by_lower_case: dict[str, list[str]] = {}
    options = list(dict.fromkeys(options))
    meant = _ALIASES.get(name.rpartition(".")[2].lower(), ())
    known = [option for alias in meant for option in options if option.rpartition(".")[2] == alias]
    for option in options:
        by_lower_case.setdefault(option.lower(), []).append(option)
    found = difflib.get_close_matches(name.lower(), list(by_lower_case), count, cutoff=0.5)
    return tuple(dict.fromkeys([*known, *(option for lower in found for option in by_lower_case[lower])]))[:count]


def listing(items: Iterable[object], limit: int = 12) -> str:
    """`a, b, c`, cut after `limit` items with the number of those left out.

    Example:
        >>> listing(range(4), limit=2)
        '0, 1, ... (2 more)'
    """
    items = [str(item) for item in items]
    if len(items) <= limit:
        return ", ".join(items)
    return ", ".join(items[:limit]) + f", ... ({len(items) - limit} more)"


def message(
    what: str,
    *,
    where: str | None = None,
    got: str | None = None,
    expected: str | None = None,
    near: Sequence[str] = (),
    fix: str | None = None,
) -> str:
    """One error text: a headline and one line for each answer that is known.

    Args:
        what: the headline, what is wrong.
        where: config path, key path, file and line.
        got: what was found, as the user would write it.
        expected: what would have been right.
        near: names similar to the wrong one, best first.
        fix: what to write or do instead.

    Returns:
        The text, without a trailing newline.

    Example:
        >>> print(message("Opt.lr: not a float", got="'fast'", expected="float"))
        Opt.lr: not a float
          got:      'fast'
          expected: float
    """
    answers = (
        ("where", where),
        ("got", got),
        ("expected", expected),
        ("nearest", ", ".join(repr(name) for name in near) or None),
        ("fix", fix),
    )
    lines = [what]
    for label, text in answers:
        if text is not None:
            lines.append(f"  {label + ':':<9} " + text.replace("\n", "\n            "))
    return "\n".join(lines)


_MOST_MESSAGES = 10  # of one report; whoever corrects these sees the others next


def report(headline: str, messages: Sequence[str]) -> str:
    """Several messages of one kind under one headline, ten at most; a single message stands alone.

    Example:
        >>> print(report("2 settings are wrong", ["a: no", "b: no"]))
        2 settings are wrong
        - a: no
        - b: no
    """
    if len(messages) == 1:
        return messages[0]
    left_out = len(messages) - _MOST_MESSAGES
    shown = ["- " + text.replace("\n", "\n  ") for text in messages[:_MOST_MESSAGES]]
    return "\n".join([headline, *shown, *([f"... and {left_out} more"] if left_out > 0 else [])])
