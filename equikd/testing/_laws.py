"""The laws of states that are made of batches, for `check_metric` and `check_loss`.

Each law compares what two states *report*: to the bit where they hold whole numbers, whose sums do not round, and to a
tolerance elsewhere. What needs a compilation (scan, vmap, several devices) is looked at for one batch of each shape.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import message
from equikd.metrics import State, Summary, empty_state
from equikd.metrics._state import fields_where
from equikd.testing._batches import WRONG, Batch, Drawn, is_array
from equikd.testing._parts import written

_LARGE = 600  # rows: more than an int8 counts, and a quarter of them as well


class Broken(AssertionError):
    """A law does not hold."""


# Comparing


def computed(state: State) -> Any:
    """What the state reports; of summaries, their contents."""
    state = type(state).finalize(state)
    with np.errstate(all="ignore"):
        value = jax.tree.map(lambda leaf: vars(leaf) if isinstance(leaf, Summary) else leaf, type(state).compute(state))
        return jax.tree.map(np.asarray, value)


def is_whole(state: State) -> bool:
    """Whether sums of its numbers do not round."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state) if is_array(leaf)]
    return all(np.all((leaf == np.round(leaf)) & (abs(leaf) < 2**22) | ~np.isfinite(leaf)) for leaf in leaves)


def same(law: str, left: State, right: State, told: str, whole: bool, rtol: float) -> None:
    """Refuse two states that do not report the same.

    Raises:
        Broken: with both values.
    """
    one, other = computed(left), computed(right)
    if jax.tree.structure(one) == jax.tree.structure(other):
        pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
        if all(_close(a, b, whole, rtol) for a, b in pairs):
            return
    raise Broken(message(law, got=f"{_value(one)} and {_value(other)}", where=told))


def _close(a: Any, b: Any, whole: bool, rtol: float) -> bool:
    if a.shape != b.shape:
        return False
    if whole or not is_array(a) or a.dtype.kind in "biu":
        return bool(np.array_equal(a, b, equal_nan=is_array(a)))
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return bool(np.allclose(a, b, rtol=rtol, atol=rtol / 10, equal_nan=True))


def _value(value: Any) -> str:
    return str(jax.tree.map(lambda leaf: leaf.tolist() if leaf.size <= 8 else written(leaf), value))


# The laws


@dataclasses.dataclass(frozen=True, eq=False)
class Laws:
    """The laws of states that are made of batches."""

    of: Callable[[Batch], State]
    """Eager, so that batches of many shapes are cheap."""
    traced: Callable[[dict[str, Any], Any], State]
    """Arguments and mask -> state, for scan, vmap and several devices."""
    masked: bool
    """Whether there is a mask, so that there may be padding."""
    splits: bool
    """Whether the value of a row is its own, so that batches do not matter."""
    rtol: float

    def check(self, drawn: Drawn) -> None:
        """Check all on one drawn batch.

        Raises:
            Broken: the first law that does not hold.
        """
        batch = drawn.batch if self.masked else drawn.batch.full()
        state = self.of(batch)
        empty = empty_state(jax.eval_shape(lambda: state))
        whole, told = is_whole(state), repr(batch)

        def equal(law: str, left: State, right: State, more: str = "") -> None:
            exact = whole and is_whole(left) and is_whole(right)
            same(law, left, right, told + more, exact, self.rtol)

        equal("the empty state, merged from the left, changes the value", empty | state, state)
        equal("the empty state, merged from the right, changes the value", state | empty, state)
        cut = int(drawn.random.integers(1, batch.rows)) if batch.rows > 1 else 0
        first, second = batch.take(slice(0, cut)), batch.take(slice(cut, None))
        a, b = (self.of(first), self.of(second)) if cut else (state, state)
        equal("merging is not associative: (a | b) | c is not a | (b | c)", (a | b) | state, a | (b | state))
        equal("merging is not associative: (c | a) | b is not c | (a | b)", (state | a) | b, state | (a | b))
        if self.masked:
            self._padding(batch, state, empty, drawn, equal)
        if self.splits and any(batch.rowed):
            if cut:
                equal("of(a ++ b) is not of(a) | of(b)", state, a | b, f"\nsplit after row {cut}")
            if not fields_where(state, lambda rule: rule.ordered):
                order = drawn.random.permutation(batch.rows)
                equal("another order of the rows changes the value", self.of(batch.take(order)), state)
                equal("merging depends on the order: a | b is not b | a", a | b, b | a)
            if drawn.stacked:
                self._stacked(batch, state, empty, equal)
                large = batch.full().take(np.arange(_LARGE) % batch.rows)
                first, second = large.take(slice(0, _LARGE // 4)), large.take(slice(_LARGE // 4, None))
                text = f"\nthese rows again and again, {_LARGE} in all, split after row {_LARGE // 4}"
                merged = self.of(first) | self.of(second)
                equal("of(a ++ b) is not of(a) | of(b) for a large batch", self.of(large), merged, text)
        if self.masked and drawn.stacked and any(batch.rowed):
            self._devices(batch, state, drawn.junk, equal)

    def _padding(self, batch: Batch, state: State, empty: State, drawn: Drawn, equal: Callable[..., None]) -> None:
        junk = drawn.junk
        holding = f"\npadding holds {junk}, {WRONG} and True"
        equal("rows of padding change the value", self.of(batch.padded(2, junk)), state, holding)
        equal("what stands where the mask is False changes the value", self.of(batch.filled(junk)), state, holding)
        kept = batch.mask.any(axis=tuple(range(1, batch.mask.ndim)))
        if kept.any():
            equal("masked rows count: the rows without them give another value", self.of(batch.take(kept)), state)
        nothing = self.of(batch.nothing(junk))
        equal("a batch of padding alone reports something", nothing, empty, holding)
        equal("a batch of padding alone, merged, changes the value", state | nothing, state, holding)
        equal("a batch of padding alone, merged, changes the value", nothing | state, state, holding)

    def _devices(self, batch: Batch, state: State, junk: float, equal: Callable[..., None]) -> None:
        """Rows spread over all devices, padded so that each has as many, and the rest left to XLA."""
        devices = len(jax.devices())
        if devices == 1:
            return
        spread = batch.padded(-batch.rows % devices, junk)
        mesh = jax.make_mesh((devices,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        by_rows, whole = jax.NamedSharding(mesh, jax.P("rows")), jax.NamedSharding(mesh, jax.P())
        placed = [
            jax.device_put(leaf, by_rows if rowed else whole) if is_array(leaf) else None
            for leaf, rowed in zip(spread.leaves, spread.rowed, strict=True)
        ]

        def of(placed: list[Any], mask: Any) -> State:
            pairs = zip(placed, spread.leaves, strict=True)
            return self.traced(spread.tree.unflatten([rest if leaf is None else leaf for leaf, rest in pairs]), mask)

        result = jax.jit(of)(placed, jax.device_put(spread.mask, by_rows))
        more = f"\nrows over {devices} devices, {spread.rows - batch.rows} of them padding"
        equal("automatic sharding over several devices gives another value", result, state, more)

    def _stacked(self, batch: Batch, state: State, empty: State, equal: Callable[..., None]) -> None:
        """Two batches of the same size, stacked."""
        half = max(batch.rows // 2, 1)
        parts = [batch.take(slice(0, half)), batch.take(slice(batch.rows - half, None))]
        stacked = [
            np.stack([one, other]) if rowed else one
            for one, other, rowed in zip(parts[0].leaves, parts[1].leaves, batch.rowed, strict=True)
        ]
        moving = [leaf for leaf, rowed in zip(stacked, batch.rowed, strict=True) if rowed]
        masks = np.stack([part.mask for part in parts])

        def one(moving: list[Any], mask: Any) -> State:
            rest = iter(moving)
            leaves = [next(rest) if rowed else leaf for leaf, rowed in zip(stacked, batch.rowed, strict=True)]
            return self.traced(batch.tree.unflatten(leaves), mask)

        expected = self.of(parts[0]) | self.of(parts[1])
        mapped = jax.jit(lambda moving, masks: jax.vmap(one)(moving, masks).reduce())(moving, masks)
        equal("vmap and reduce give another value than |", mapped, expected)
        if not fields_where(state, lambda rule: not rule.fixed):

            def step(state: State, now: Any) -> tuple[State, None]:
                return state | one(*now), None

            scanned, _ = jax.jit(lambda xs: jax.lax.scan(step, jax.tree.map(jnp.asarray, empty), xs))((moving, masks))
            equal("scan gives another value than |", scanned, expected)
