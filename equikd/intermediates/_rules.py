"""How a marked value gets out of each kind of equation.

jit              evaluated in place; explicit shardings stay as constraints
scan             the values of all iterations, stacked in front
cond, switch     the value of the branch that is taken; absent in the others: an error, zeros or nan
while            an error, or the value of the last iteration
checkpoint       an output of the rematerialised function, with the same policy
custom_jvp, _vjp the user's rule stays; the value is computed beside it, and no gradient flows back from it
all others       an error: a value must never come out wrong
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd.errors import listing, message
from equikd.intermediates._evaluate import Evaluation, Rule
from equikd.intermediates._jaxpr import bound, inner, kind, params_of, scan_split, typed_as
from equikd.intermediates._mark import Name, Ungraded
from equikd.tree import join

# How to ask for what no value comes out of otherwise.
ABSENT = 'absent="nan", or "zeros" (in a trainer: intermediates=ek.intermediates.Options(absent="nan"))'
LAST = 'while_loops="last" (in a trainer: intermediates=ek.intermediates.Options(while_loops="last"))'


class NoGradientWarning(UserWarning):
    """No gradient flows back from an intermediate: it lies inside of a function with a gradient rule of its own."""


def spelt(name: Name, call: int | None = None) -> str:
    """A name as the user writes it, and which of its calls.

    Example:
        >>> spelt(Name(("layers", 0), "scores"))
        'layers[0].scores'
        >>> spelt(Name(("head",), part="inputs"), 1)
        'head[1].inputs'
    """
    at = (*name.at, *(() if name.method == "__call__" else (name.method,)))
    return join((*at, *(() if call is None else (call,)), *(("inputs",) if name.part == "inputs" else ())))


def _mark(eqn: Any, run: Evaluation, values: list[Any]) -> list[Any]:
    name, treedef = eqn.params["mark"], eqn.params["treedef"]
    perturbation = run.take({name: 1}).get(name, [None])[0]
    if perturbation is not None:
        leaves = treedef.flatten_up_to(perturbation)
        values = [_perturbed(value, one) for value, one in zip(values, leaves, strict=True)]
    run.catch({name: [jax.tree.unflatten(treedef, values[: treedef.num_leaves])]})
    return values


def _perturbed(value: Any, by: Any) -> Any:
    return value if by is None else value + jnp.asarray(by, value.dtype)


def _jit(eqn: Any, run: Evaluation, values: list[Any]) -> list[Any]:
    with jax.named_scope(eqn.params["name"]):
        outs = run.run(eqn.params["jaxpr"], *_constrained(values, eqn.params["in_shardings"]))
    return _constrained(outs, eqn.params["out_shardings"])


def _constrained(values: list[Any], shardings: Any) -> list[Any]:
    return [
        value if type(one).__name__ == "UnspecifiedValue" else jax.lax.with_sharding_constraint(value, one)
        for value, one in zip(values, shardings, strict=True)
    ]


def _call(eqn: Any, run: Evaluation, values: list[Any]) -> list[Any]:
    (jaxpr,) = inner(eqn)
    return run.run(jaxpr, *values)


def _scan(eqn: Any, run: Evaluation, values: list[Any]) -> list[Any]:
    params, jaxpr = eqn.params, eqn.params["jaxpr"]
    constants, carried = scan_split(eqn)
    function = run.pure(jaxpr)

    def body(carry: list[Any], of_iteration: tuple[Any, list[Any]]) -> tuple[list[Any], Any]:
        perturbations, scanned = of_iteration
        outs, caught = function(perturbations, *values[:constants], *carry, *scanned)
        return outs[:carried], (outs[carried:], caught)

    settings = {name: params[name] for name in ("length", "reverse", "unroll", "_split_transpose") if name in params}
    scanned = (run.take(run.counts(jaxpr)), values[constants + carried :])
    carry, (outs, caught) = jax.lax.scan(body, values[constants : constants + carried], scanned, **settings)
    run.catch(caught)
    return [*carry, *outs]


def _cond(eqn: Any, run: Evaluation, values: list[Any]) -> list[Any]:
    branches = eqn.params["branches"]
    functions = [run.pure(branch) for branch in branches]
    perturbations = run.take(functools.reduce(lambda one, other: one | other, map(run.counts, branches)))
    each = [jax.eval_shape(function, perturbations, *values[1:])[1] for function in functions]
    whole = {name: max((caught.get(name, []) for caught in each), key=len) for caught in each for name in caught}
    refused = {name: _refusal(name, shapes, each, branches, run) for name, shapes in whole.items()}
    refused = {name: why for name, why in refused.items() if why is not None}
    counts = {name: len(whole.pop(name)) for name in refused}

    def branch_of(function: Callable[..., Any]) -> Callable[..., Any]:
        def branch(perturbations: Any, *operands: Any) -> Any:
            outs, caught = function(perturbations, *operands)
            absent = run.shared.options.absent
            filled = {
                name: [*caught.get(name, []), *_substitutes(shapes[len(caught.get(name, [])) :], absent)]
                for name, shapes in whole.items()
            }
            return outs, filled

        return branch

    outs, caught = jax.lax.switch(values[0], list(map(branch_of, functions)), perturbations, *values[1:])
    run.catch(caught)
    run.refuse(counts, refused.__getitem__)
    return outs


def _refusal(
    name: Name, whole: list[Any], each: list[dict[Name, list[Any]]], branches: Any, run: Evaluation
) -> str | None:
    """Why the calls of a name have no value that all branches give in the same way; None: they have."""
    around = "capture the module around it"
    of_branches = [caught.get(name, []) for caught in each]
    differ = [one for calls in of_branches for one, shape in zip(calls, whole, strict=False) if not _alike(one, shape)]
    if differ:
        return message(
            f"{spelt(name)} has different shapes in the branches of a cond or switch",
            got=f"{_shapes(differ[0])} and {_shapes(whole[0])}",
            fix=f"{around}, or reduce it where it is computed: ek.capture(fn, {{path: reduce}})",
        )
    if run.shared.options.absent == "error" and any(len(calls) < len(whole) for calls in of_branches):
        return message(
            f"{spelt(name)} is computed in some branches of a cond or switch only, so it may have no value",
            expected="a value whatever branch is taken",
            fix=f"{around}, or say what stands for it in the others: {ABSENT}",
        )
    statics = [[site.static for site in run.sites(branch) if site.name == name] for branch in branches]
    longest = max(statics, key=len)
    if all(eqx.tree_equal(one, other) for calls in statics for one, other in zip(calls, longest, strict=False)):
        return None
    what = f"{spelt(name)} has different parts, besides arrays, in the branches of a cond or switch"
    return message(what, fix=around)


def _alike(one: Any, other: Any) -> bool:
    same_tree = jax.tree.structure(one) == jax.tree.structure(other)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False)
    return same_tree and all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def _shapes(tree: Any) -> str:
    return listing(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree))


def _substitutes(shapes: Any, absent: str) -> Any:
    """What stands for values that are not computed: zeros, or nan where there is such a number."""

    def substitute(shape: Any) -> jax.Array:
        has_nan = absent == "nan" and jnp.issubdtype(shape.dtype, jnp.inexact)
        of_shape = jnp.full(shape.shape, jnp.nan, shape.dtype) if has_nan else jnp.zeros(shape.shape, shape.dtype)
        return typed_as(of_shape, shape)

    return jax.tree.map(substitute, shapes)


def _while(eqn: Any, run: Evaluation, values: list[Any]) -> list[Any]:
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    if run.shared.options.while_loops != "last" or run.sites(condition):
        fix = f"take the value of the last iteration: {LAST}\na scan gives all of them"
        fix = None if run.sites(condition) else fix
        what = "is computed in a while loop, which has as many values as it has iterations"
        run.refuse(run.counts_in(eqn), lambda name: message(f"{spelt(name)} {what}", fix=fix))
        return bound(eqn, values)
    run.take(run.counts(body))
    carried = len(eqn.outvars)
    of_condition, of_body = (len(jaxpr.in_avals) - carried for jaxpr in (condition, body))
    constants, init = values[of_condition : of_condition + of_body], values[of_condition + of_body :]
    function = run.pure(body)
    goes_on = lambda carry: run.pure(condition)({}, *values[:of_condition], *carry)[0][0]

    def step(both: Any) -> Any:
        new = function({}, *constants, *both[0])
        return jax.tree.map(functools.partial(_of_rows, goes_on(both[0])), tuple(new), both)

    before = _substitutes(jax.eval_shape(function, {}, *constants, *init)[1], "nan")
    outs, caught = jax.lax.while_loop(lambda both: jnp.any(goes_on(both[0])), step, (init, before))
    run.catch(_ungraded(caught, "while loop"))
    return outs


def _of_rows(goes_on: Any, new: Any, old: Any) -> Any:
    """What an iteration gives: where the condition is mapped (it has axes), rows that are done keep what they have."""
    if goes_on.ndim == 0 or new.shape[: goes_on.ndim] != goes_on.shape:
        return new
    return jnp.where(goes_on.reshape(goes_on.shape + (1,) * (new.ndim - goes_on.ndim)), new, old)


def _ungraded(caught: dict[Name, list[Any]], inside: str) -> dict[Name, list[Any]]:
    return {name: [Ungraded(value, inside) for value in calls] for name, calls in caught.items()}


def _checkpoint(eqn: Any, run: Evaluation, values: list[Any]) -> list[Any]:
    params = params_of(eqn)
    function = jax.checkpoint(run.pure(params["jaxpr"]), prevent_cse=params["prevent_cse"], policy=params["policy"])
    outs, caught = function(run.take(run.counts(params["jaxpr"])), *values)
    run.catch(caught)
    return outs


def _custom(eqn: Any, run: Evaluation, values: list[Any]) -> list[Any]:
    (jaxpr,) = [one for one in inner(eqn) if run.sites(one)]
    run.take(run.counts(jaxpr))
    _, caught = run.pure(jaxpr, quiet=True)({}, *jax.lax.stop_gradient(values))
    run.catch(_ungraded(jax.lax.stop_gradient(caught), kind(eqn)))
    return bound(eqn, values)


def _unknown(eqn: Any, run: Evaluation, values: list[Any]) -> list[Any]:
    fix = "capture the module around it, or call ek.capture inside of that function"
    what = f"is computed inside of a {kind(eqn)}, which no value can be taken out of"
    run.refuse(run.counts_in(eqn), lambda name: message(f"{spelt(name)} {what}", fix=fix))
    return bound(eqn, values)


RULES: dict[str, Rule] = {
    "": _unknown,
    "equikd_mark": _mark,
    "jit": _jit,
    "scan": _scan,
    "cond": _cond,
    "while": _while,
    "checkpoint": _checkpoint,
    "custom_jvp_call": _custom,
    "custom_vjp_call": _custom,
    "custom_vmap_call": _custom,
    "closed_call": _call,
    "core_call": _call,
    "eval_jaxpr": _call,
}
