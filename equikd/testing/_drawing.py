"""From an annotation's node to drawn parts: the binder of `equikd.typing`, run backwards.

A name gets a size at its first use, and the same one wherever it stands in that scope; an expression is evaluated; a
`#` axis is 1 now and then; a union takes one of its members. Sizes are small, and different where there is a choice:
two axes of one size would hide that they were swapped.
"""

import collections
import collections.abc
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AnnotationError

from equikd.testing._contradictions import is_size
from equikd.testing._parts import Fixed, Group, Leaf, Part, Scope, Undrawable, built, shaped
from equikd.typing._annotation import ArrayRule, Axis
from equikd.typing._nodes import (
    ArrayNode,
    DataclassNode,
    FieldsNode,
    MappingNode,
    NamedTupleNode,
    Node,
    PlainNode,
    PyTreeNode,
    SequenceNode,
    TupleNode,
    TypedDictNode,
    UnionNode,
    children,
)
from equikd.wiring import KeyPath

_LARGEST = 6
_MOST_ITEMS = 3
_DEEPEST = 3  # a class that holds itself, or a list of itself, ends here
_USUAL = ("float32", "int32", "bool", "complex64", "prng_key", "uint32")
_OTHERS = ("bfloat16", "float16", "int8", "uint8", "int16", "uint16")
_WIDE = ("float64", "int64", "uint64", "complex128")
_STRUCTURES = (0, (0,), {"a": 0, "b": 0}, (0, [0]), {"p": (0, 0), "q": [0]})
MISSING: Any = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for; see `arguments`."""

    axes: Mapping[str, Any]
    given: Mapping[str, Any]
    dtypes: Literal["usual", "all"]


class Drawing:
    """One draw of one call.

    Args:
        draw: Hypothesis' function, strategy -> value.
        options: axes, given values, dtypes.
    """

    def __init__(self, draw: Callable[[Any], Any], options: Options) -> None:
        from hypothesis import strategies as st

        self.draw, self.options, self.st = draw, options, st
        self.trees: dict[str, Any] = {}
        self.tree: tuple[str, int] | None = None  # the leaf of a `PyTree[..., "T"]` that is being drawn
        self.depth = 0
        self.rows: tuple[int, ...] | None = None  # what "any axes" are in the mask of a loss or metric

    def part(self, node: Node, scope: Scope, path: str, name: str = "", default: Any = MISSING) -> Part:
        """A part that fits a node.

        Args:
            node: the annotation.
            scope: axis names that are bound so far.
            path: where it stands: the parameter, and the way inside.
            name: of the parameter or field, if it is one.
            default: of the parameter or field.

        Raises:
            Undrawable: the annotation says too little.
        """
        match node:
            case ArrayNode(rule=rule):
                return self._leaf(rule, scope, path)
            case PlainNode(annotation=annotation):
                return Fixed(self._plain(annotation, path, name, default))
            case UnionNode(members=members):
                return self._member(members, path, lambda member: self.part(member, scope, path, name, default))
            case PyTreeNode():
                return self._tree(node, scope, path)
            case DataclassNode():
                return self._dataclass(node, path)
        return self._container(node, scope, path)

    # Arrays

    def _leaf(self, rule: ArrayRule, scope: Scope, path: str) -> Leaf:
        if rule.array_type is not Any and not (
            isinstance(rule.array_type, type) and issubclass(rule.array_type, jax.Array | np.ndarray)
        ):
            raise Undrawable(path, rule.text, "is of an array type that is not known here")
        pieces: dict[int, tuple[int, ...]] = {}
        order = sorted(range(len(rule.axes)), key=lambda index: rule.axes[index].kind == "symbolic")
        for index in order:  # names first: an expression reads them
            pieces[index] = self._sizes(rule.axes[index], scope, path)
        shape = tuple(size for index in range(len(rule.axes)) for size in pieces[index])
        return Leaf(rule, shape, self._dtype(rule, path), path)

    def _dtype(self, rule: ArrayRule, path: str) -> str:
        wide = _WIDE if jnp.zeros(0, int).dtype == np.int64 or rule.array_type is np.ndarray else ()
        usual = _USUAL if rule.dtypes is not None else ("float32", "int32", "bool")
        everything = (*usual, *_OTHERS, *wide)
        if rule.array_type is np.ndarray:
            usual, everything = (tuple(one for one in pool if one != "prng_key") for pool in (usual, everything))
        for pool in (everything,) if self.options.dtypes == "all" else (usual, everything):
            found = [name for name in pool if rule.admits_dtype(name)]
            if found:
                if self.options.dtypes == "usual" and rule.admits_dtype("float32"):
                    found = [one for one in found if one != "complex64"]  # admitted by Num and Inexact, seldom meant
                return self.draw(self.st.sampled_from(found))
        raise Undrawable(path, rule.text, "has no dtype that JAX can hold here (jax_enable_x64 is off)")

    def _sizes(self, axis: Axis, scope: Scope, path: str) -> tuple[int, ...]:
        key: Any = (*(self.tree or ("", -1)), axis.name) if axis.tree else axis.name
        match axis.kind:
            case "fixed":
                return (self._or_one(axis, axis.size or 0),)
            case "named":
                return (self._or_one(axis, self._size(key, axis.name, scope)),)
            case "anonymous":
                return (self.draw(self.st.integers(1, _LARGEST)),)
            case "ellipsis" if self.rows is not None:
                return self.rows
            case "ellipsis":
                return tuple(self.draw(self.st.lists(self.st.integers(1, _LARGEST), max_size=2)))
            case "variadic":
                if key not in scope.groups:
                    several = self.st.lists(self.st.integers(1, _LARGEST), max_size=2)
                    several = several if self.rows is None else self.st.just(self.rows)
                    scope.groups[key] = tuple(self.draw(self.options.axes.get(f"*{axis.name}", several)))
                return self._broadcast(scope.groups[key]) if axis.broadcast else scope.groups[key]
        return (self._or_one(axis, self._value(axis, scope, path)),)

    def _size(self, key: Any, name: str, scope: Scope) -> int:
        if key not in scope.sizes:
            if name in self.options.axes:
                scope.sizes[key] = self.draw(self.options.axes[name])
            else:
                used = set(scope.sizes.values())
                # What is not in use stands first: shrinking goes there, and a message with 1, 2, 3 is easy to read.
                sizes = sorted(range(1, _LARGEST + 1), key=lambda size: size in used)
                scope.sizes[key] = self.draw(self.st.sampled_from(sizes))
        return scope.sizes[key]

    def _or_one(self, axis: Axis, size: int) -> int:
        return 1 if axis.broadcast and self.draw(self.st.booleans()) else size

    def _broadcast(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        kept = sizes[self.draw(self.st.integers(0, len(sizes))) :]
        return tuple(1 if self.draw(self.st.booleans()) else size for size in kept)

    def _value(self, axis: Axis, scope: Scope, path: str) -> int:
        from hypothesis import reject

        assert axis.expression is not None
        for name in sorted(axis.expression.names):
            self._size(name, name, scope)
        try:
            value = axis.expression.evaluate(scope.sizes, scope.arguments)
        except ArithmeticError:
            reject()
        except AnnotationError as error:
            raise Undrawable(path, f'"{axis.text}"', f"cannot be evaluated ({error})") from None
        if not is_size(value, axis, self.options.axes):
            reject()
        return int(value)

    # Containers

    def _member(self, members: Sequence[Node], path: str, draw: Callable[[Node], Part]) -> Part:
        rest = self._usual(members)
        if self.depth > _DEEPEST:
            rest = [one for one in rest if isinstance(one, PlainNode)] or rest
        reason: Undrawable | None = None
        while rest:
            member = self.draw(self.st.sampled_from(rest))
            try:
                return draw(member)
            except Undrawable as error:
                reason = reason or error
                rest = [one for one in rest if one is not member]
        raise reason or Undrawable(path, "an empty union", "admits nothing")

    def _usual(self, members: Sequence[Node]) -> list[Node]:
        """The members without the raw forms of a PRNG key, which `PRNGKeyArray` admits beside the typed one."""
        rules = [member.rule for member in members if isinstance(member, ArrayNode)]
        if not any(rule.dtype == "Key" for rule in rules):
            return list(members)
        # Where all is wanted: that of the default implementation, since `jax.random` takes no other.
        size = jax.eval_shape(jax.random.PRNGKey, 0).shape[0] if self.options.dtypes == "all" else None
        raw = [rule for rule in rules if rule.dtype == "UInt32" and [axis.size for axis in rule.axes] != [size]]
        return [member for member in members if not (isinstance(member, ArrayNode) and member.rule in raw)]

    def _count(self) -> int:
        return 0 if self.depth > _DEEPEST else self.draw(self.st.integers(0, _MOST_ITEMS))

    def _container(self, node: Node, scope: Scope, path: str) -> Part:
        self.depth += 1
        try:
            steps, kind, make = self._outline(node)
            parts = tuple(self.part(child, scope, f"{path}{step}") for step, _, child in steps)
            return Group(node, kind, tuple(key for _, key, _ in steps), parts, make)
        finally:
            self.depth -= 1

    def _outline(self, node: Node) -> tuple[list[tuple[str, Any, Node]], type, Callable[[list[Any]], Any]]:
        """(step of the path, key, node) of each child, the kind of the container, and how it is made of values."""
        match node:
            case SequenceNode(origin=origin, item=item):
                kind = origin if origin in (list, tuple, collections.deque) else list
                return [(f"[{index}]", index, item) for index in range(self._count())], kind, kind
            case TupleNode(items=items):
                return [(f"[{index}]", index, item) for index, item in enumerate(items)], tuple, tuple
            case MappingNode(origin=origin, key=key, value=value):
                wanted = self.st.lists(
                    self._keys(key), unique=True, max_size=0 if self.depth > _DEEPEST else _MOST_ITEMS
                )
                keys = tuple(self.draw(wanted))
                make = functools.partial(_mapping, origin if origin is collections.OrderedDict else dict, keys)
                if origin is collections.defaultdict:
                    make = lambda values: collections.defaultdict(None, zip(keys, values, strict=True))
                return [(f"[{key!r}]", key, value) for key in keys], dict, make
            case TypedDictNode():
                keys = tuple(key for key in node.names if key in node.required or self.draw(self.st.booleans()))
                steps = [(f"[{key!r}]", key, node.fields[key]) for key in keys]
                return steps, node.cls, functools.partial(_mapping, dict, keys)
            case NamedTupleNode(cls=cls):
                named = {step.removeprefix("."): child for step, child in children(node).items()}
                return [(f".{name}", name, child) for name, child in named.items()], cls, lambda values: cls(*values)
        raise TypeError(f"no such node: {node!r}")

    def _keys(self, node: Node) -> Any:
        annotation = node.annotation
        if annotation is int:
            return self.st.integers(0, 5)
        if get_origin(annotation) is Literal:
            return self.st.sampled_from(get_args(annotation))
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return self.st.sampled_from(list(annotation))
        return self.st.sampled_from(["a", "b", "c"])

    def _dataclass(self, node: DataclassNode, path: str) -> Part:
        self.depth, before, self.tree = self.depth + 1, self.tree, None
        try:
            scope, drawn = self.fields(node, f"{path}.")
        finally:
            self.depth, self.tree = self.depth - 1, before
        make = functools.partial(_instance, node.cls, tuple(drawn))
        return Group(node, node.cls, tuple(drawn), tuple(drawn.values()), make, scope)

    def fields(self, node: FieldsNode, prefix: str) -> tuple[Scope, dict[str, Part]]:
        """The fields of an instance, drawn in a scope of their own in which `{self.x}` is a field."""
        instance = types.SimpleNamespace()
        scope, parts = Scope({"self": instance}), {}
        fields = {field.name: field for field in dataclasses.fields(node.cls)}
        # Plain values first: the shapes of the others may be said in them.
        for name in sorted(node.fields, key=lambda name: not isinstance(node.fields[name], PlainNode)):
            default = fields[name].default
            if default is MISSING and fields[name].default_factory is not MISSING:
                default = fields[name].default_factory()  # pyright: ignore[reportCallIssue]  # just compared
            parts[name] = self.part(node.fields[name], scope, f"{prefix}{name}", name, default)
            setattr(instance, name, built(parts[name], shaped))
        return scope, {name: parts[name] for name in node.fields}

    # Trees

    def _tree(self, node: PyTreeNode, scope: Scope, path: str) -> Part:
        template = self._template(node.structure)
        paths, structure = jax.tree_util.tree_flatten_with_path(template)
        parts, before = [], self.tree
        for index, (keys, _) in enumerate(paths):
            self.tree = before if node.structure is None else (node.structure, index)
            parts.append(self.part(node.leaf, scope, path + jax.tree_util.keystr(keys)))
        self.tree = before
        return Group(node, object, tuple(range(len(parts))), tuple(parts), structure.unflatten)

    def _template(self, pattern: str | None) -> Any:
        """A tree of zeros whose structure is free, or that of a name, or names put into each other's leaves."""
        some = self.st.sampled_from(_STRUCTURES)
        if pattern is None:
            return self.draw(some)
        template: Any = 0
        for word in pattern.split():
            if word == "...":
                part = self.draw(some)
            else:
                if word not in self.trees:
                    self.trees[word] = self.draw(some)
                part = self.trees[word]
            template = jax.tree.map(lambda _, part=part: part, template)
        return template

    # What is no array

    def _plain(self, annotation: Any, path: str, name: str, default: Any) -> Any:
        if name and name in self.options.axes:
            return self.draw(self.options.axes[name])
        strategy = self._choices(annotation)
        if strategy is not None:
            return self.draw(strategy)
        if default is not MISSING:
            return default  # a number or a text with a default means something in particular
        if annotation == KeyPath:
            return f"batch.{name or 'x'}"
        return self._invented(annotation, path, name)

    def _choices(self, annotation: Any) -> Any:
        """A strategy where the annotation lists what is admitted; None elsewhere."""
        if get_origin(annotation) is Literal:
            return self.st.sampled_from(get_args(annotation))
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return self.st.sampled_from(list(annotation))
        if annotation in (None, type(None)):
            return self.st.none()
        return self.st.booleans() if annotation is bool else None

    def _invented(self, annotation: Any, path: str, name: str) -> Any:
        numbers = {
            int: self.st.integers(1, 4),
            float: self.st.floats(0, 1, width=16),
            str: self.st.sampled_from(["a", "b"]),
            complex: self.st.just(1 + 1j),
        }
        origin, inner = get_origin(annotation), get_args(annotation)
        if isinstance(annotation, typing.Hashable) and annotation in numbers:
            return self.draw(numbers[annotation])
        if origin is Annotated:
            return self._plain(inner[0], path, name, MISSING)
        if origin in (Union, types.UnionType):
            members = [PlainNode(one) for one in inner]
            drawn = self._member(members, path, lambda one: Fixed(self._plain(one.annotation, path, name, MISSING)))
            return built(drawn, shaped)
        if origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
            return tuple(self._plain(one, f"{path}[{index}]", "", MISSING) for index, one in enumerate(inner))
        if origin in (tuple, list, collections.abc.Sequence) and inner:
            items = (self._plain(inner[0], f"{path}[{index}]", "", MISSING) for index in range(self._count()))
            return list(items) if origin is list else tuple(items)
        if origin in (dict, collections.abc.Mapping):
            keys = self.draw(self.st.lists(self._keys(PlainNode(inner[0])), unique=True, max_size=2))
            return {key: self._plain(inner[1], f"{path}[{key!r}]", "", MISSING) for key in keys}
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            _, fields = self.fields(DataclassNode(annotation, annotation), f"{path}.")
            return _instance(annotation, tuple(fields), [built(part, shaped) for part in fields.values()])
        raise Undrawable(path, annotation, "does not say what to draw")


def _mapping(kind: type, keys: tuple[Any, ...], values: list[Any]) -> Any:
    return kind(zip(keys, values, strict=True))


def _instance(cls: Any, names: tuple[str, ...], values: list[Any]) -> Any:
    """An instance with these fields, its constructor not called: that may want, or check, something else."""
    instance = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance
