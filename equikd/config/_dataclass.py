"""Config classes: frozen dataclasses that are pytrees, whose floats are traced leaves; their other fields are static.

    @ek.config.config
    class Opt:
        learning_rate: float = 1e-3
        '''Peak step size.'''
        steps: int = 100

`Opt().learning_rate` is the Python float 0.001 everywhere outside a trace. Flattening wraps the floats of an instance
in strong 0-d arrays, in one transfer, once, and keeps them; inside `jit`, `vmap` or `grad` the field is the tracer. So
any float may change without a recompile, while `steps` is part of the program. Unflattening never calls the
constructor: whatever a transformation puts into the leaves passes through. `validate(self)`, where defined, is run on
the host over the whole tree by `ek.config.validate`. Cost: about 0.4 ms once for 20 floats, then 4 us a flatten.
"""

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, dataclass_transform, overload

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from equikd._compat import CONFIG, Tracer
from equikd.config._flatten import Aux, flatten_values, from_child, has_float
from equikd.config._names import from_portable, portable
from equikd.config._names import spell as spell_value
from equikd.config._own import refuse_own
from equikd.config._roles import Plan, normalise, spell
from equikd.config._roles import plan as make_plan
from equikd.config._values import Identity, is_config, is_part, typed_key
from equikd.errors import ConfigError, listing, message, nearest, report

T = TypeVar("T")


def field(
    *, static: bool = False, dynamic: bool = False, opaque: bool = False, unsigned: bool = False, **kw: Any
) -> Any:
    """A field of a config class with a role of its own; other arguments go to `dataclasses.field`.

    Args:
        static: a float that is part of the program: changing it recompiles.
        dynamic: on an int, an int32 leaf: changing it never recompiles; on `float | None`, a leaf where it is a value.
            `jax.grad` refuses int leaves: differentiate such a config with `eqx.filter_grad`, which leaves them out.
        opaque: held by identity on the host, never in a compiled function (the arrays of a dataset).
        unsigned: with `dynamic` on an int, uint32 (a seed).
        **kw: `default`, `default_factory`, `kw_only`, ... as in `dataclasses.field`.

    Example:
        >>> @config
        ... class Warmup:
        ...     steps: int = field(dynamic=True, default=10)
        >>> jax.tree.leaves(Warmup())[0].dtype.name
        'int32'
    """
    options = {"static": static, "dynamic": dynamic, "opaque": opaque, "unsigned": unsigned}
    return dataclasses.field(metadata={"equikd": options, **kw.pop("metadata", {})}, **kw)


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, field))
def config(cls: type[T], /) -> type[T]: ...
@overload
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, field))
def config(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, field))
def config(cls: Any = None, /, *, kw_only: bool = False) -> Any:
    """Make a class a config class: a frozen dataclass that is a pytree with named leaves.

    Args:
        cls: the class; its annotations decide the roles, see `roles`.
        kw_only: all fields are keyword-only.

    Returns:
        The same class, now a frozen dataclass. A method `validate(self)` is run by `validate`, by command lines and by
        the trainer, not at construction. Instances are equal if their fields are, by type and value (see `host`).

    Raises:
        ConfigError: at once where the class defines `__post_init__` (write `validate`), or a field whose name a config
            class needs itself; at construction where a value does not fit its annotation, naming `Class.field`.

    Example:
        >>> @config
        ... class Opt:
        ...     learning_rate: float = 1e-3
        ...     steps: int = 100
        >>> Opt(learning_rate=1).learning_rate
        1.0
        >>> jax.jit(lambda opt: opt.learning_rate * opt.steps)(Opt()).item() > 0.0999
        True
    """
    if cls is None:
        return functools.partial(config, kw_only=kw_only)
    refuse_own(cls)
    frame = sys._getframe(1)
    cls.__post_init__ = _post_init
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = _repr
    _keep_keyword_only(cls)
    cls = dataclasses.dataclass(frozen=True, eq=False, kw_only=kw_only)(cls)
    cls.__init__ = _explained(cls.__init__)
    cls.__equikd_config__ = _Class(cls, frame)
    methods = (_equal, _hash, _get_state, _set_state, _tree_items, _tree_replace)
    names = ("__eq__", "__hash__", "__getstate__", "__setstate__", "tree_items", "tree_replace")
    for name, method in zip(names, methods, strict=True):
        setattr(cls, name, method)
    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, functools.partial(_unflatten, cls), _flatten)
    return cls


class _Class:
    """What is known of a config class; plans are made at first use, when forward references exist."""

    def __init__(self, cls: type, frame: types.FrameType) -> None:
        self.cls = cls
        self.local: dict[str, Any] = {}
        self.code = None
        if frame.f_locals is not frame.f_globals:  # a class made in a function: keep what its annotations may mean
            self.code = frame.f_code
            words = set(re.findall(r"\w+", " ".join(map(str, inspect.get_annotations(cls).values()))))
            self.local = {name: value for name, value in frame.f_locals.items() if name in words}

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        try:
            return self._evaluate(self.local)
        except NameError as first:
            try:
                return self._evaluate(self._later())
            except NameError:
                raise ConfigError(
                    message(
                        f"{self.cls.__qualname__}: an annotation cannot be evaluated",
                        got=str(first),
                        fix="import or define the name where the class is defined (not only under TYPE_CHECKING)",
                    )
                ) from None

    def _evaluate(self, local: Mapping[str, Any]) -> dict[str, Any]:
        # An inherited field is evaluated where its class was made.
        bases = [base.__dict__.get("__equikd_config__") for base in reversed(self.cls.__mro__)]
        names = {name: value for base in bases if base is not None for name, value in base.local.items()}
        names = {**names, **local, self.cls.__name__: self.cls}
        return typing.get_type_hints(self.cls, localns=names, include_extras=True)

    def _later(self) -> Mapping[str, Any]:
        """What the function that made the class has defined since, if it still runs."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        return {} if frame is None or self.code is None else dict(frame.f_locals)

    @functools.cached_property
    def plans(self) -> dict[str, Plan]:
        made, annotations = {}, self.hints
        for f in dataclasses.fields(self.cls):
            where = f"{self.cls.__qualname__}.{f.name}"
            if not f.init:
                raise ConfigError(
                    message(f"{where}: a config field is an argument of the constructor", got="init=False")
                )
            try:
                made[f.name] = make_plan(annotations[f.name], **f.metadata.get("equikd", {}))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
        return made


def plans(cls: type) -> dict[str, Plan]:
    """Field -> plan of a config class.

    Raises:
        ConfigError: the class is no config class itself, though it may inherit from one.
    """
    own = cls.__dict__.get("__equikd_config__")
    if own is None:
        raise ConfigError(
            message(
                f"{cls.__qualname__} is not a config class"
                + (", though it inherits from one" if hasattr(cls, "__equikd_config__") else ""),
                fix=f"decorate {cls.__qualname__} with @ek.config.config",
            )
        )
    return own.plans


def hints(cls: type) -> dict[str, Any]:
    """Field -> evaluated annotation, `Annotated` marks included."""
    plans(cls)
    return cls.__dict__["__equikd_config__"].hints


def roles(cls: type) -> dict[str, tuple[str, str]]:
    """Field -> (role, why) of a config class, the roles being leaf, static, child and opaque.

    Example:
        >>> @config
        ... class Opt:
        ...     learning_rate: float
        ...     steps: int
        >>> roles(Opt)["steps"]
        ('static', 'annotated int')
    """
    options = {f.name: [k for k, on in f.metadata.get("equikd", {}).items() if on] for f in dataclasses.fields(cls)}
    return {
        name: (
            plan.role,
            f"annotated {spell(plan.annotation)}" + "".join(f", {o}=True" for o in options[name]) + plan.remark,
        )
        for name, plan in plans(cls).items()
    }


def _keep_keyword_only(cls: type) -> None:
    """A field that a class declares again, with another default say, stays keyword-only if it was inherited so."""
    bases = [getattr(base, "__dataclass_fields__", {}) for base in cls.__mro__[:0:-1]]
    inherited = {f.name: f.kw_only for fields in bases for f in fields.values()}
    for name in inspect.get_annotations(cls):
        if inherited.get(name):
            own = cls.__dict__.get(name, dataclasses.MISSING)
            if not isinstance(own, dataclasses.Field):
                own = dataclasses.field() if own is dataclasses.MISSING else dataclasses.field(default=own)
                setattr(cls, name, own)
            if own.kw_only is dataclasses.MISSING:
                own.kw_only = True


def _explained(construct: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose unknown, missing or doubled arguments are a `ConfigError` with near matches."""
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if (
            "__equikd_config__" not in type(self).__dict__
        ):  # a subclass without the decorator, whose fields nobody knows
            plans(type(self))
        for cache in ("_flat", "_hash"):  # who calls it on an instance once more makes another value of it
            self.__dict__.pop(cache, None)
        try:
            construct(self, *args, **kwargs)
        except TypeError as error:
            try:
                signature.bind(self, *args, **kwargs)
            except TypeError as mismatch:
                names = [name for name in signature.parameters if name != "self"]
                unknown = [name for name in kwargs if name not in names]
                raise ConfigError(
                    message(
                        f"{type(self).__qualname__}: "
                        + (f"no field {', '.join(map(repr, unknown))}" if unknown else str(mismatch)),
                        near=[near for name in unknown for near in nearest(name, names, 1)],
                        expected=f"{type(self).__qualname__}({listing(names, 24)})",
                    )
                ) from None
            raise error

    return __init__


def _post_init(self: Any, *init_only: Any) -> None:
    if init_only:
        name = type(self).__qualname__
        raise ConfigError(message(f"{name}: an InitVar is lost when the config is copied", fix="make it a field"))
    errors = []
    values = self.__dict__
    for name, plan in plans(type(self)).items():
        try:
            values[name] = normalise(plan, values[name], f"{type(self).__qualname__}.{name}")
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError(report(f"{len(errors)} fields of {type(self).__qualname__} are wrong", errors))


def _flatten(self: Any) -> tuple[tuple[Any, ...], Aux]:
    values = self.__dict__
    kept = values.get("_flat")
    if kept is not None:  # see `Kept`
        x64, flat, arrays = kept
        if x64 is CONFIG.jax_enable_x64:
            if not arrays or not any(map(type(arrays[0]).is_deleted, arrays)):
                return flat
        elif x64 is None:
            return flat
    named = {name: (plan, values[name]) for name, plan in plans(type(self)).items()}
    try:
        values["_flat"] = flatten_values(named)
    except ConfigError as error:
        raise ConfigError(f"{type(self).__qualname__}.{error}") from None
    return values["_flat"][1]


def _flatten_with_keys(self: Any) -> tuple[tuple[tuple[Any, Any], ...], Aux]:
    children, aux = _flatten(self)
    return tuple((GetAttrKey(name), child) for name, child in zip(aux.children, children, strict=True)), aux


def _unflatten(cls: type, aux: Aux, children: Any) -> Any:
    self = object.__new__(cls)
    values = self.__dict__
    children = tuple(children)
    values.update(dict.fromkeys(plans(cls)))  # keeps the order of the fields
    values.update((name, static.value) for name, static in aux.statics)
    values.update((name, from_child(child)) for name, child in zip(aux.children, children, strict=True))
    if not has_float(children):  # a Python float is wrapped at the next flatten, lest it be weak at the jit border
        values["_flat"] = (None, (children, aux), ())  # what it was given is what it flattens to
    return self


def raw(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance with these fields, made without the constructor, for values that only a trace produces."""
    self = object.__new__(cls)
    self.__dict__.update(values)
    return self


def fields_of(self: Any) -> dict[str, Any]:
    """Field -> value of a config, caches left out."""
    return {name: self.__dict__[name] for name in plans(type(self))}


def comparison_key(value: Any) -> Any:
    """A hashable key by type and value for anything that a config may hold; arrays by dtype, shape and bytes."""
    if is_config(value):
        return (type(value), tuple((name, comparison_key(part)) for name, part in fields_of(value).items()))
    if isinstance(value, Tracer):
        return Identity(value)
    if isinstance(value, jax.Array | np.ndarray):
        array = np.asarray(value)
        return ("array", array.shape, array.dtype.name, array.tobytes())
    if type(value) is tuple:
        return (tuple, tuple(map(comparison_key, value)))
    if isinstance(value, dict):
        return (dict, tuple(sorted((key, comparison_key(part)) for key, part in value.items())))
    if is_part(value):
        return value
    try:
        return typed_key(value)
    except TypeError:
        return Identity(value)


def _equal(self: Any, other: object) -> bool:
    if type(self) is not type(other):
        return NotImplemented
    return self is other or comparison_key(self) == comparison_key(other)


def _hash(self: Any) -> int:
    if "_hash" not in self.__dict__:
        self.__dict__["_hash"] = hash(comparison_key(self))
    return self.__dict__["_hash"]


def _repr(self: Any) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{k}={spell_value(v)}' for k, v in fields_of(self).items())})"


def _get_state(self: Any) -> dict[str, Any]:
    return {name: portable(value) for name, value in fields_of(self).items()}


def _set_state(self: Any, state: dict[str, Any]) -> None:
    self.__dict__.clear()
    self.__dict__.update((name, from_portable(value)) for name, value in state.items())


def _tree_items(self: Any) -> dict[str, Any]:
    return fields_of(self)


def _tree_replace(self: Any, key: str, value: Any) -> Any:
    return type(self)(**{**fields_of(self), key: value})
