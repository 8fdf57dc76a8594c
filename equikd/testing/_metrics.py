"""`ek.testing.check_metric(metric)`: what makes a metric exact, as laws on drawn batches.

    def test_my_metric():
        ek.testing.check_metric(MyMetric(preds="preds", targets="batch.y"))

With `of` for `metric.from_values` and `|` for the merge of states:

- associative: `(a | b) | c` is `a | (b | c)`, and the empty state changes nothing on either side;
- batches do not matter: `of(a ++ b)` is `of(a) | of(b)`, and neither does the order of rows, unless fields keep it;
- padding does not matter, whatever it holds: nan, infinity, labels of no class; a batch of padding adds nothing;
- `lax.scan` over batches, and `vmap` with `reduce`, give what `|` gives.

What is compared is what `compute` returns: to the bit where the states hold whole numbers, whose sums do not round.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from equikd.errors import message
from equikd.metrics import Metric, State, empty_state
from equikd.metrics._state import fields_where
from equikd.testing._arguments import Patience, check_options
from equikd.testing._batches import WRONG, Batch, Drawn, batches, is_array
from equikd.testing._drawing import Options
from equikd.testing._parts import DrawError, known_names, written
from equikd.testing._rules import rules_of
from equikd.testing._strategies import configs
from equikd.typing._plan import place_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


class Broken(AssertionError):
    """A law does not hold; Hypothesis looks for a smaller batch."""


# Comparing


def computed(state: State) -> Any:
    """What the state reports."""
    state = type(state).finalize(state)
    with np.errstate(all="ignore"):
        return jax.tree.map(np.asarray, type(state).compute(state))


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
    """Arguments and mask -> state, for scan and vmap."""
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

        def equal(law: str, left: State, right: State, more: str = "", near: bool = False) -> None:
            exact = whole and not near and is_whole(left) and is_whole(right)
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


def run(check: Callable[[Drawn], None], method: Any, options: dict[str, Any], examples: int) -> None:
    """Check drawn batches; raise what is wrong with a small one.

    Args:
        check: raises what is wrong with one example.
        method: the bound method whose annotations say what is drawn.
        options: `axes`, `where`, `given`, `values`, `shared`, as in `check_metric`.
        examples: how many batches.
    """
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    rules, _ = rules_of(method)
    chosen = Options(options["axes"] or {}, options["given"] or {}, "usual")
    check_options(rules, chosen, options["where"])
    known_names("values", options["values"] or (), rules.signature.parameters, rules.name)
    known_names("shared", options["shared"], rules.signature.parameters, rules.name)
    patience, values = Patience(), options["values"] or {}

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=(Phase.generate,),
    )
    @given(
        st.composite(
            lambda draw: batches(draw, method, chosen, options["where"], values, options["shared"], patience)
        )()
    )
    def holds(examples: tuple[Drawn, Drawn]) -> None:
        for example in examples:
            try:
                check(example)
            except Broken as error:
                raise Broken(f"{rules.name}: {error}") from None
            except Exception as error:
                what = f"{rules.name}: raises {type(error).__name__} where all arguments fit"
                fix = "mend it, or say what fits: values={...}, axes={...}, where=..., given={...}"
                told = message(what, where=repr(example.batch), got=str(error)[:2000], fix=fix)
                raise Broken(told) from error

    try:
        holds()
    except Broken as error:  # without the notes of Hypothesis, which repeat the batch
        failure, cause = str(error), error.__cause__
    else:
        return
    place = place_of(inspect.unwrap(method.__func__))
    raise AssertionError(f"{failure}\n  in {place}" if place else failure) from cause


def instance_of(target: Any) -> Any:
    """The loss or metric itself, or one that is drawn of its class."""
    if not isinstance(target, type):
        return target
    from hypothesis import find

    return find(configs(target), lambda one: True)


def check_metric(
    metric: Any,
    *,
    axes: "Mapping[str, SearchStrategy[Any]] | None" = None,
    where: Callable[..., bool] | None = None,
    given: "Mapping[str, SearchStrategy[Any]] | None" = None,
    values: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Any]] | None = None,
    shared: Collection[str] = (),
    examples: int = 5,
    rtol: float = 1e-5,
) -> None:
    """Check that a metric is exact whatever the batches, the padding and the order.

    Floats are drawn as whole numbers in half of the batches, and normally distributed in the others; ints are indices
    of classes, from 0 to below the smallest last axis of the floats. Arrays with as many rows as the mask are split.

    Args:
        metric: the metric, or its class, of which an instance is drawn.
        axes: axis name -> strategy, as in `arguments`.
        where: predicate of axis names, as in `arguments`.
        given: argument -> strategy of its value or shape, as in `arguments`.
        values: argument -> function of a numpy generator and a shape that makes its values, where any numbers of its
            dtype will not do: `values={"probs": lambda random, shape: random.random(shape)}`.
        shared: arguments without an axis of rows, such as parameters; no batch splits or masks them.
        examples: how many shapes of batches are drawn, two batches of each.
        rtol: relative tolerance, where sums round.

    Raises:
        AssertionError: a law is broken; the text has the law, the batch and both values.
        DrawError: annotations or options from which nothing can be drawn.

    Example:
        >>> from equikd.metrics import Mean
        >>> check_metric(Mean(values="preds"), examples=2)
    """
    metric = instance_of(metric)
    if not isinstance(metric, Metric):
        raise DrawError(message("check_metric checks a metric", got=repr(metric), expected="ek.metrics.Metric"))
    takes = "mask" in rules_of(metric.from_values)[0].signature.parameters

    def traced(arguments: dict[str, Any], mask: Any) -> State:
        return metric.from_values(**arguments, **({"mask": mask} if takes else {}))

    def of(batch: Batch) -> State:
        return traced(jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, batch.arguments), batch.mask)

    laws = Laws(of, traced, metric.takes_mask, splits=takes, rtol=rtol)
    options = {"axes": axes, "where": where, "given": given, "values": values, "shared": shared}
    run(laws.check, metric.from_values, options, examples)
