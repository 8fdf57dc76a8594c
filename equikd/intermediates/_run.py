"""One run of a tapped model: traced, and evaluated again with what its submodules give."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax

from equikd.intermediates._evaluate import Evaluation, Shared, Site
from equikd.intermediates._mark import Name, Refused, Ungraded, deeper, is_jax_array
from equikd.intermediates._options import Options
from equikd.intermediates._rules import RULES
from equikd.intermediates._tap import tapped, untapped


class Call(NamedTuple):
    """The value of one call of a submodule.

    Attributes:
        value: what it returned, or its inputs; behind axes for the scans around it, outermost first.
        loops: how many such axes there are.
        order: when it is called: rises with time, and is the same number for all that one scan computes.
        refused: why there is no value; None: there is one.
        ungraded: what it is computed in that no gradient flows back through; None: one does.
        at: how many calls come before it, within an iteration where a scan is around it.
    """

    value: Any
    loops: int
    order: int
    refused: str | None = None
    ungraded: str | None = None
    at: int = 0


class Captured(NamedTuple):
    """What a run of a tapped model has given.

    Attributes:
        out: what the function returned.
        calls: the calls of each name.
    """

    out: Any
    calls: dict[Name, list[Call]]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of a tapped model, traced and not yet evaluated.

    Attributes:
        jaxpr: what it computes; the arrays of the model and of the arguments are constants of it.
        combined: the output of the function from the outputs of the jaxpr.
        shared: what all parts of the evaluation have in common.
    """

    jaxpr: Any
    combined: Callable[[list[Any]], Any]
    shared: Shared

    def sites(self) -> list[Site]:
        """The marks in the order of execution."""
        return Evaluation(self.shared).sites(self.jaxpr)

    def run(self, perturbations: Mapping[Name, list[Any]] | None = None) -> Captured:
        """Evaluate it; see `run_tapped`."""
        run = Evaluation(self.shared, perturbations)
        out = self.combined(run.run(self.jaxpr))
        return Captured(out, _calls(run, self.sites()))


def traced(
    function: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    names: Iterable[Name],
    options: Options,
) -> Traced:
    """A function, traced on the tapped model; see `run_tapped`."""
    names = frozenset(names)
    rest: list[Any] = []

    def flat() -> Any:
        # The arrays are closed over, and so are to the function what they are without this: concrete ones may decide
        # on control flow, and gradient rules that close over them find them again when they are called, later.
        with deeper():
            out = untapped(function(tapped(model, names), *args, **kwargs), names)
            out, other = eqx.partition(out, is_jax_array)
        rest.append(other)
        return out

    with jax.disable_jit(False):  # where jit is disabled, loops would be unrolled
        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)()
    structure = jax.tree.structure(shape)
    combined = lambda outs: eqx.combine(jax.tree.unflatten(structure, outs), rest[-1])
    return Traced(jaxpr, combined, Shared(RULES, options, names))


def run_tapped(
    function: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    names: Iterable[Name],
    options: Options,
    perturbations: Mapping[Name, list[Any]] | None = None,
) -> Captured:
    """What a function of a model returns, and what the submodules named gave while it ran.

    Args:
        function: called on the tapped model.
        model: any pytree of modules.
        args: further arguments, any pytrees.
        kwargs: likewise.
        names: what is looked for.
        options: how values are taken out of loops and branches.
        perturbations: name -> what is added to the values of its calls, in order; None for a call without.
    """
    return traced(function, model, args, kwargs, names=names, options=options).run(perturbations)


def _calls(run: Evaluation, sites: list[Site]) -> dict[Name, list[Call]]:
    calls: dict[Name, list[Call]] = {}
    seen: Counter[Name] = Counter()
    for at, site in enumerate(sites):
        caught, inside = run.caught[site.name][seen[site.name]], None
        seen[site.name] += 1
        while isinstance(caught, Ungraded):
            caught, inside = caught.value, inside or caught.inside
        refused = caught.why if isinstance(caught, Refused) else None
        value = (
            untapped(eqx.combine(caught, site.static), run.shared.wanted or frozenset()) if refused is None else None
        )
        calls.setdefault(site.name, []).append(Call(value, len(site.lengths), site.begins, refused, inside, at))
    return calls
