"""What a config class may not define itself: names that it needs, methods that unflattening would pass over."""

import dataclasses
import inspect
import typing

from equikd.errors import ConfigError, listing, message

_NAMES = {"_flat", "_hash", "validate", "tree_items", "tree_replace"}
_METHODS = {
    "__post_init__": "unflattening does not call it; write validate(self), which is run on the host",
    "__init__": "unflattening does not call it; write a class method or function that makes it",
    "__eq__": "leave it out: two configs are equal if their fields are, by type and value",
    **dict.fromkeys(
        ("tree_items", "tree_replace", "__getstate__", "__setstate__"), "leave it out: a config class makes its own"
    ),
    "__hash__": "leave it out: two configs are equal if their fields are, by type and value",
}


def refuse_own(cls: type) -> None:
    """Refuse fields and methods, those of mixins included, that a config class makes itself or would never call.

    Raises:
        ConfigError: naming the class, the name and what to write instead.
    """
    annotated = {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
    taken = sorted(_NAMES & annotated)
    if taken:
        what = f"{cls.__qualname__}.{taken[0]}: a config class has this name itself"
        raise ConfigError(message(what, got=f"fields {listing(taken)}", fix="give the field another name"))
    for base in cls.__mro__[:-1]:
        for name, fix in _METHODS.items():
            own = base.__dict__.get(name)
            made = "__equikd_config__" in base.__dict__ or (dataclasses.is_dataclass(base) and name != "__post_init__")
            # `Protocol` and `Generic` write an `__init__` of their own into what derives from them.
            if own is not None and not made and base.__module__ != "typing" and typing.Protocol not in base.__bases__:
                what = f"{cls.__qualname__}: {base.__qualname__}.{name} would not be used"
                raise ConfigError(message(what, fix=fix))
