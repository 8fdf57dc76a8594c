"""The untraced twin: which leaves of a model are trained, and which follow the config.

A float in a model's node, a dropout rate say, is traced like any other, so in the traced build it looks like a
parameter. The twin is the same model built once with Python floats under `eval_shape`: an inexact array there is
*trainable*; a Python number there that is an array in the traced build is a *hyperparameter*, and so is every leaf
below a config that the model holds. (A numpy scalar counts as the Python number it stands for, as in a config.) Of five
ways to tell them apart only this one was right in all cases tried. Verdicts are positions among the model's leaves.

Floats that a module keeps in a static field (`eps` of the norm layers) cannot be traced: `static_floats` finds them,
and the trainer pins them. What else depends on a traced float and is no leaf (a closure, a number computed for a static
field, the structure itself) cannot follow the config, and is an error that asks for a pin. Trees of two builds are
never combined (a lambda in a static field differs between builds): new leaves are put by path into the structure of the
first.
"""

import collections
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.config._names import spell
from equikd.config._resolve import Resolver
from equikd.config._values import float_dtype, is_config, number
from equikd.errors import ConfigError, listing, message
from equikd.model._floats import (
    NEEDS_VALUE,
    blamed,
    explain,
    float_leaves,
    line_of,
    pin_advice,
    reached,
    spelled,
    with_floats,
)
from equikd.model._static import given_floats, is_plain, misplaced_arrays, plain_parts, refuse, same, traced_places
from equikd.tree import named_leaves

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

    def fit(self, model: Any, *, live: bool = False) -> Any:
        """The leaves of another build, by path, in the structure of the first.

        Args:
            model: a build, from the same description unless `live`.
            live: the caller made it, so that its static fields are compared too.

        Raises:
            ConfigError: a leaf is missing, new, or of another shape or dtype; or a static field has another value.
        """
        what = "the live model" if live else "the model"
        given, first = named_leaves(model), dict(zip(self.paths, jax.tree.leaves(self.model), strict=True))
        hyper = {path for path, is_hyper in zip(self.paths, self.hyperparameter, strict=True) if is_hyper}
        gone, new = ([path for path in a if path not in b] for a, b in ((first, given), (given, first)))
        errors = [message(f"{what}: {path} is not there", expected=_spec(first[path])) for path in gone]
        errors += [message(f"{what}: {path} is not part of trainer.model", got=_spec(given[path])) for path in new]
        errors += [
            message(f"{what}: {path} is of another kind", got=_spec(given[path]), expected=_spec(leaf))
            for path, leaf in first.items()
            if path in given and path not in hyper and _is_shape(leaf) and _spec(given[path]) != _spec(leaf)
        ]
        if live and not errors:
            errors = _other_statics(self.model, model, what)
        refuse(f"{what} does not have the structure of trainer.model", errors)
        leaves = [given[path] if _is_shape(leaf) or path in hyper else leaf for path, leaf in first.items()]
        return jax.tree.unflatten(jax.tree.structure(self.model), leaves)

    def fit_state(self, state: Any) -> Any:
        """The values of another build's `eqx.nn.State`, in the structure of the first.

        Raises:
            ConfigError: it has other values.
        """
        first, given = jax.tree.leaves(self.state), jax.tree.leaves(state)
        if list(map(_spec, first)) != list(map(_spec, given)):
            got, expected = (listing(map(_spec, leaves)) or "no state" for leaves in (given, first))
            text = "the state of the live model is not that of trainer.model"
            raise ConfigError(message(text, got=got, expected=expected))
        return jax.tree.unflatten(jax.tree.structure(self.state), given)


def _other_statics(first: Any, model: Any, what: str) -> list[str]:
    wanted, given = plain_parts(first), plain_parts(model)
    return [
        message(f"{what}: {name} differs", got=_static(given, key), expected=_static(wanted, key))
        for key, (name, _) in (wanted | given).items()
        if key not in wanted or key not in given or not same(wanted[key][1], given[key][1])
    ]


def _static(parts: dict[str, tuple[str, Any]], key: str) -> str:
    if key not in parts:
        return "nothing of the kind"
    value = parts[key][1]
    return str(float_dtype().type(value)) if type(value) is float else spell(value)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct | jax.Array | np.ndarray)


def _spec(leaf: Any) -> str:
    """Dtype and shape of an array as JAX would hold it; the value of anything else."""
    if not _is_array(leaf):
        return repr(leaf)
    return f"{jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)}{list(leaf.shape)}"


def build(config: Any, key: jax.Array) -> tuple[Any, Any]:
    """The model that `config.model` describes, and its state.

    Args:
        config: the part of a trainer that enters its step; references in the model are looked up in it.
        key: PRNG key; each node gets its own, folded from its path below `model`.

    Returns:
        `(model, state)`: a model whose initial `eqx.nn.State` has been taken out, and that state or None.
    """
    with warnings.catch_warnings():
        # Equinox warns of arrays in static fields. A config that is held in one looks like that; real ones are refused.
        warnings.filterwarnings("ignore", message="A JAX array is being set as static")
        return with_state(lambda: Resolver(config, key=key, base=_BASE).build(config.model, _BASE))


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
    """A model and its `eqx.nn.State`, None where it has no state; numpy scalars in the model become Python numbers."""
    model, state = eqx.nn.make_with_state(lambda: jax.tree.map(number, make()))()
    return model, state if jax.tree.leaves(state) else None


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
    return jax.tree.structure(reached(config)), float_dtype().name


def static_floats(config: Any) -> dict[str, str]:
    """Config path -> `Class.field` of the floats that modules keep in static fields, which cannot be traced.

    Each float of the config is a Python object of its own, so one that a module keeps as it was given is known again.

    Args:
        config: the part of a trainer that enters its step, with nothing pinned yet.
    """
    positions = float_leaves(config)
    if not positions:
        return {}
    return _cached(_static_floats, _static_key(config), lambda: _find_static_floats(config, positions))


def _find_static_floats(config: Any, positions: dict[str, int]) -> dict[str, str]:
    leaves = jax.tree.leaves(config)
    objects = {path: leaves[index].item() for path, index in positions.items()}
    ids = {id(value): path for path, value in objects.items()}
    config = with_floats(config, {index: objects[path] for path, index in positions.items()})
    found: dict[str, str] = {}
    _untraced(lambda key: found.update(given_floats(build(config, key)[0], ids)))
    return found


def _untraced(make: Callable[[jax.Array], Any]) -> Any:
    """What a build with Python floats gives, as shapes: only its key is traced."""
    try:
        return eqx.filter_eval_shape(make, jax.random.key(0))
    except NEEDS_VALUE as error:
        error.add_note(
            message(
                "the model is built for its shapes alone here, and Python needs the values of an array",
                where=line_of(error),
                fix="compute with jax.numpy, or build it yourself: Trainer(model=None, ...) and train(model=my_model)",
            )
        )
        raise


def twin(config: Any) -> Twin:
    """The untraced twin of a model, once per static structure.

    Args:
        config: the part of a trainer that enters its step, its floats Python floats, `static_floats` pinned.

    Raises:
        ConfigError: one array at two paths, arrays in static fields, or something outside the leaves that depends on a
            traced float.
    """
    return _cached(_twins, _static_key(config), lambda: _make_twin(config))


def _make_twin(config: Any) -> Twin:
    def checked(key: jax.Array) -> tuple[Any, Any]:
        model, state = build(config, key)
        check_arrays(model)
        return model, state

    def compare(config: Any, key: jax.Array) -> None:
        traced.update(_compared(shapes[0], config, key, problems))

    shapes = _untraced(checked)
    if not float_leaves(config):
        return _verdicts(shapes, named_leaves(shapes[0]))
    problems: dict[str, str] = {}
    traced: dict[str, Any] = {}
    try:
        eqx.filter_eval_shape(compare, config, jax.random.key(0))
    except NEEDS_VALUE as error:
        explain(error, config, lambda config: build(config, jax.random.key(0)))
        raise
    if problems:
        problems = _without_chance(config, problems, shapes[0])
        headline = f"{len(problems)} things outside the leaves of the model depend on a traced float"
        refuse(headline, _blaming(config, problems, shapes[0]))
    return _verdicts(shapes, traced)


def _without_chance(config: Any, problems: dict[str, str], first: Any) -> dict[str, str]:
    """The problems that a second untraced build does not have: what is left does depend on traced floats.

    Raises:
        ConfigError: even two untraced builds differ in structure.
    """
    again: dict[str, str] = {}
    _untraced(lambda key: _compared(first, config, key, again) and None)
    if "" in again:
        raise ConfigError(
            message(
                "model: two builds of one description differ in structure",
                got=again[""].rpartition(": ")[2],
                expected="a construction that depends on its arguments and its key alone",
            )
        )
    return {path: what for path, what in problems.items() if path not in again}


def _compared(first: Any, config: Any, key: jax.Array, problems: dict[str, str]) -> dict[str, Any]:
    """The leaves of a traced build; what in it hangs on a traced float and is no leaf goes into `problems`, by path."""
    model, _ = build(config, key)
    problems.update(traced_places(model))
    leaves, wanted = named_leaves(model), named_leaves(first)
    apart = sorted(set(leaves) ^ set(wanted))
    if apart:
        problems[""] = f"model: its structure depends on a traced float: only one of two builds has {listing(apart)}"
    statics, traced = plain_parts(first), plain_parts(model)
    other = {key: statics[key][0] for key in statics if key in traced and not same(statics[key][1], traced[key][1])}
    other |= {path: path for path, leaf in leaves.items() if path in wanted and _differs(wanted[path], leaf)}
    problems.update({key: f"model: {name} is another value where a float is traced" for key, name in other.items()})
    return leaves


def _differs(untraced: Any, traced: Any) -> bool:
    """Whether a leaf that is not to be traced comes out of two builds differently."""
    if isinstance(traced, jax.Array | np.ndarray):
        return not _is_shape(untraced) and not isinstance(untraced, bool | int | float | complex)
    return _is_shape(untraced) or (is_plain(traced) and not same(untraced, traced))


def _blaming(config: Any, problems: dict[str, str], first: Any) -> list[str]:
    """Each problem with the floats that it comes from, and how to pin them."""
    messages = []
    for path, what in problems.items():

        def recurs(config: Any, path: str = path) -> bool:
            again: dict[str, str] = {}
            _compared(first, config, jax.random.key(0), again)
            return path in again

        paths = blamed(config, recurs)
        got = f"it comes from {listing(map(spelled, paths), 8)}" if paths else None
        instead = "keep it in a field of the module and read it there,\nor " if "closes over" in what else ""
        instead = "derive its class from eqx.Module,\nor " if "no module) that holds" in what else instead
        messages.append(message(what, got=got, fix=instead + pin_advice(config, paths) if paths else None))
    return messages


def _verdicts(shapes: tuple[Any, Any], traced: dict[str, Any]) -> Twin:
    model, state = shapes
    held = {path for path, part in named_leaves(model, is_leaf=is_config).items() if is_config(part)}
    below = {path for path in traced if any(path.startswith((f"{config}.", f"{config}[")) for config in held)}
    leaves = named_leaves(model)
    trainable = tuple(
        _is_shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) and path not in below
        for path, leaf in leaves.items()
    )
    hyper = tuple(
        _is_array(traced[path]) and (path in below or isinstance(leaf, bool | int | float | complex))
        for path, leaf in leaves.items()
    )
    return Twin(tuple(leaves), trainable, hyper, model, state)


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
                    got=_spec(leaf),
                    fix="share it with eqx.nn.Shared, or copy it",
                )
            )
    errors += misplaced_arrays(model)
    refuse(f"{len(errors)} values of the model are misplaced", errors)


def live_twin(model: Any, state: Any) -> Twin:
    """The verdicts for a model that was built by the caller and has no description: its Python floats are static."""
    check_arrays(model)

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))

    shapes = jax.tree.map(shape, model)
    made = _verdicts((shapes, jax.tree.map(shape, state)), named_leaves(shapes))
    return dataclasses.replace(made, hyperparameter=(False,) * len(made.paths))
