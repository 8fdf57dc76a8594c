"""Whether a value could fit an annotation at all: its types, aside from the sizes and names of axes.

This is how a union finds the members worth trying, how a `PyTree` finds its leaves, and how plain values are judged.
"""

import functools
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np

from equikd.typing import _beartype
from equikd.typing._nodes import (
    COLLECTIONS,
    MAPPINGS,
    SEQUENCES,
    ArrayNode,
    CollectionNode,
    DataclassNode,
    MappingNode,
    NamedTupleNode,
    Node,
    PlainNode,
    SequenceNode,
    TupleNode,
    TypedDictNode,
    UnionNode,
)


def dtype_name(dtype: Any) -> str:
    """As jaxtyping names it: `float32`, `bool`, `prng_key`; for other libraries the last word of its repr."""
    kind = getattr(dtype, "type", None)
    if kind is np.void and dtype != np.dtype(np.void):  # a structured dtype is its fields
        return str(dtype)
    name = getattr(kind, "__name__", None)
    return name if name is not None else dtype if isinstance(dtype, str) else repr(dtype).rpartition(".")[2]


def accepts(node: Node, value: Any, *, whole: bool = True) -> bool:
    """Whether a value could fit, axis sizes and names aside.

    Args:
        node: what it should be.
        value: any value.
        whole: also compare dtype and rank; without, the type alone decides, which is how a `PyTree` finds its leaves.
    """
    match node:
        case ArrayNode(rule=rule):
            right_type = is_array(value) if rule.array_type is Any else isinstance(value, rule.array_type)
            return right_type and (
                not whole or (rule.admits_rank(len(value.shape)) and rule.admits_dtype(dtype_name(value.dtype)))
            )
        case CollectionNode(origin=origin, item=item):
            return isinstance(value, origin) and all(accepts(item, one, whole=whole) for one in value)
        case PlainNode(annotation=annotation):
            return plain_test(annotation)(value)
        case UnionNode(members=members):
            return any(accepts(member, value, whole=whole) for member in members)
        case SequenceNode(origin=origin, item=item):
            return is_sequence(value, origin) and all(accepts(item, one, whole=whole) for one in items_of(value))
        case TupleNode(items=items):
            return (
                isinstance(value, tuple)
                and len(value) == len(items)
                and all(accepts(item, one, whole=whole) for item, one in zip(items, value, strict=True))
            )
        case MappingNode(origin=origin, value=item):
            return isinstance(value, origin) and all(accepts(item, one, whole=whole) for one in value.values())
        case TypedDictNode():
            return isinstance(value, dict) and node.required <= value.keys() <= set(node.names)
        case NamedTupleNode(cls=cls) | DataclassNode(cls=cls):
            return isinstance(value, cls)
    return True  # a PyTree: any value is one


def is_array(value: Any) -> bool:
    """Whether it has a shape and a dtype that can be asked for."""
    try:
        return len(value.shape) >= 0 and value.dtype is not None
    except Exception:  # whatever a property raises
        return False


def is_sequence(value: Any, origin: type) -> bool:
    """Whether it is a list, tuple, ... and no text."""
    return isinstance(value, origin) and not isinstance(value, str | bytes)


def items_of(value: Any) -> Iterable[Any]:
    """What can be looked at again and again: nothing of an iterator, nor of an array, whose rows would be computed."""
    again = isinstance(value, Sequence | Collection) and not is_array(value)
    return value if again else ()


@functools.lru_cache(maxsize=4096)
def _cached_plain_test(annotation: Any) -> Callable[[Any], bool]:
    return _plain_test(annotation)


def plain_test(annotation: Any) -> Callable[[Any], bool]:
    """Whether a value fits an annotation without arrays."""
    try:
        return _cached_plain_test(annotation)
    except TypeError:  # unhashable
        return _plain_test(annotation)


def _plain_test(annotation: Any) -> Callable[[Any], bool]:
    if annotation is Any or annotation is object or isinstance(annotation, str):
        return lambda value: True
    if annotation is None:
        return lambda value: value is None
    if annotation is float:
        return _is_float
    items = _items_test(annotation)
    if items is not None:
        return items
    if type(annotation) is type:  # a class without a metaclass: nothing that beartype knows better
        return lambda value: isinstance(value, annotation)
    return _beartype.tester(annotation)


def _items_test(annotation: Any) -> Callable[[Any], bool] | None:
    """The test of a container or union without arrays: of every item, where beartype looks at one at random."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Union or origin is types.UnionType:
        members = [plain_test(member) for member in arguments]
        return lambda value: any(test(value) for test in members)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        tests = [plain_test(item) for item in arguments]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(tests)
            and all(test(one) for test, one in zip(tests, value, strict=True))
        )
    if (origin is tuple or origin in SEQUENCES) and arguments:
        kind, item = origin, plain_test(arguments[0])
        return lambda value: is_sequence(value, kind) and all(map(item, items_of(value)))
    if origin in COLLECTIONS and len(arguments) == 1:
        kind, item = origin, plain_test(arguments[0])
        return lambda value: isinstance(value, kind) and all(map(item, items_of(value)))
    if origin in MAPPINGS and len(arguments) == 2:
        kind, (key, item) = origin, map(plain_test, arguments)
        return lambda value: isinstance(value, kind) and all(key(k) and item(v) for k, v in value.items())
    return None


def _is_float(value: Any) -> bool:
    """A float, or the 0-d tracer that a config's float is inside a trace."""
    return isinstance(value, float) or (
        isinstance(value, jax.Array) and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)
    )
