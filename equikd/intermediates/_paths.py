"""Paths of intermediates: what a request names in a model, and what there is where it names nothing.

    encoder.layers[1]          the output of that submodule (a negative index counts from the end)
    encoder.layers[1].scores   of another of its methods; the model's own method is `encode`
    cell[2]                    of its third call; of the third iteration, where one call stands in a scan
    encoder.inputs[0]          what it is called on, by position or by name: `encoder.inputs.key`
    blocks[*].attention        a pattern: of all that fit and are called, `**` is any number of keys

What follows (`[..., :3]`, an item of a tuple behind the number of a call) is left to the reader of the value.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np

from equikd.errors import listing, message, nearest
from equikd.intermediates._errors import IntermediateError
from equikd.intermediates._mark import Name
from equikd.intermediates._tap import children, nodes
from equikd.tree import Path, PathError, Wildcard, join, matches, parse


@dataclasses.dataclass(frozen=True)
class Request:
    """One value that is asked for.

    Attributes:
        path: its spelling.
        name: what its mark says.
        call: which call, counted from 0, or from the end; None: the only one.
        rest: keys that lead into the value.
        pattern: the pattern that it fits; empty for one that is named itself.
    """

    path: str
    name: Name
    call: int | None = None
    rest: Path = ()
    pattern: str = ""

    @property
    def optional(self) -> bool:
        """Whether it is one of many, and left out if it is not called."""
        return bool(self.pattern)


def is_callable(node: Any) -> bool:
    """Whether a node of a model can be called: a module with `__call__`, or a function among its leaves."""
    return callable(node) and not isinstance(node, type)


def listed(model: Any) -> list[str]:
    """The paths of all submodules that can be called, in the order of the model."""
    return [join(at) for at, node in nodes(model) if at and is_callable(node)]


def found(model: Any, path: str, prefix: str = "") -> list[Request]:
    """What a path or pattern names in a model.

    Args:
        model: any pytree of modules.
        path: as above.
        prefix: what messages put before paths, such as `interms.`.

    Returns:
        One request, or for a pattern one for each submodule that fits.

    Raises:
        IntermediateError: the path leads nowhere, to what cannot be called, or fits nothing.
    """
    try:
        keys = parse(path)
    except PathError as error:
        raise IntermediateError(str(error)) from None
    if not keys:
        raise IntermediateError(message("the path of an intermediate is empty", expected="a path of a submodule"))
    last = next((at for at in reversed(range(len(keys))) if isinstance(keys[at], Wildcard)), None)
    if last is None:
        return [_resolved(model, keys, path, prefix)]
    requests: dict[str, Request] = {}
    for at, _ in nodes(model):
        if at and matches(keys[: last + 1], at):
            for request in _fitting(model, (*at, *keys[last + 1 :]), path):
                requests.setdefault(request.path, request)
    if not requests:
        raise IntermediateError(_unfit(model, path, keys, prefix))
    return list(requests.values())


def _fitting(model: Any, keys: Path, pattern: str) -> Iterator[Request]:
    try:
        request = _resolved(model, keys, join(keys), "")
    except IntermediateError:
        return
    into_output = request.name.part == "output" and request.rest and isinstance(request.rest[0], str)
    if not into_output and all(isinstance(key, int | str) for key in request.rest):
        yield dataclasses.replace(request, pattern=pattern)


def _unfit(model: Any, path: str, keys: Path, prefix: str) -> str:
    every = [prefix + one for one in listed(model)]
    deep = (Wildcard("**"), *(keys if keys[0] != Wildcard("**") else keys[1:]))
    fits = any(matches(deep, one) for one in listed(model))
    return message(
        f"{prefix + path!r} fits nothing that is called",
        near=nearest((prefix + path).replace("*", ""), every),
        expected=f"one that fits some of {listing(every)}",
        fix=f"{prefix + join(deep)!r}, if it is to fit at any depth" if fits else None,
    )


def _resolved(model: Any, keys: Path, path: str, prefix: str) -> Request:
    node, at, depth = model, (), 0
    while depth < len(keys):
        below = _below(node, keys[depth])
        if below is None or (keys[depth] == "inputs" and is_callable(node) and not _holds_callables(below[1])):
            break
        node, at, depth = below[1], (*at, *below[0]), depth + 1
    method, rest = "__call__", keys[depth:]
    if rest and isinstance(rest[0], str) and rest[0] != "inputs" and _has_method(node, rest[0]):
        method, rest = rest[0], rest[1:]
    call = rest[0] if rest and isinstance(rest[0], int) else None
    rest = rest if call is None else rest[1:]
    part = "inputs" if rest and rest[0] == "inputs" else "output"
    rest = rest if part == "output" else rest[1:]
    if (method == "__call__" and not is_callable(node)) or (not at and method == "__call__" and depth < len(keys)):
        raise IntermediateError(_nowhere(model, at, keys[depth:], path, prefix))
    return Request(path, Name(at, method, part), call, rest)


def _holds_callables(node: Any) -> bool:
    return any(is_callable(part) for _, part in nodes(node))


def _has_method(node: Any, name: str) -> bool:
    is_one = callable(getattr(type(node), name, None)) and not isinstance(getattr(type(node), name), property)
    return isinstance(node, eqx.Module) and is_one


def _below(node: Any, key: Any) -> tuple[Path, Any] | None:
    """Keys from a node to what is below it under a key, and that; None: nothing is."""
    if isinstance(key, slice | tuple | Wildcard) or key is Ellipsis:
        return None
    if isinstance(node, list | tuple) and isinstance(key, int) and key < 0:
        key += len(node)
    if type(node) in (list, tuple):  # at once, since these may be long
        return ((key,), node[key]) if isinstance(key, int) and 0 <= key < len(node) else None
    parts = children(node)[0]
    if key in parts:
        return (key,), parts[key]
    if not isinstance(node, eqx.Module) or (isinstance(key, str) and _has_method(node, key)):
        return None
    try:  # a property, or an item of a module such as eqx.nn.Sequential: found again by identity
        alias = getattr(node, key) if isinstance(key, str) else node[key]  # pyright: ignore[reportIndexIssue]
    except Exception:  # whatever the user's code raises, it is no part
        return None
    if alias is None or isinstance(alias, bool | int | float | str | tuple):
        return None
    return next(((at, part) for at, part in nodes(node) if at and part is alias), None)


def into(model: Any, request: Request, prefix: str = "") -> str:
    """The message for a request that leads into a value, which has no such part, or is given as a whole only."""
    if isinstance(request.rest[0], str):  # more likely a submodule that is misspelt
        return _nowhere(model, request.name.at, request.rest, request.path, prefix)
    keys = parse(request.path)
    whole = prefix + join(keys[: len(keys) - len(request.rest)])
    return message(f"{request.path!r} leads into a value", fix=f"capture {whole!r}, and take of it what you need")


def _nowhere(model: Any, at: Path, rest: Path, path: str, prefix: str) -> str:
    node = model
    for key in at:
        node = children(node)[0][key]
    every, where, path = [prefix + one for one in listed(model)], join(at) or "the model", prefix + path
    near = nearest(path, every)
    if rest:
        first = join(rest[:1])
        held = isinstance(rest[0], str) and hasattr(node, rest[0])
        what = "is no part of the pytree (a static field, or computed)" if held else f"is nothing in {where}"
        inside = listing(join((key,)) for key in children(node)[0])
        return message(
            f"{path!r}: {first!r} {what}",
            near=near,
            expected=f"a submodule or method; in {where}: {inside or 'nothing'}",
        )
    if isinstance(node, jax.Array | np.ndarray):
        fix = f"its value is {join(('model', *at))!r}"
        return message(f"{path!r} is an array of the model, and no submodule that is called", near=near, fix=fix)
    below = [one for one in every if one.startswith(path)]
    return message(
        f"{path!r} is a {type(node).__name__}, which cannot be called",
        near=[] if below else near,
        expected=f"one of {listing(below)}" if below else "a module with a __call__, or one of its methods",
    )
