"""What may be meant where a module fails: names of a call and of its module's fields are not tied by being equal.

    class Net(eqx.Module):
        w: Float[Array, "o i"]

        def __call__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]: ...

The `i` of the call is any size, whatever `w` has; `{self.w.shape[1]}` is the one of the field.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from equikd.testing._arguments import Arguments
from equikd.typing._annotation import ArrayRule
from equikd.typing._nodes import ArrayNode, DataclassNode, Node, TupleNode, UnionNode, children, walk


def hints(call: Arguments, owner: Any) -> list[str]:
    """One line for each axis name of a call that has another size in a field of the instance that is called.

    Args:
        call: valid, and yet it failed.
        owner: the instance, with arrays or shapes; None for a function.
    """
    if not dataclasses.is_dataclass(owner) or isinstance(owner, type):
        return []
    found: dict[str, str] = {}
    for path, rule in _rules(DataclassNode(type(owner), type(owner))):
        for index, axis in enumerate(rule.axes):
            name = axis.name
            size = call.sizes.get(name) if axis.kind == "named" else None
            if size is None or name in found:
                continue
            tie = f"{{self.{path}.shape[{index}]}}"
            # What stands after axes of any number has no index; a name in a list or dict is that of every item.
            direct = "[...]" not in path and not any(one.many for one in rule.axes[:index])
            known = _size(owner, path, index) if direct else None
            if known == size:
                continue
            places = ", ".join(_where(call, name))
            said = f"axis {name!r} also stands in field {path.removesuffix('[...]')}"
            found[name] = (
                f"{said}, where it is {known}, not {size}; tie them with {tie} for {name} in {places}"
                if known is not None
                else f"{said}; tie them with a static field: {{self.size}} for {name} there and in {places}"
            )
    return list(found.values())


def _where(call: Arguments, name: str) -> Iterator[str]:
    """The parameters, or the result, in whose annotations a name stands."""
    for parameter, node in call.rules.nodes.items():
        if any(name in rule.names for _, rule in walk(node)):
            yield "the result" if parameter == "return" else parameter


def _rules(node: Node, path: str = "") -> Iterator[tuple[str, ArrayRule]]:
    """The rules in the fields of a class, not in those of instances within it, which have names of their own."""
    if isinstance(node, ArrayNode):
        yield path, node.rule
    elif not path or not isinstance(node, DataclassNode):
        for step, child in children(node).items():
            tells = isinstance(node, UnionNode)
            item = step if isinstance(node, TupleNode) or step.startswith(".") else "[...]"
            yield from _rules(child, path if tells else (path + item).removeprefix("."))


def _size(owner: Any, path: str, index: int) -> Any:
    """The size of an axis; None where there is no such array."""
    value = owner
    try:
        for step in path.replace("[", ".").replace("]", "").split("."):
            value = value[int(step)] if step.isdigit() else getattr(value, step)
        return value.shape[index]
    except (AttributeError, LookupError, TypeError):
        return None
