"""The mark: a primitive that gives back what it is given and carries a name.

Marked values look like any others: under `vmap` the newest batch axis comes first, tangents and cotangents go through,
and in the compiled program nothing is left. `jax.ad_checkpoint.checkpoint_name` would not do: `vmap` leaves its axis
wherever it is, and it changes what the policies of `jax.checkpoint` store.

The API used here, `jax.extend.core.Primitive` and the tables of `jax.interpreters`, is what JAX offers to those who
write primitives, without a promise that it stays; `tests/intermediates/test_promises.py` says what has changed.
"""

import contextlib
import dataclasses
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from equikd.tree import Path, join


class Weakly:
    """A function that is not kept alive by this: what JAX remembers of a program would keep all it closes over.

    Two of them are equal if they are of one object.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._of = id(function)
        self._held: Any = function
        if not isinstance(function, types.MethodType):  # which is made anew each time, and would be gone at once
            with contextlib.suppress(TypeError):  # a function of numpy's, say, which closes over nothing
                self._held = weakref.ref(function)

    def _function(self) -> Any:
        return self._held() if isinstance(self._held, weakref.ref) else self._held

    def __call__(self, value: Any) -> Any:
        return self._function()(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weakly) and self._of == other._of and self._function() is other._function()

    def __hash__(self) -> int:
        return self._of


_DEPTH: ContextVar[int] = ContextVar("equikd_depth", default=0)


@contextlib.contextmanager
def deeper() -> Iterator[None]:
    """Inside, names are those of a capture within a capture: a model may call `capture` on itself."""
    token = _DEPTH.set(_DEPTH.get() + 1)
    try:
        yield
    finally:
        _DEPTH.reset(token)


@dataclasses.dataclass(frozen=True)
class Name:
    """What a mark says of the value that goes through it.

    Attributes:
        at: keys from the root of the model to the submodule.
        method: which of its methods is called.
        part: "output", or "inputs": what it is called on, as `Inputs`.
        reduce: what is kept of the value, as a function of it (see `Weakly`); None: all.
        depth: how many captures are around the one that asks.
    """

    at: Path
    method: str = "__call__"
    part: str = "output"
    reduce: Callable[[Any], Any] | None = None
    depth: int = dataclasses.field(default_factory=_DEPTH.get)

    def __lt__(self, other: "Name") -> bool:
        """Some order, which names need as the keys of a dict that is a pytree."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[str, str, str, int, int]:
        return (join(self.at), self.method, self.part, id(self.reduce), self.depth)


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """The parts of a marked value that are no arrays; compared by identity, as the parameters of a primitive must be.

    Attributes:
        value: the value with None in place of its arrays.
    """

    value: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Refused:
    """In place of a value that cannot come out of where it is computed; without arrays, so it goes through loops.

    Attributes:
        why: what to tell whoever asks for it.
    """

    why: str


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Ungraded:
    """A value that no gradient flows back from.

    Attributes:
        value: the arrays.
        inside: what it is computed in.
    """

    value: Any
    inside: str

    def tree_flatten(self) -> tuple[tuple[Any], str]:
        """As a pytree."""
        return (self.value,), self.inside

    @classmethod
    def tree_unflatten(cls, inside: str, parts: tuple[Any]) -> "Ungraded":
        """The inverse of `tree_flatten`."""
        return cls(*parts, inside)


mark_p = Primitive("equikd_mark")
mark_p.multiple_results = True
mark_p.def_impl(lambda *values, **_: list(values))
mark_p.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(mark_p, lambda context, *values, **_: values)
ad.primitive_jvps[mark_p] = lambda values, tangents, **params: (mark_p.bind(*values, **params), list(tangents))
ad.primitive_transposes[mark_p] = lambda cotangents, *_, **__: list(cotangents)


def _batched(values: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
    """The newest batch axis comes first, whatever the function did with it."""
    moved = [v if axis is None else jnp.moveaxis(v, axis, 0) for v, axis in zip(values, axes, strict=True)]
    return mark_p.bind(*moved, **params), [None if axis is None else 0 for axis in axes]


batching.primitive_batchers[mark_p] = _batched


def is_jax_array(value: Any) -> bool:
    """Whether a leaf is an array of JAX; numpy's are not, since a program may decide by their values."""
    return isinstance(value, jax.Array)


def mark(value: Any, name: Name) -> Any:
    """The same value, its arrays marked.

    Args:
        value: any pytree. Other leaves than JAX's arrays are carried along as they are.
        name: what the mark says; of its `reduce`, the result is marked in place of the value.
    """
    seen, static = eqx.partition(value if name.reduce is None else name.reduce(value), is_jax_array)
    leaves, treedef = jax.tree.flatten(seen)
    if not leaves:
        return value
    # What was reduced is needed by nobody, so the value goes through as well, lest the equation be dropped as dead.
    through, rest = eqx.partition(None if name.reduce is None else value, is_jax_array)
    passed, passed_treedef = jax.tree.flatten(through)
    outs = mark_p.bind(*leaves, *passed, mark=name, treedef=treedef, static=Static(static))
    if name.reduce is None:
        return eqx.combine(jax.tree.unflatten(treedef, outs), static)
    return eqx.combine(jax.tree.unflatten(passed_treedef, outs[len(leaves) :]), rest)
