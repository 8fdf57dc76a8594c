"""What the annotations of something callable say, read once: `rules_of(target)`."""

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from equikd.errors import message
from equikd.losses import Loss
from equikd.metrics import Metric
from equikd.testing._parts import DrawError
from equikd.typing._annotation import Axis
from equikd.typing._nodes import DataclassNode, Node, PlainNode, walk
from equikd.typing._plan import name_of, nodes_of


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """What the annotations of something callable say; made once, drawn from often."""

    name: str
    signature: inspect.Signature
    """Without `self`."""
    nodes: Mapping[str, Node]
    """Parameter (and `return`) -> node."""
    fields: bool
    """Whether the parameters are the fields of a dataclass, so that `{self.x}` is one of them."""
    of_rows: bool = False
    """Whether it is what a loss or metric is of, whose `mask` is one bool for each row as the trainer gives it."""

    @property
    def axis_names(self) -> set[str]:
        """Axis names in the annotations, groups as `*b`."""
        found = {axis for node in self.nodes.values() for axis in _axes(node)}
        return {f"*{axis.name}" for axis in found if axis.kind == "variadic"} | {
            name for axis in found if axis.kind != "variadic" for name in axis.names
        }

    @property
    def holds_arrays(self) -> bool:
        """Whether any argument does."""
        return any(not isinstance(node, PlainNode) for name, node in self.nodes.items() if name != "return")

    @property
    def choosable(self) -> set[str]:
        """Names for `axes` and `where`: axes and arguments."""
        return self.axis_names | set(self.signature.parameters)


def rules_of(target: Any) -> tuple[Rules, Any]:
    """The rules of a function, bound method, class or callable instance, and the instance that it is bound to."""
    owner = None
    if isinstance(target, type):
        return _constructor(target), None
    if is_jitted_method(target):
        return rules_of_method(type(target.args[0]), target.func), target.args[0]
    if is_bound(target):
        owner, target = target.__self__, target.__func__
    elif not inspect.isroutine(target) and not hasattr(target, "__wrapped__") and not hasattr(target, "func"):
        owner, target = target, type(target).__call__
    signature = inspect.signature(target)
    if owner is not None:
        return rules_of_method(type(owner), target), owner
    if next(iter(signature.parameters), None) == "self":
        what = f"{name_of(target)}: a method needs its instance"
        raise DrawError(message(what, fix="give instance.method, or the class"))
    return Rules(name_of(target), signature, _nodes(target, signature), False), None


def rules_of_method(cls: type, function: Any) -> Rules:
    """The rules of a method whose first parameter, the instance, stands apart."""
    signature = inspect.signature(function)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    nodes = _nodes(function, signature)
    return Rules(name_of(function), signature, nodes, False, of_rows(cls) == getattr(function, "__name__", ""))


def of_rows(cls: type) -> str | None:
    """The method of a loss or metric that takes the arrays of a batch; None for any other class."""
    if issubclass(cls, Loss | Metric):
        return "values" if issubclass(cls, Loss) else "from_values"
    return None


def is_jitted_method(target: Any) -> bool:
    """Whether it is a method in `eqx.filter_jit`, which binds as a partial function of the instance."""
    if isinstance(target, functools.partial) or not hasattr(getattr(target, "func", None), "__wrapped__"):
        return False
    return len(target.args) == 1 and not target.keywords


def is_bound(target: Any) -> bool:
    """Whether it is a method of an instance; Equinox has a type of its own for those of modules."""
    return hasattr(target, "__self__") and hasattr(target, "__func__")


def _nodes(target: Any, signature: inspect.Signature) -> dict[str, Node]:
    nodes = nodes_of(target, signature)
    for name, parameter in signature.parameters.items():
        if name not in nodes and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            nodes[name] = PlainNode(inspect.Parameter.empty)
    return nodes


def _constructor(cls: type) -> Rules:
    signature = inspect.signature(cls)
    construct = inspect.unwrap(cls.__init__)
    generated = getattr(getattr(construct, "__code__", None), "co_filename", "") == "<string>"
    if dataclasses.is_dataclass(cls) and generated:
        fields = DataclassNode(cls, cls).fields
        nodes = {name: fields.get(name, PlainNode(inspect.Parameter.empty)) for name in signature.parameters}
        return Rules(cls.__name__, signature, nodes, True)
    return Rules(cls.__name__, signature, _nodes(construct, signature), False)


def _axes(node: Node) -> Iterator[Axis]:
    return (axis for _, rule in walk(node) for axis in rule.axes)


def order_of(rules: Rules) -> list[str]:
    """Parameters, those first that others have in braces, and those without arrays before those with.

    The mask of a loss or metric has rows and no more. Where its annotation says more, as in `b *n`, it is drawn first,
    so that the others have no more either; where it says nothing, as in `...`, last, since its rows are theirs.
    """
    braces = {
        name: frozenset().union(*(axis.expression.arguments for axis in _axes(node) if axis.expression))
        for name, node in rules.nodes.items()
    }
    rest = sorted(rules.signature.parameters, key=lambda name: not isinstance(rules.nodes.get(name), PlainNode))
    order: list[str] = []
    while rest:
        free = [name for name in rest if not (braces.get(name, frozenset()) - {name}) & set(rest)]
        order.append((free or rest)[0])
        rest.remove(order[-1])
    if rules.of_rows and "mask" in order:
        order.remove("mask")
        named = any(rule.names for _, rule in walk(rules.nodes["mask"])) if "mask" in rules.nodes else False
        order.insert(0 if named else len(order), "mask")
    return [name for name in order if name in rules.nodes]
