"""`capture`: a function of a model becomes one that also gives what chosen submodules return."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax

from equikd.errors import listing, message, report
from equikd.intermediates._errors import IntermediateError
from equikd.intermediates._mark import Weakly, is_jax_array
from equikd.intermediates._options import Absent, Options, WhileLoops
from equikd.intermediates._paths import Request, found, into
from equikd.intermediates._perturb import placed
from equikd.intermediates._rules import NoGradientWarning, spelt
from equikd.intermediates._run import Call as Call
from equikd.intermediates._run import Captured as Captured
from equikd.intermediates._run import run_tapped as run_tapped
from equikd.intermediates._run import traced
from equikd.tree import PathError, get, join, named_leaves, parse


def capture(
    function: Callable[..., Any],
    paths: str | Iterable[str] | Mapping[str, Callable[[Any], Any] | None],
    *,
    while_loops: WhileLoops = "error",
    absent: Absent = "error",
    perturb: Mapping[str, Any] | None = None,
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A function that also gives what submodules of its model return.

    Axes of a value: those of the scans around the call, outermost first, those of `vmap`, newest first, its own. Under
    a `vmap` around `capture` itself the mapped axis comes first of all.

    Args:
        function: takes a model first, then anything. It is called once.
        paths: of submodules: `"encoder.layers[1]"`, `"encoder.scores"` (a method), `"cell[2]"` (the third call, or
            iteration of a scan), `"encoder.inputs[0]"`, `"encoder.logits"` (an item of what it returns), or patterns,
            `"blocks[*].attention"`. As a dict, path -> a function of the value, which is applied where that is
            computed, so that no more is kept (None: all of it).
        while_loops: "last" gives the value of the last iteration (nan where there is none); "error" refuses.
        absent: what stands for a value that the branch taken does not compute: "zeros", or "nan" (0 for integers);
            "error" refuses what only some branches of a `cond` or `switch` compute.
        perturb: path -> an array or pytree, of the shape of the value, that is added to it on its way through the
            model: the gradient with respect to zeros is that with respect to the value. See `gradients`.

    Returns:
        `(model, *args, **kwargs) -> (out, {path: value})`, of a pattern by the paths that fit and are called. The
        output, and the gradients, are those of `function`.

    Raises:
        IntermediateError: at the call: paths that lead nowhere, are not called, or several times, with near matches;
            values that cannot be taken out of where they are computed. All at once.

    Warns:
        NoGradientWarning: a value lies inside of a `custom_jvp` or `custom_vjp` function; it is right, but no gradient
            flows back from it.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> model = eqx.nn.MLP(3, 2, width_size=8, depth=2, key=jax.random.key(0))
        >>> forward = lambda model, x: jax.vmap(model)(x)
        >>> out, found = capture(forward, ["layers[1]", "layers[-1]"])(model, jnp.ones((5, 3)))
        >>> out.shape, {path: value.shape for path, value in found.items()}
        ((5, 2), {'layers[1]': (5, 8), 'layers[-1]': (5, 2)})
    """
    reduced = dict(paths) if isinstance(paths, Mapping) else dict.fromkeys([paths] if isinstance(paths, str) else paths)
    options, added = Options(while_loops, absent), dict(perturb or {})
    wrong = [f"{path!r}: {reduce!r}" for path, reduce in reduced.items() if not _is_request(path, reduce)]
    if wrong:
        expected = "paths, or a dict of paths to functions of the value"
        raise IntermediateError(
            message("capture: no path, or nothing to keep", got="\n".join(wrong), expected=expected)
        )

    def capturing(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if not reduced:
            return function(model, *args, **kwargs), {}
        requests, unknown = requested(model, reduced)
        if not requests:
            raise _failed([*unknown.values()])
        names = [request.name for request in requests]
        program = traced(function, model, args, kwargs, names=names, options=options)
        perturbations, wrong = placed({p: by for p, by in added.items() if p not in unknown}, requests, program.sites())
        got = program.run({} if wrong else perturbations)
        values, failed = _parts(model, requests, *picked(got, requests))
        failed |= _idle_patterns(requests, got)
        failed |= {r.path: _ungradable(r, got) for r in requests if r.path in added and inside_of(r, got)}
        if unknown or failed or wrong:
            raise _failed([*unknown.values(), *failed.values(), *wrong])
        warn_ungraded(got, requests)
        return got.out, values

    return capturing


def _idle_patterns(requests: Iterable[Request], got: Captured) -> dict[str, str]:
    """Messages of patterns that fit submodules of which none is called."""
    called = {request.pattern: False for request in requests if request.pattern}
    for request in requests:
        called[request.pattern] = called.get(request.pattern, False) or bool(got.calls.get(request.name))
    fix = "`equikd paths MODULE`, and ek.intermediates.available, list what is called"
    idle = [pattern for pattern, is_called in called.items() if pattern and not is_called]
    return {pattern: message(f"{pattern!r}: of what fits, nothing is called", fix=fix) for pattern in idle}


def _is_request(path: Any, reduce: Any) -> bool:
    return isinstance(path, str) and (reduce is None or callable(reduce))


def requested(model: Any, paths: Mapping[str, Callable[[Any], Any] | None]) -> tuple[list[Request], dict[str, str]]:
    """What paths and patterns name in a model, and messages of those that name nothing."""
    requests: list[Request] = []
    failures: dict[str, str] = {}
    for path, reduce in paths.items():
        try:
            of_path = found(model, path)
        except IntermediateError as error:
            failures[path] = str(error)
        else:
            reduced = None if reduce is None else Weakly(reduce)
            requests += [dataclasses.replace(r, name=dataclasses.replace(r.name, reduce=reduced)) for r in of_path]
    return requests, failures


def picked(
    got: Captured, requests: Iterable[Request], *, prefix: str = "", axis: int = 0
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of requests by path, and messages of those that have none.

    Args:
        got: what was captured.
        requests: what is asked for.
        prefix: what messages put before paths.
        axis: which axis of a value is that of the outermost scan.
    """
    values: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for request in sorted(requests, key=lambda request: not request.optional):  # what is named goes before patterns
        calls, path = got.calls.get(request.name, []), request.path
        if request.optional and request.call is None:
            refused = [call.refused for call in calls if call.refused is not None]
            failures |= {path: refused[0]} if refused else {}
            several = len(calls) > 1
            rest = join(request.rest)
            rest = rest if rest.startswith("[") or not rest else f".{rest}"
            spellings = [spelt(request.name, at) + rest for at in range(len(calls))] if several else [path] * len(calls)
            for at, call in zip(spellings, calls, strict=True):
                with contextlib.suppress(PathError):  # of many, not each has such a part
                    values[at] = get(call.value, request.rest)
        elif request.optional and not calls:
            continue
        else:
            try:
                values[path] = _pick(request, calls, prefix, axis)
            except IntermediateError as error:
                failures[path] = str(error)
    return values, failures


def _pick(request: Request, calls: list[Call], prefix: str, axis: int) -> Any:
    path, index, base = prefix + request.path, request.call, prefix + spelt(request.name)
    if not calls:
        what = "is not called, or what it returns holds no array of JAX"
        fix = "`equikd paths MODULE`, and ek.intermediates.available, list what is called"
        if request.name.reduce is not None:
            what, fix = (
                "is not called, or what is kept of it holds no array of JAX",
                f"{fix}\nkeep arrays: jnp.sum, say",
            )
        raise IntermediateError(message(f"{path!r} {what}", fix=fix))
    if index is None and len(calls) > 1:
        each = listing([prefix + spelt(request.name, at) for at in range(len(calls))], 4)
        raise IntermediateError(message(f"{path!r} is called {len(calls)} times", fix=f"say which call: {each}"))
    if len(calls) == 1 and calls[0].loops and index is not None and calls[0].refused is None:
        length = jax.tree.leaves(eqx.filter(calls[0].value, is_jax_array))[0].shape[axis]
        if not -length <= index < length:
            raise IntermediateError(message(f"{path!r}: the scan around it has {length} iterations"))
        at = (slice(None),) * axis + (index,)
        return jax.tree.map(lambda leaf: leaf[at] if is_jax_array(leaf) else leaf, calls[0].value)
    if index is not None and not -len(calls) <= index < len(calls):
        times = "once" if len(calls) == 1 else f"{len(calls)} times"
        is_item = isinstance(calls[0].value, list | tuple) and -len(calls[0].value) <= index < len(calls[0].value)
        fix = f"an item of what it returns comes after the number of the call: {base}[0][{index}]" if is_item else None
        raise IntermediateError(message(f"{path!r}: {base} is called {times}", fix=fix))
    call = calls[index or 0]
    if call.refused is not None:
        raise IntermediateError(call.refused)
    return call.value


def inside_of(request: Request, got: Captured) -> str | None:
    """What the call that is asked for is computed in, where no gradient flows back from it."""
    calls = got.calls.get(request.name, [])
    if request.call is not None and len(calls) > 1:
        calls = calls[request.call : request.call + 1 or None]
    return next((call.ungraded for call in calls if call.ungraded is not None), None)


def _parts(
    model: Any, requests: list[Request], values: dict[str, Any], failed: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and failures, where a path may lead into a value; rather a misspelt submodule than a part of one."""
    for request in requests:
        path, rest = request.path, request.rest
        if request.optional and request.call is None:
            continue
        if rest and path in values:
            try:
                values[path] = get(values[path], rest)
            except PathError:
                failed[path] = _no_part(model, request, values[path])
        elif rest and request.name.part == "output" and path in failed and isinstance(rest[0], str):
            failed[path] = into(model, request)
    return values, failed


def _no_part(model: Any, request: Request, value: Any) -> str:
    of_output = request.name.part == "output" and isinstance(request.rest[0], str)
    if of_output or not all(isinstance(key, int | str) for key in request.rest):
        return into(model, request)
    keys = parse(request.path)
    whole = keys[: len(keys) - len(request.rest)]
    parts = listing(join((*whole, *parse(part))) for part in named_leaves(value)) or "nothing"
    return message(f"{request.path!r}: the value has no such part", expected=f"one of {parts}")


def _ungradable(request: Request, got: Captured) -> str:
    return message(f"{request.path!r} has no gradient: it is computed inside of a {inside_of(request, got)}")


def warn_ungraded(got: Captured, requests: Iterable[Request]) -> None:
    """Say which values no gradient flows back from; Python shows a warning once."""
    found = {request.path: inside_of(request, got) for request in requests}
    inside = {path: why for path, why in found.items() if why not in (None, "while loop")}  # JAX refuses that itself
    if inside:
        text = f"{listing(inside)}: inside of a {listing(dict.fromkeys(inside.values()))}, so no gradient flows back"
        warnings.warn(text, NoGradientWarning, stacklevel=3)


def _failed(messages: list[str]) -> IntermediateError:
    return IntermediateError(report(f"{len(messages)} intermediates cannot be had", messages))
