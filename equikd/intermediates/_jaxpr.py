"""Reading jaxprs: the attributes of equations that JAX shows and does not promise, each in one place.

Names of primitives and of their parameters differ between releases of JAX; `kind` and the functions below give one
answer for all that are supported.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding

_KINDS = {
    "pjit": "jit",
    "remat": "checkpoint",
    "remat2": "checkpoint",
    "RematTraced": "checkpoint",
    "custom_vjp_call_jaxpr": "custom_vjp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "CustomJVPTraced": "custom_jvp_call",
}


def kind(eqn: Any) -> str:
    """What an equation is: the name of its primitive, the same in all releases."""
    name = type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name
    return _KINDS.get(name, name)


def params_of(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation; some experimental ones of JAX hold them in an object."""
    return eqn.params["_prim"].params if "_prim" in eqn.params else eqn.params


def held(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds, closed or open."""
    for value in params_of(eqn).values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = one if hasattr(one, "eqns") else getattr(one, "jaxpr", None)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds; not those of a backward pass, which compute everything again.

    An inner gradient of a rematerialised function holds one of these: its marks are copies.
    """
    if eqn.params.get("differentiated") is not True:
        yield from held(eqn)


def parts(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """The open jaxpr, and its constants, of a closed or open one."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def bound(eqn: Any, values: list[Any]) -> list[Any]:
    """What an equation as it stands gives."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # a pair in older releases
    outs = eqn.primitive.bind(*functions, *values, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def value_of(atom: Any, environment: dict[Any, Any]) -> Any:
    """The value of a variable or literal."""
    return atom.val if isinstance(atom, Literal) else environment[atom]


@contextlib.contextmanager
def place_of(eqn: Any) -> Iterator[None]:
    """Inside, what is traced has the name scopes and the source line of the equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def scan_split(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried; told by ranks, whatever they are called."""
    jaxpr = eqn.params["jaxpr"]
    scanned = sum(a.aval.ndim != b.ndim for a, b in zip(eqn.invars, jaxpr.in_avals, strict=True))
    carried = sum(a.aval.ndim == b.ndim for a, b in zip(eqn.outvars, jaxpr.out_avals, strict=True))
    return len(eqn.invars) - scanned - carried, carried


def typed_as(value: jax.Array, shape: Any) -> jax.Array:
    """A value with what else JAX counts as its type: how it is sharded, and what axes of a mesh it varies over.

    Args:
        value: an array made from nothing, and so the same on all devices.
        shape: what `jax.eval_shape` gave for an array of the same shape.
    """
    sharding = getattr(shape, "sharding", None)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        value = jax.sharding.reshard(value, sharding)
    varying = tuple(getattr(getattr(shape, "manual_axis_type", shape), "varying", getattr(shape, "vma", ())))
    return jax.lax.pcast(value, varying, to="varying") if varying else value
