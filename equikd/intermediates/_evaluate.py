"""The transform: a function is traced, and its jaxpr evaluated again with the marked values as further outputs.

The evaluation takes place under whatever is tracing at the moment, so `jit`, `grad`, `vmap` and `scan` around it see
ordinary operations. Equations without a wanted mark are bound as they stand; those that hold one, such as a loop, are
built again through the public function (`_rules.py`), so that the value comes out of them. A value that cannot come
out is noted, with the reason, and the equation bound as it stands: all that is wrong is told at once.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from equikd.intermediates._jaxpr import bound, inner, kind, parts, place_of, value_of
from equikd.intermediates._mark import Name, Refused, mark_p
from equikd.intermediates._options import Options


class Site(NamedTuple):
    """One marked equation of a jaxpr.

    Attributes:
        eqn: the equation.
        lengths: of the scans around it, outermost first.
        begins: when it is computed: how many marks come before it, or before the outermost scan around it.
    """

    eqn: Any
    lengths: tuple[int, ...]
    begins: int

    @property
    def name(self) -> Name:
        """What the mark says."""
        return self.eqn.params["mark"]

    @property
    def static(self) -> Any:
        """The parts of the value that are no arrays."""
        return self.eqn.params["static"].value


@dataclasses.dataclass
class Shared:
    """What all parts of one evaluation have in common.

    Attributes:
        rules: what is done with an equation that holds a mark, by its kind; under "" for all other kinds.
        options: how values are taken out.
        wanted: what marks are looked for; None: all.
        sites: the marks of each jaxpr by its id, with the jaxpr, so that the id is not used again.
    """

    rules: Mapping[str, "Rule"]
    options: Options
    wanted: frozenset[Name] | None
    sites: dict[int, tuple[Any, list[Site]]] = dataclasses.field(default_factory=dict)


class Evaluation:
    """The evaluation of a jaxpr, or of a part of one.

    Attributes:
        shared: what it has in common with the other parts.
        pending: name -> perturbations of the calls that are still to come; None for a call without.
        quiet: whether callbacks are left out, as where something is computed a second time.
        caught: name -> values of the calls so far.
    """

    def __init__(self, shared: Shared, pending: Mapping[Name, list[Any]] | None = None, *, quiet: bool = False) -> None:
        self.shared, self.pending, self.quiet = shared, dict(pending or {}), quiet
        self.caught: dict[Name, list[Any]] = {}

    def wants(self, eqn: Any) -> bool:
        """Whether an equation is a mark that is looked for."""
        return eqn.primitive is mark_p and (self.shared.wanted is None or eqn.params["mark"] in self.shared.wanted)

    def sites(self, jaxpr: Any) -> list[Site]:
        """The wanted marks of a jaxpr in the order of execution; of branches, for each name the one with most."""
        if id(jaxpr) not in self.shared.sites:
            self.shared.sites[id(jaxpr)] = jaxpr, _in_turn(map(self._sites_of, jaxpr.eqns))
        return self.shared.sites[id(jaxpr)][1]

    def _sites_of(self, eqn: Any) -> list[Site]:
        if self.wants(eqn):
            return [Site(eqn, (), 0)]
        each = [self.sites(jaxpr) for jaxpr in inner(eqn)]
        if kind(eqn) == "cond":
            most: dict[Name, list[Site]] = {}
            for sites in each:
                for name, of_name in _by_name(sites).items():
                    most[name] = max(most.get(name, []), of_name, key=len)
            each = list(most.values())
        sites = _in_turn(each)
        if kind(eqn) != "scan":
            return sites
        return [Site(site.eqn, (eqn.params["length"], *site.lengths), 0) for site in sites]

    def counts(self, jaxpr: Any) -> Counter[Name]:
        """How many calls of each name a jaxpr makes."""
        return Counter(site.name for site in self.sites(jaxpr))

    def take(self, counts: Mapping[Name, int]) -> dict[Name, list[Any]]:
        """The perturbations of the next calls, which are no longer pending."""
        taken = {name: self.pending[name][:count] for name, count in counts.items() if self.pending.get(name)}
        self.pending |= {name: self.pending[name][counts[name] :] for name in taken}
        return taken

    def catch(self, values: Mapping[Name, Iterable[Any]]) -> None:
        """Note the values of further calls."""
        for name, of_name in values.items():
            self.caught.setdefault(name, []).extend(of_name)

    def refuse(self, counts: Mapping[Name, int], why: Callable[[Name], str]) -> None:
        """Note that the values of the next calls cannot come out."""
        self.take(counts)
        self.catch({name: [Refused(why(name))] * count for name, count in counts.items()})

    def counts_in(self, eqn: Any) -> Counter[Name]:
        """How many calls of each name the jaxprs of an equation make."""
        return Counter(site.name for site in self._sites_of(eqn))

    def pure(self, jaxpr: Any, *, quiet: bool = False) -> Callable[..., Any]:
        """A jaxpr as a function of perturbations and operands to outputs and catches, which closes over no tracer."""

        def function(perturbations: dict[Name, list[Any]], *values: Any) -> tuple[list[Any], dict[Name, list[Any]]]:
            part = Evaluation(self.shared, perturbations, quiet=quiet or self.quiet)
            outs = part.run(jaxpr, *values)
            return outs, part.caught

        return function

    def run(self, jaxpr: Any, *values: Any) -> list[Any]:
        """The outputs of a jaxpr."""
        jaxpr, constants = parts(jaxpr)
        environment: dict[Any, Any] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *values], strict=True),
        )
        for eqn in jaxpr.eqns:
            if self.quiet and not eqn.outvars:
                continue
            with place_of(eqn):
                operands = [value_of(atom, environment) for atom in eqn.invars]
                marked = self.wants(eqn) or any(self.sites(one) for one in inner(eqn))
                outs = self._rule(eqn)(eqn, self, operands) if marked else bound(eqn, operands)
            environment.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(atom, environment) for atom in jaxpr.outvars]

    def _rule(self, eqn: Any) -> "Rule":
        return self.shared.rules.get(kind(eqn), self.shared.rules[""])


def _in_turn(each: Iterable[list[Site]]) -> list[Site]:
    """Sites of what is computed one after the other."""
    found: list[Site] = []
    for sites in each:
        before = len(found)
        found += [site._replace(begins=before + site.begins) for site in sites]
    return found


def _by_name(sites: Iterable[Site]) -> dict[Name, list[Site]]:
    found: dict[Name, list[Site]] = {}
    for site in sites:
        found.setdefault(site.name, []).append(site)
    return found


Rule = Callable[[Any, Evaluation, list[Any]], list[Any]]
