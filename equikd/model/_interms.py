"""The intermediates of a model's call on a batch: what key paths `interms.*` and `grads.interms.*` name.

What losses and metrics of a config read is asked for, and nothing else, so a config without such key paths has the
program that it had before. Values are captured inside of the map over examples, so the batch axis is their first one,
and the axes of scans come next: `[batch, layer, ...]`.

The gradient with respect to a value is that with respect to zeros which are added to it. The trainer's `gradients`
makes these and hands them, by `adding`, to whatever calls the model while the loss is computed.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.config import resolve
from equikd.errors import WiringError, message
from equikd.intermediates import IntermediateError, Options
from equikd.intermediates._capture import Call, Captured, picked, run_tapped, warn_ungraded
from equikd.intermediates._mark import Name
from equikd.intermediates._paths import Request, found, into
from equikd.tree import Path, PathError, is_glob, items, join, named_leaves, parse
from equikd.wiring import ByPath

_VALUES, GRADIENTS = ("interms",), ("grads", "interms")


def asked_for(config: Any) -> tuple[str, ...]:
    """The paths below `interms` and `grads.interms` that the losses and metrics of a config read."""
    return tuple(dict.fromkeys([*_read(config, _VALUES), *gradients_asked_for(config)]))


def gradients_asked_for(config: Any) -> tuple[str, ...]:
    """Those below `grads.interms`."""
    return _read(config, GRADIENTS)


def has_field_interms(model: Any) -> bool:
    """Whether a model has a field of that name; then `grads.interms` is the gradient of what it holds, and no other."""
    return "interms" in items(model)


def is_below(path: str, root: Path) -> bool:
    """Whether a key path begins with some keys; one that is misspelt does not.

    Example:
        >>> is_below("interms.encoder", ("interms",)), is_below("grads.encoder", GRADIENTS)
        (True, False)
    """
    try:
        return parse(path)[: len(root)] == root
    except PathError:
        return False


def _read(config: Any, root: Path, parts: tuple[str, ...] = ("losses", "metrics")) -> tuple[str, ...]:
    owners = [owner for part in parts for owner in resolve(getattr(config, part), root=config, path=part).values()]
    paths = [path for owner in owners for path in owner.reads().values() if is_below(path, root)]
    below = (join(parse(path)[len(root) :]) for path in paths)
    return tuple(dict.fromkeys(path for path in below if path))


@dataclasses.dataclass(eq=False)
class _About:
    """What is known of intermediates besides their values.

    Attributes:
        root: the key path that they are read below.
        axis: 1 where the batch axis comes first, 0 where the model takes whole batches.
        requests: path -> what it names.
        failures: path -> why it names nothing.
        misled: path -> what to say where it leads nowhere inside of a value.
        calls: name -> what is known of each call besides its value.
    """

    root: str
    axis: int
    requests: dict[str, list[Request]]
    failures: dict[str, str]
    misled: dict[str, str]
    calls: dict[Name, list[Call]] = dataclasses.field(default_factory=dict)


class Intermediates(eqx.Module, ByPath):
    """The values of what was asked for, or gradients with respect to them.

    Attributes:
        calls: the values of each call, batch axis first.
        about: what else is known.
    """

    calls: dict[Name, list[Any]]
    about: _About = eqx.field(static=True)

    def read(self, path: str, *, many: bool) -> tuple[Any, Path, str | None]:
        """See `ByPath.read`.

        Raises:
            WiringError: the path names nothing, or something that has no value here.
        """
        about = self.about
        below = join(parse(path)[len(parse(about.root)) :])
        if below in about.failures:
            raise IntermediateError(about.failures[below])
        if below not in about.requests:
            fix = None if below else f"a path below it, such as '{about.root}.encoder'"
            text = f"{path!r}: only what a loss or metric names is captured" if below else f"{path!r} is no value"
            raise WiringError(message(text, expected="a path that a loss or metric of the trainer reads", fix=fix))
        if is_glob(below) and not many:
            raise WiringError(message(f"{path!r}: this key path names one value", expected="a path, no pattern"))
        values = self._picked(about.requests[below])
        if not is_glob(below):
            return values[below], about.requests[below][0].rest, about.misled.get(below)
        arrays = {at: leaf for value_path, value in values.items() for at, leaf in _arrays(value_path, value)}
        if not arrays:
            raise IntermediateError(message(f"{path!r}: of what fits, nothing is called"))
        return arrays, (), None

    def named(self) -> dict[str, Any]:
        """See `ByPath.named`."""
        found, root = dict[str, Any](), parse(self.about.root)
        for requests in self.about.requests.values():
            try:
                values = self._picked(requests)
            except WiringError:
                continue
            for at, value in values.items():
                whole = join(parse(at)[: len(parse(at)) - len(requests[0].rest)])
                found |= {join((*root, *parse(name))): leaf for name, leaf in _arrays(whole, value)}
        return found

    def _picked(self, requests: list[Request]) -> dict[str, Any]:
        about = self.about
        calls = {
            name: [call._replace(value=value) for value, call in zip(values, about.calls[name], strict=True)]
            for name, values in self.calls.items()
        }
        values, failures = picked(Captured(None, calls), requests, prefix=f"{about.root}.", axis=about.axis)
        if failures:
            raise IntermediateError("\n".join(failures.values()))
        for path, value in values.items():
            if value is None and about.root == "grads.interms":
                what = f"'{about.root}.{path}': there is no gradient with respect to it, since it holds no real numbers"
                raise IntermediateError(what)
        return {path: _without_states(value) for path, value in values.items()}

    def zeros(self, paths: tuple[str, ...]) -> dict[Name, list[Any]]:
        """What is added to values for their gradients: of all calls of what some paths name."""
        names = {request.name for path in paths for request in self.about.requests.get(path, ())}
        calls = {name: calls for name, calls in self.calls.items() if name in names}
        none = lambda state: jax.tree.map(lambda _: None, state)  # statistics of the batch have no rows
        return jax.tree.map(lambda part: none(part) if _is_state(part) else _zeros(part), calls, is_leaf=_is_state)

    def gradients(self, grads: Mapping[Name, list[Any]]) -> "Intermediates":
        """The gradients with respect to values, read in the same way."""
        calls = {name: list(map(_without_gradient, of_name)) for name, of_name in self.about.calls.items()}
        failures = {path: text.replace("'interms.", "'grads.interms.") for path, text in self.about.failures.items()}
        misled = {path: text.replace("'interms.", "'grads.interms.") for path, text in self.about.misled.items()}
        about = dataclasses.replace(
            self.about,
            root="grads.interms",
            failures=failures,
            misled=misled,
            calls=calls,
        )
        return Intermediates(dict(grads), about)


def _without_gradient(call: Call) -> Call:
    """What is told of a call to whoever asks for the gradient with respect to its value."""
    if call.ungraded is None or call.refused is not None:
        return call
    return call._replace(refused=f"there is no gradient with respect to it: it is computed inside of a {call.ungraded}")


def _is_state(part: Any) -> bool:
    return isinstance(part, eqx.nn.State)


def _without_states(value: Any) -> Any:
    """A value with None in place of the states of layers, which are no data."""
    return jax.tree.map(lambda part: None if _is_state(part) else part, value, is_leaf=_is_state)


def _zeros(value: Any) -> Any:
    is_real = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)
    return jnp.zeros(value.shape, value.dtype) if is_real else None


def _arrays(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    for at, leaf in named_leaves(value).items():
        if eqx.is_array(leaf):
            yield join((*parse(path), *parse(at))), leaf


_ADDED: ContextVar[Mapping[Name, list[Any]] | None] = ContextVar("equikd_added", default=None)


@contextlib.contextmanager
def adding(zeros: Mapping[Name, list[Any]]) -> Iterator[None]:
    """Inside, calls of the model add these to its intermediates."""
    token = _ADDED.set(zeros)
    try:
        yield
    finally:
        _ADDED.reset(token)


class Asked:
    """What is to be captured in one call of a model.

    Attributes:
        added: what is added to the values, batch axis first.
    """

    def __init__(self, config: Any, model: Any) -> None:
        paths, self.of_losses = asked_for(config), _read(config, _VALUES, ("losses",))
        options = resolve(config.intermediates, root=config, path="intermediates")
        self.options = Options() if options is None else options
        self.added = dict(_ADDED.get() or {})
        self.about = _About("interms", int(config.per_example), {}, {}, {})
        for path in paths:
            try:
                requests = found(model, path, "interms.")
            except IntermediateError as error:
                self.about.failures[path] = str(error)
            else:
                self.about.requests[path] = requests
                if requests[0].rest and isinstance(requests[0].rest[0], str):
                    self.about.misled[path] = into(model, requests[0], "interms.")
        self.requests = [request for requests in self.about.requests.values() for request in requests]

    def run(self, function: Callable[..., Any], model: Any, arguments: Any, added: Any) -> tuple[Any, Any]:
        """What a function of a model and arguments returns, and the values of all calls of what is asked for."""
        if not self.requests:
            return function(model, arguments), {}
        names = [request.name for request in self.requests]
        got = run_tapped(function, model, (arguments,), {}, names=names, options=self.options, perturbations=added)
        self.about.calls |= {name: [c._replace(value=None) for c in calls] for name, calls in got.calls.items()}
        warn_ungraded(got, [r for path in self.of_losses for r in self.about.requests.get(path, ())])
        return got.out, {name: [call.value for call in calls] for name, calls in got.calls.items()}

    def made(self, calls: Any) -> Intermediates:
        """The intermediates of the whole batch."""
        return Intermediates(calls, self.about)
