"""The axis binder: one function for each annotation, which binds a value's axes or raises `Mismatch`.

`checker(node)` compiles a node (`_nodes`) once into a closure `check(value, bindings)`; a flat array costs a few dict
operations. Containers are walked in full, so one bad item among many is always found, and the `Mismatch` collects the
way to it (`['image']`, `[3]`, `.weight`) on its way out.

A union takes its first member that fits what is bound so far. Where that turns out wrong later, `_search` goes back
and takes the next one: on the failing path only.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from equikd.typing._accepts import accepts, dtype_name, is_array, is_sequence, items_of, plain_test
from equikd.typing._annotation import ArrayRule
from equikd.typing._bindings import Bindings, Mismatch
from equikd.typing._nodes import (
    ArrayNode,
    CollectionNode,
    DataclassNode,
    MappingNode,
    NamedTupleNode,
    Node,
    PlainNode,
    PyTreeNode,
    SequenceNode,
    TupleNode,
    TypedDictNode,
    UnionNode,
    holds_arrays,
)
from equikd.typing._search import chosen, depth, search

Check = Callable[[Any, Bindings], None]


def checker(node: Node) -> Check:
    """The compiled check of a node, cached.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxtyping import Array, Float
        >>> from equikd.typing._nodes import node_of
        >>> bindings = Bindings()
        >>> checker(node_of(list[Float[Array, "b d"]]))([jnp.ones((2, 3)), jnp.ones((2, 3))], bindings)
        >>> bindings.sizes
        {'b': 2, 'd': 3}
    """
    try:
        return _cached_checker(node)
    except TypeError:  # unhashable, as `Annotated[int, []]` is
        return _compiled(node)


@functools.lru_cache(maxsize=4096)
def _cached_checker(node: Node) -> Check:
    return _compiled(node)


def _compiled(node: Node) -> Check:
    match node:
        case ArrayNode(rule=rule):
            return _array(rule)
        case CollectionNode():
            return _collection(node)
        case PlainNode(annotation=annotation):
            return _plain(annotation)
        case UnionNode():
            return _union(node)
        case SequenceNode():
            return _sequence(node)
        case TupleNode():
            return _tuple(node)
        case MappingNode():
            return _mapping(node)
        case TypedDictNode():
            return _typed_dict(node)
        case NamedTupleNode():
            return _named_tuple(node)
        case DataclassNode():
            return _dataclass(node)
        case PyTreeNode():
            return _pytree(node)
    raise TypeError(f"no such node: {node!r}")


def _array(rule: ArrayRule) -> Check:
    array_type, dtypes, rank, many = rule.array_type, {}, rule.rank, rule.many is not None
    simple = all(
        axis.kind in ("named", "fixed", "anonymous") and not axis.broadcast and not axis.tree for axis in rule.axes
    )
    words = tuple(axis.name if axis.kind == "named" else axis.size for axis in rule.axes)

    def check(value: Any, bindings: Bindings) -> None:
        if not (isinstance(value, array_type) if array_type is not Any else is_array(value)):
            raise Mismatch("type", value, rule=rule)
        dtype, shape = value.dtype, value.shape
        admitted = dtypes.get(dtype)
        if admitted is None:
            admitted = dtypes[dtype] = rule.admits_dtype(dtype_name(dtype))
        if not admitted:
            raise Mismatch("dtype", value, rule=rule, got=dtype_name(dtype))
        if len(shape) != rank and (not many or len(shape) < rank):
            raise Mismatch("rank", value, rule=rule, got=len(shape))
        if not simple:
            bindings.bind(rule, value, shape)
            return
        sizes = bindings.sizes
        for word, size in zip(words, shape, strict=True):
            if word is not None and (sizes.setdefault(word, size) if type(word) is str else word) != size:
                bindings.bind(rule, value, shape)  # raises, and knows which axis

    return check


def _plain(annotation: Any) -> Check:
    test = plain_test(annotation)

    def check(value: Any, bindings: Bindings) -> None:
        del bindings
        if not test(value):
            raise Mismatch("plain", value, expected=annotation)

    return check


def _union(node: UnionNode) -> Check:
    members = [(member, checker(member)) for member in node.members]
    real = [member for member in node.members if member.annotation is not type(None)]
    alternatives = len(real) > 1 and node.annotation != PRNGKeyArray  # which is a union of old keys and new

    def check(value: Any, bindings: Bindings) -> None:
        fitting = [index for index, (member, _) in enumerate(members) if accepts(member, value)]
        try:
            if len(fitting) == 1:
                members[fitting[0]][1](value, bindings)
            elif fitting and bindings.script is not None:
                index = chosen(node, value, len(fitting), bindings)
                members[fitting[index]][1](value, bindings)
            else:
                bindings.ambiguous |= bool(fitting)
                first_of(fitting or range(len(members)), value, bindings)
        except Mismatch as error:
            if alternatives and error.value is value and error.problem != "union":
                error.union = node.annotation
            raise

    def first_of(indices: Iterable[int], value: Any, bindings: Bindings) -> None:
        best: Mismatch | None = None
        picked = 0
        for index in indices:
            saved = bindings.save()
            try:
                members[index][1](value, bindings)
            except Mismatch as error:
                bindings.restore(saved)
                if best is None or depth(error) > depth(best):
                    best, picked = error, index
                continue
            if bindings.picks is not None:
                bindings.picks[id(node), id(value)] = index
            return
        if best is None or depth(best) == 0:
            raise Mismatch("union", value, expected=node.annotation) from None
        if bindings.picks is not None:
            bindings.picks[id(node), id(value)] = picked
        raise best

    return check


def _inside(error: Mismatch, step: str) -> Mismatch:
    error.path.insert(0, step)
    return error


def _sequence(node: SequenceNode) -> Check:
    origin, item, quick = node.origin, checker(node.item), node.origin in (list, tuple)

    def check(value: Any, bindings: Bindings) -> None:
        if not is_sequence(value, origin):
            raise Mismatch("plain", value, expected=node.annotation)
        index = 0
        try:
            for index, one in enumerate(value if quick else items_of(value)):  # noqa: B007  # for the message
                item(one, bindings)
        except Mismatch as error:
            raise _inside(error, f"[{index}]") from None

    return check


def _collection(node: CollectionNode) -> Check:
    origin, item = node.origin, checker(node.item)

    def check(value: Any, bindings: Bindings) -> None:
        if not isinstance(value, origin):
            raise Mismatch("plain", value, expected=node.annotation)
        try:
            for one in value:
                item(one, bindings)
        except Mismatch as error:
            raise _inside(error, "[...]") from None

    return check


def _tuple(node: TupleNode) -> Check:
    items = [checker(item) for item in node.items]

    def check(value: Any, bindings: Bindings) -> None:
        if not isinstance(value, tuple) or len(value) != len(items):
            raise Mismatch("plain", value, expected=node.annotation)
        index = 0
        try:
            for index, (item, one) in enumerate(zip(items, value, strict=True)):  # noqa: B007
                item(one, bindings)
        except Mismatch as error:
            raise _inside(error, f"[{index}]") from None

    return check


def _mapping(node: MappingNode) -> Check:
    origin, key_check, item = node.origin, checker(node.key), checker(node.value)

    def check(value: Any, bindings: Bindings) -> None:
        if not isinstance(value, origin):
            raise Mismatch("plain", value, expected=node.annotation)
        assert isinstance(value, Mapping)
        key = None
        try:
            for key, one in value.items():
                key_check(key, bindings)
                item(one, bindings)
        except Mismatch as error:
            raise _inside(error, f"[{key!r}]") from None

    return check


def _typed_dict(node: TypedDictNode) -> Check:
    @functools.cache
    def fields() -> dict[str, Check]:
        return {name: checker(child) for name, child in node.fields.items()}

    def check(value: Any, bindings: Bindings) -> None:
        if not isinstance(value, dict):
            raise Mismatch("plain", value, expected=node.annotation)
        checks = fields()
        if not node.required <= value.keys() <= checks.keys():
            missing = sorted(map(repr, node.required - value.keys()))
            raise Mismatch("keys", value, got=sorted(map(repr, value.keys() - checks.keys())), expected=missing,
                           key=list(checks))  # fmt: skip
        name = ""
        try:
            for name, one in value.items():
                checks[name](one, bindings)
        except Mismatch as error:
            raise _inside(error, f"[{name!r}]") from None

    return check


def _named_tuple(node: NamedTupleNode) -> Check:
    fields = functools.cache(lambda: {name: checker(child) for name, child in node.fields.items()})

    def check(value: Any, bindings: Bindings) -> None:
        if not isinstance(value, node.cls):
            raise Mismatch("plain", value, expected=node.annotation)
        name = ""
        try:
            for name, one in fields().items():
                one(getattr(value, name), bindings)
        except Mismatch as error:
            raise _inside(error, f".{name}") from None

    return check


def fields_of(
    node: DataclassNode, value: Any, *, plain: bool = False, holes: bool = True
) -> dict[str, tuple[Node, Any]]:
    """Field -> (node, value) of what is checked in an instance.

    Args:
        node: its class.
        value: the instance.
        plain: also fields that hold no arrays; their class answers for them, not who passes an instance on.
        holes: leave out where `None` stands for an array: a filter (`eqx.partition`) has taken it out.
    """
    return {
        name: (child, getattr(value, name))
        for name, child in node.fields.items()
        if hasattr(value, name) and (plain or holds_arrays(child)) and not (holes and getattr(value, name) is None)
    }


def _dataclass(node: DataclassNode) -> Check:
    def check(value: Any, bindings: Bindings) -> None:
        if not isinstance(value, node.cls):
            raise Mismatch("plain", value, expected=node.annotation)
        instance(node, value, bindings)

    return check


def instance(node: DataclassNode, value: Any, outside: Bindings) -> None:
    """Check the fields of a dataclass instance, in a scope of its own that knows what `outside.shared` shares."""
    here = ""

    def attempt(bindings: Bindings) -> None:
        nonlocal here
        for name, (child, content) in fields_of(node, value).items():
            here = f".{name}"
            checker(child)(content, bindings)
        here = ""
        bindings.settle()

    try:
        inside = search(
            attempt, lambda: Bindings(*outside.shared_names(), arguments={"self": value}, scopes=outside.scopes)
        )
        if outside.scopes:
            sizes, groups = inside.shared_names()
            outside.sizes.update(sizes)
            outside.groups.update(groups)
    except Mismatch as error:
        error.owner = value if error.owner is None else error.owner
        raise _inside(error, here) from None


def leaves_of(node: PyTreeNode, value: Any) -> tuple[list[tuple[str, Any]], Any]:
    """(key path, leaf) of each leaf, and the structure; a leaf is what the leaf type accepts."""
    stop = None if _is_anything(node.leaf) else lambda part: accepts(node.leaf, part, whole=False)
    leaves, tree = jax.tree_util.tree_flatten_with_path(value, is_leaf=stop)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves], tree


def _is_anything(node: Node) -> bool:
    return isinstance(node, PlainNode) and node.annotation is Any


def _pytree(node: PyTreeNode) -> Check:
    item, structure = checker(node.leaf), node.structure
    stop = None if _is_anything(node.leaf) else lambda part: accepts(node.leaf, part, whole=False)

    def check(value: Any, bindings: Bindings) -> None:
        leaves, tree = jax.tree.flatten(value, is_leaf=stop)
        if structure is not None:
            bindings.structure(value, tree, structure)
        before, index = bindings.leaf, 0
        try:
            for index, leaf in enumerate(leaves):
                if structure is not None:
                    bindings.leaf = (structure, index)
                item(leaf, bindings)
        except Mismatch as error:
            raise _inside(error, leaves_of(node, value)[0][index][0]) from None
        finally:
            bindings.leaf = before

    return check
