"""What a submodule is called on, as a pytree that is read like its arguments."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a submodule was called on; `inputs[0]` is its first argument, `inputs["key"]` one that was given by name.

    Attributes:
        args: the arguments given by position.
        kwargs: those given by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __getitem__(self, key: int | str) -> Any:
        return self.kwargs[key] if isinstance(key, str) else self.args[key]

    def tree_items(self) -> dict[Any, Any]:
        """The arguments by position and by name, for paths."""
        return {**dict(enumerate(self.args)), **self.kwargs}

    def tree_flatten_with_keys(self) -> Any:
        """As a pytree of all arguments."""
        by_position = [(jax.tree_util.SequenceKey(at), value) for at, value in enumerate(self.args)]
        by_name = [(jax.tree_util.GetAttrKey(name), value) for name, value in self.kwargs.items()]
        return (*by_position, *by_name), tuple(self.kwargs)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> "Inputs":
        """The inverse of `tree_flatten_with_keys`."""
        values = tuple(values)
        count = len(values) - len(names)
        return cls(values[:count], dict(zip(names, values[count:], strict=True)))
