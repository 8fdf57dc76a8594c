"""The untraced twin: which leaves of a model are trained, and which follow the config.

A float in a model's node, a dropout rate say, is traced like any other, so in the traced build it looks like a parameter.
The twin is the same model built once with Python floats under `eval_shape`: an inexact array there is *trainable*; a
Python number there that is an array in the traced build is a *hyperparameter*, and so is every leaf below a config that
the model holds. Of five ways to tell them apart only this one was right in all cases tried. Verdicts are positions among
the leaves of the model.

Floats that a module keeps in a static field (`eps` of the norm layers) cannot be traced: `static_floats` finds them with
one traced build, and the trainer pins them. Trees of two builds are never combined (a lambda in a static field differs
between builds): new leaves are put by path into the structure of the first.
"""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd._compat import Tracer
from equikd.config._resolve import Resolver
from equikd.config._values import is_config
from equikd.errors import ConfigError, listing, message, report
from equikd.tree import items, join, named_leaves

_BASE = ("model",)


@dataclasses.dataclass(frozen=True)
class Twin:
    """What the first builds of a model say of all later ones.

    Attributes:
        paths: of all leaves of the model, in order.
        trainable: per leaf, whether it is a parameter.
        hyperparameter: per leaf, whether it is taken from the config at each step.
        model: the first build, shapes instead of arrays.
        state: the shapes of its `eqx.nn.State`, or None.
    """

    paths: tuple[str, ...]
    trainable: tuple[bool, ...]
    hyperparameter: tuple[bool, ...]
    model: Any
    state: Any

    def fit(self, model: Any, what: str = "the model") -> Any:
        """The leaves of another build, by path, in the structure of the first.

        Raises:
            ConfigError: a leaf is missing, new, or of another shape or dtype.
        """
        given = named_leaves(model)
        wanted = dict(zip(self.paths, jax.tree.leaves(self.model), strict=True))
        errors = [message(f"{what}: {path} is not there", expected=_spec(wanted[path])) for path in wanted if path not in given]
        errors += [message(f"{what}: {path} is not part of trainer.model") for path in given if path not in wanted]
        errors += [
            message(f"{what}: {path} is of another kind", got=_spec(given[path]), expected=_spec(leaf))
            for path, leaf in wanted.items()
            if path in given and _is_shape(leaf) and _spec(given[path]) != _spec(leaf)
        ]
        if errors:
            raise ConfigError(report(f"{what} does not have the structure of trainer.model", errors[:20]))
        takes = [_is_shape(leaf) or hyper for leaf, hyper in zip(wanted.values(), self.hyperparameter, strict=True)]
        leaves = [given[p] if take else leaf for (p, leaf), take in zip(wanted.items(), takes, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self.model), leaves)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _spec(leaf: Any) -> str:
    return f"{jnp.dtype(leaf.dtype).name if not _is_key(leaf) else leaf.dtype}{list(leaf.shape)}" if _has_shape(leaf) else repr(leaf)


def _has_shape(leaf: Any) -> bool:
    return _is_shape(leaf) or isinstance(leaf, jax.Array | np.ndarray)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def build(config: Any, key: jax.Array, seen: Callable[[str, Any], None] | None = None) -> tuple[Any, Any]:
    """The model that `config.model` describes, and its state.

    Args:
        config: the part of a trainer that enters its step; references in the model are looked up in it.
        key: PRNG key; each node gets its own, folded from its path below `model`.
        seen: called with path and value of each traced float.

    Returns:
        `(model, state)`: a model whose initial `eqx.nn.State` has been taken out, and that state or None.
    """
    resolver = Resolver(config, key=key, base=_BASE, seen=seen)
    return with_state(lambda: resolver.build(config.model, _BASE))


def with_hyperparameters(config: Any, model: Any, hyperparameter: tuple[bool, ...]) -> Any:
    """A model with the hyperparameters of a config, taken by path from a build inside the trace.

    Args:
        config: the part of a trainer that enters its step.
        model: a model of that trainer.
        hyperparameter: the twin's verdict per leaf.
    """
    if not any(hyperparameter):
        return model
    fresh = named_leaves(build(config, jax.random.key(0))[0])
    own = named_leaves(model)
    leaves = [fresh[path] if hyper else own[path] for path, hyper in zip(own, hyperparameter, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


def with_state(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A model and its `eqx.nn.State`, None where it has no state."""
    model, state = eqx.nn.make_with_state(make)()
    return model, state if jax.tree.leaves(state) else None


def _modules(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, eqx.Module):
        yield at, value
    if not isinstance(value, jax.Array | np.ndarray | str):
        for key, part in items(value).items():
            yield from _modules(part, (*at, key))


def _arrays_inside(value: Any) -> Iterator[Any]:
    """Arrays in a static field: in containers, configs, and in what a function closes over."""
    if isinstance(value, jax.Array | np.ndarray):
        yield value
    elif isinstance(value, functools.partial):
        yield from _arrays_inside((value.args, tuple(value.keywords.values())))
    elif callable(value) and getattr(value, "__closure__", None):
        for cell in value.__closure__:
            try:
                yield from _arrays_inside(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
    elif isinstance(value, tuple | list | dict) or is_config(value):
        for part in items(value).values():
            yield from _arrays_inside(part)


def _static_arrays(model: Any) -> Iterator[tuple[str, Any]]:
    """`(path of the field, array)` of the arrays in static fields."""
    for at, module in _modules(model):
        for f in dataclasses.fields(module):
            if f.metadata.get("static") and hasattr(module, f.name):
                for array in _arrays_inside(getattr(module, f.name)):
                    yield f"{join((*at, f.name))} ({type(module).__name__}.{f.name})", array


_CACHE_SIZE = 256
_static_floats: "collections.OrderedDict[Any, dict[str, str]]" = collections.OrderedDict()
_twins: "collections.OrderedDict[Any, Twin]" = collections.OrderedDict()


def _cached(cache: "collections.OrderedDict[Any, Any]", key: Any, make: Callable[[], Any]) -> Any:
    if key not in cache:
        cache[key] = make()
        if len(cache) > _CACHE_SIZE:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


def _static_key(config: Any) -> Any:
    parts = {name: getattr(config, name) for name in ("model", "referred", "counts")}
    return jax.tree.structure(parts), float(jnp.zeros(()).dtype.itemsize)


def static_floats(config: Any) -> dict[str, str]:
    """Config path -> `Class.field` of the floats that modules keep in static fields, which cannot be traced.

    Args:
        config: the part of a trainer that enters its step, with nothing pinned yet.

    Raises:
        ConfigError: a static field holds a value *computed from* traced floats: which to pin cannot be told apart.
    """
    if not _float_paths(config):
        return {}
    return _cached(_static_floats, _static_key(config), lambda: _find_static_floats(config))


def _float_paths(config: Any) -> list[str]:
    leaves = named_leaves({"model": config.model, "referred": config.referred})
    return [path for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _find_static_floats(config: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    derived: list[str] = []

    def probe(config: Any, key: jax.Array) -> None:
        seen: dict[int, tuple[str, Any]] = {}
        model, _ = build(config, key, lambda path, value: seen.update({id(value): (path, value)}))
        for field, array in _static_arrays(model):
            if id(array) in seen:
                found[seen[id(array)][0]] = field
            elif isinstance(array, Tracer):
                derived.append(field)

    _quietly(probe, config)
    underivable = [field for field in derived if not _is_array_in_twin(config, field)]
    if underivable:
        floats = _float_paths(config)
        raise ConfigError(
            report(
                "a static field holds a number computed from traced floats",
                [
                    message(
                        f"model: {field} is static, and holds a number computed from traced floats of the config",
                        got=f"traced floats: {listing(floats)}",
                        fix="pin the one it comes from, for example ek.override(cfg, {%r: ek.pin(...)})" % floats[0],
                    )
                    for field in underivable
                ],
            )
        )
    return found


def _is_array_in_twin(config: Any, field: str) -> bool:
    """Whether a static field holds an array in the untraced build too; `twin` then says so."""
    fields: list[str] = []
    _quietly(lambda _, key: fields.extend(name for name, _ in _static_arrays(build(config, key)[0])), None)
    return field in fields


def _quietly(probe: Callable[[Any, jax.Array], Any], config: Any) -> Any:
    """Run a build under `eval_shape`; Equinox warns of tracers in static fields, which is what is looked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A JAX array is being set as static")
        return eqx.filter_eval_shape(probe, config, jax.random.key(0))


def twin(config: Any) -> Twin:
    """The untraced twin of a model, once per static structure.

    Args:
        config: the part of a trainer that enters its step, its floats Python floats, `static_floats` pinned.

    Raises:
        ConfigError: one array at two paths, arrays in static fields, or a structure that depends on a float.
    """
    return _cached(_twins, _static_key(config), lambda: _make_twin(config))


def _make_twin(config: Any) -> Twin:
    shapes = _quietly(lambda _, key: _checked(build(config, key)), None)
    paths = named_leaves(shapes[0])
    traced = paths
    if _float_paths(config):
        traced = named_leaves(_quietly(lambda config, key: build(config, key)[0], config))
        if list(traced) != list(paths):
            apart = sorted(set(traced) ^ set(paths))
            raise ConfigError(
                message(
                    "model: its structure depends on a traced float",
                    got=f"leaves that only one of two builds has: {listing(apart)}",
                    fix="pin that float: ek.override(cfg, {'model....': ek.pin(...)})",
                )
            )
    return _verdicts(shapes, traced)


def _verdicts(shapes: tuple[Any, Any], traced: dict[str, Any]) -> Twin:
    model, state = shapes
    held = {path for path, part in named_leaves(model, is_leaf=is_config).items() if is_config(part)}
    below = {path for path in traced if any(path.startswith((f"{config}.", f"{config}[")) for config in held)}
    leaves = named_leaves(model)
    trainable = tuple(
        _is_shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) and path not in below for path, leaf in leaves.items()
    )
    hyper = tuple(
        _is_shape(traced[path]) and (path in below or isinstance(leaf, bool | int | float | complex))
        for path, leaf in leaves.items()
    )
    return Twin(tuple(leaves), trainable, hyper, model, state)


def _checked(built: tuple[Any, Any]) -> tuple[Any, Any]:
    check_arrays(built[0])
    return built


def check_arrays(model: Any) -> None:
    """Refuse one array at two paths, and arrays in static fields; all at once.

    Raises:
        ConfigError: naming the paths.
    """
    first: dict[int, str] = {}
    errors = []
    for path, leaf in named_leaves(model).items():
        if isinstance(leaf, jax.Array | np.ndarray) and first.setdefault(id(leaf), path) != path:
            errors.append(
                message(
                    f"model: one array stands at {first[id(leaf)]} and at {path}",
                    fix="share it with eqx.nn.Shared, or copy it",
                )
            )
    errors += [
        message(
            f"model: the static field {field} holds an array, which would be frozen into the program",
            got=_spec(array),
            fix="drop static=True, or keep a Python value in it",
        )
        for field, array in _static_arrays(model)
    ]
    if errors:
        raise ConfigError(report(f"{len(errors)} arrays of the model are misplaced", errors))


def live_twin(model: Any, state: Any) -> Twin:
    """The verdicts for a model that was built by the caller and has no description: its Python floats are static."""
    check_arrays(model)

    def shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array | np.ndarray) else leaf

    shapes = jax.tree.map(shape, model)
    made = _verdicts((shapes, jax.tree.map(shape, state)), named_leaves(shapes))
    return dataclasses.replace(made, hyperparameter=(False,) * len(made.paths))
