"""Perturbations: what is added to captured values on their way through the model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from equikd.errors import listing, message, nearest
from equikd.intermediates._errors import IntermediateError
from equikd.intermediates._evaluate import Site
from equikd.intermediates._mark import Name
from equikd.intermediates._paths import Request
from equikd.tree import get


def placed(
    added: Mapping[str, Any], requests: list[Request], sites: list[Site]
) -> tuple[dict[Name, list[Any]], list[str]]:
    """Name -> what is added to its calls, in order; and messages of what can be added nowhere.

    Args:
        added: path -> what is added to the value of that path.
        requests: what is asked for.
        sites: all calls, in order.
    """
    by_path = {request.path: request for request in requests}
    found: dict[Name, list[Any]] = {}
    wrong: list[str] = []
    for path, value in added.items():
        try:
            request = _requested(path, by_path)
            of_name = [site for site in sites if site.name == request.name]
            _place(value, request, of_name, found.setdefault(request.name, [None] * len(of_name)))
        except IntermediateError as error:
            wrong.append(str(error))
    return found, wrong


def _requested(path: str, by_path: Mapping[str, Request]) -> Request:
    if path not in by_path:
        what = f"perturb: {path!r} is not among the paths"
        raise IntermediateError(message(what, near=nearest(path, by_path), expected=listing(by_path)))
    if by_path[path].name.reduce is not None:
        raise IntermediateError(message(f"perturb: {path!r} is reduced", expected="a path whose value is whole"))
    return by_path[path]


def _place(value: Any, request: Request, sites: list[Site], calls: list[Any]) -> None:
    one_iteration = len(sites) == 1 and sites[0].lengths and request.call is not None
    at = 0 if one_iteration else request.call or 0
    if not -len(sites) <= at < len(sites) or (request.call is None and len(sites) > 1):
        return  # there is no such call: told with the value
    site = sites[at]
    treedef, count = site.eqn.params["treedef"], site.eqn.params["treedef"].num_leaves
    avals = [variable.aval for variable in site.eqn.outvars[:count]]
    leaves = list(treedef.flatten_up_to(calls[at])) if calls[at] is not None else [None] * count
    for index, leaf in _leaves(value, request, treedef):
        shape, dtype = (*site.lengths, *avals[index].shape), avals[index].dtype
        _check(leaf, shape[1:] if one_iteration else shape, dtype, request.path)
        whole = jnp.zeros(shape, dtype).at[request.call].set(leaf) if one_iteration else leaf
        leaves[index] = whole if leaves[index] is None else leaves[index] + whole
    calls[at] = treedef.unflatten(leaves)


def _leaves(value: Any, request: Request, treedef: Any) -> list[tuple[int, Any]]:
    """The leaves of what is added, each with its number among those of the value; without those that are None."""
    indices, of_part = jax.tree.flatten(get(treedef.unflatten(range(treedef.num_leaves)), request.rest))
    try:
        leaves = of_part.flatten_up_to(value)
    except ValueError as error:
        text = message(f"perturb: {request.path!r} has another structure than the value", got=str(error))
        raise IntermediateError(text) from None
    return [(index, leaf) for index, leaf in zip(indices, leaves, strict=True) if leaf is not None]


def _check(leaf: Any, shape: tuple[int, ...], dtype: Any, path: str) -> None:
    if jnp.shape(leaf) != shape or not jnp.issubdtype(dtype, jnp.inexact):
        got = f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        expected = f"{dtype}{list(shape)}" if jnp.issubdtype(dtype, jnp.inexact) else f"None, the value being {dtype}"
        raise IntermediateError(message(f"perturb: {path!r} does not fit the value", got=got, expected=expected))
