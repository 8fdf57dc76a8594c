"""A step compiled for several devices."""

from typing import Any

from equikd.sharding._spread import Spread


class SpreadStep:
    """A compiled step on several devices: one program, whatever arrays it is called with.

    JAX traces and compiles anew where an array on the mesh stands in for one on the host, accumulators for fresh ones,
    say. So the program is made of shapes alone, when the first step is made.
    """

    def __init__(self, jitted: Any, shapes: tuple[Any, ...], spread: Spread) -> None:
        """Compiles nothing.

        Args:
            jitted: the step, of which the first two arguments are given back.
            shapes: of its arguments.
            spread: the devices.
        """
        self._jitted, self._shapes, self._spread = jitted, shapes, spread
        self._compiled: Any = None

    def lower(self, *args: Any) -> Any:
        """As the method of a jitted function."""
        return self._jitted.lower(*args)

    def __call__(self, *args: Any) -> Any:
        """One step; arguments of other shapes are compiled for once more."""
        if self._compiled is None:
            self._compiled = self._jitted.lower(*self._shapes).compile()
        self._spread.wait(*args[:2])  # for the step before this one
        try:
            return self._compiled(*args)
        except TypeError:  # other shapes
            return self._jitted(*args)
