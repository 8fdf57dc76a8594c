"""Precision: in which dtype a model computes.

    ek.Trainer(precision=ek.optim.Precision(), ...)      # compute in bfloat16

Parameters, optimizer state, gradients, losses and metrics stay in float32; the model computes in bfloat16. The casts
stand where the step calls the model, and evals and `predict` call it there too: parameters and floating inputs go to
`compute`, predictions come back in `output`. Gradients pass the casts, and arrive in the dtype of the parameters.

Norm layers keep float32: their parameters, and what goes on inside of them. Left as they are besides: `eqx.nn.State`
(running statistics), PRNG keys, integers, and the hyperparameters of the config, which promote like Python floats.
Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740, section 3.1: a master copy of the weights in
float32. Loss scaling (3.2) is for the narrow exponents of float16; bfloat16 has those of float32.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from equikd._compat import is_weak
from equikd.config import config
from equikd.errors import ConfigError, message
from equikd.optim._base import refuse
from equikd.optim._select import collecting_problems, members, select

_DTYPES = ("bfloat16", "float32")
_PRODUCTS = ("default", "high", "highest", "bfloat16", "bfloat16_3x", "tensorfloat32", "float32")
_NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)


@config
class Precision:
    """The dtypes of the computation, as the value of `Trainer(precision=...)`.

    Example:
        >>> import jax
        >>> precision = Precision()
        >>> layer = precision.model(eqx.nn.Linear(2, 3, key=jax.random.key(0)))
        >>> layer.weight.dtype.name, precision.outputs(layer(precision.inputs(jnp.ones(2)))).dtype.name
        ('bfloat16', 'float32')
    """

    compute: str = "bfloat16"
    """Dtype of the model's parameters and inputs while it computes."""
    output: str = "float32"
    """Dtype of its predictions."""
    matmul: str | None = None
    """Precision of the model's matrix products and convolutions on accelerators, backward pass included, as
    `jax.default_matmul_precision` has it: "default" is the fastest, "highest" is float32; None: JAX's setting."""
    keep: Any = _NORMS
    """Pattern of what stays in float32. Parameters that a glob or predicate matches are not cast. Modules of a class
    compute in float32 altogether: what they take is cast to it, and what they give back to the dtype that came in."""

    def validate(self) -> None:
        """Refuse dtypes that a model cannot be trained in."""
        problems = [
            f"{name} must be {' or '.join(_DTYPES)}, got {value!r}" + _reason(value)
            for name, value in (("compute", self.compute), ("output", self.output))
            if isinstance(value, str) and value not in _DTYPES
        ]
        if isinstance(self.matmul, str) and self.matmul not in _PRODUCTS:
            problems.append(f"matmul must be one of {', '.join(_PRODUCTS)}, got {self.matmul!r}")
        refuse(problems)

    def products(self) -> contextlib.AbstractContextManager[None]:
        """Inside, matrix products have the precision `matmul`."""
        return contextlib.nullcontext() if self.matmul is None else jax.default_matmul_precision(self.matmul)

    def check(self, model: Any) -> None:
        """Refuse globs of `keep` that match nothing; see `collecting_problems`."""
        select(self.keep, eqx.filter(model, _is_parameter), "keep", optional=True)

    def model(self, model: Any) -> Any:
        """A model that computes in `compute`."""
        classes = tuple(one for one in members(self.keep) if isinstance(one, type))
        named = tuple(one for one in members(self.keep) if not isinstance(one, type))
        params, rest = eqx.partition(model, _is_parameter)
        leaves, structure = jax.tree.flatten(params)
        kept = [a or b for a, b in zip(_picked(named, params), _picked(classes, params), strict=True)]
        leaves = [leaf if keep else leaf.astype(self.compute) for leaf, keep in zip(leaves, kept, strict=True)]
        model = eqx.combine(structure.unflatten(leaves), rest)

        def is_kept(part: Any) -> bool:
            return part is not model and isinstance(part, classes) and isinstance(part, eqx.Module) and callable(part)

        return jax.tree.map(lambda part: _kept(part) if is_kept(part) else part, model, is_leaf=is_kept)

    def inputs(self, tree: Any) -> Any:
        """Floating arrays in `compute`."""
        return _cast(tree, self.compute)

    def outputs(self, tree: Any) -> Any:
        """Floating arrays in `output`."""
        return _cast(tree, self.output)


def _kept(module: Any) -> Any:
    """A module that computes in float32 inside a model that does not; of a subclass, as some ask what a layer is.

    `eqx.nn.Sequential` asks whether a layer has a state, models ask whether `self.norm` is a `BatchNorm` and read its
    fields: a module around the layer would answer otherwise.

    The norm layers of Equinox differ: some go to float32 by themselves, batch normalisation would take its statistics
    in bfloat16 and give back float32, in which all that follows would then compute.
    """
    cls = type(module)
    try:
        made = object.__new__(_subclass(cls))
    except Exception as error:
        what = f"precision: keep: {cls.__qualname__} cannot be kept as a class, as it allows no subclass"
        expected = "classes that may be subclassed without arguments"
        raise ConfigError(message(what, got=str(error), expected=expected, fix=_BY_PATH)) from error
    for field in dataclasses.fields(module):
        if hasattr(module, field.name):
            object.__setattr__(made, field.name, getattr(module, field.name))
    return made


_BY_PATH = """keep="**.norm.**" keeps the parameters in float32, by their paths
cast in its own __call__ whatever else is to be computed in it: x.astype("float32")"""


class _Unannounced:
    """Goes before a class whose `__init_subclass__` would ask for arguments, or note the subclass in a table."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Tell nobody."""


@functools.cache
def _subclass(cls: Any) -> Any:
    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtypes = [leaf.dtype for leaf in jax.tree.leaves((args, kwargs)) if _is_floating(leaf)]
        out = cls.__call__(self, *_cast(args, "float32"), **_cast(kwargs, "float32"))
        return _cast(out, dtypes[0]) if dtypes else out

    told = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (_Unannounced, cls), {"__call__": call, **told})


def _picked(patterns: tuple[Any, ...], params: Any) -> tuple[bool, ...]:
    """As `select`; a model that an eval's transform has made need not have what the trained one has."""
    with collecting_problems("precision", []):
        return select(patterns, params, "keep", optional=True)


def _cast(tree: Any, dtype: Any) -> Any:
    """Floating arrays in another dtype; an `eqx.nn.State`, keys, ints and weakly typed floats as they are."""

    def cast(part: Any) -> Any:
        return part.astype(dtype) if _is_floating(part) else part

    return jax.tree.map(cast, tree, is_leaf=lambda part: isinstance(part, eqx.nn.State))


def _is_floating(leaf: Any) -> bool:
    return eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating) and not is_weak(leaf)


def _is_parameter(leaf: Any) -> bool:
    """Whether a leaf of a model, or its shape, is a floating array that is no hyperparameter."""
    known = eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    return known and jnp.issubdtype(leaf.dtype, jnp.floating) and not is_weak(leaf)


def _reason(dtype: str) -> str:
    if dtype in ("float16", "f16", "half"):
        return ": small gradients are 0 in float16 unless the loss is scaled, which is not done here; use 'bfloat16'"
    return ""
