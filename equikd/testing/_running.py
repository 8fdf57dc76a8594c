"""What `check_metric` and `check_loss` share: their options, and how drawn batches are checked."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from equikd.errors import message, nearest
from equikd.testing._arguments import Patience, check_options
from equikd.testing._batches import Drawn, batches
from equikd.testing._drawing import Options
from equikd.testing._laws import Broken
from equikd.testing._parts import known_names
from equikd.testing._rules import rules_of
from equikd.testing._strategies import configs
from equikd.typing._plan import place_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


class LawOptions(TypedDict, total=False):
    """The options of `check_metric` and `check_loss`, all of which may be left out.

    Example:
        >>> import equikd as ek
        >>> quick: LawOptions = {"examples": 1, "rtol": 1e-4}
        >>> ek.testing.check_metric(ek.metrics.Max(values="preds"), **quick)
        >>> ek.testing.check_loss(ek.losses.Value("preds"), **quick)
    """

    axes: "Mapping[str, SearchStrategy[Any]]"
    """Axis name -> strategy of its size, as in `arguments`."""
    where: Callable[..., bool]
    """Predicate of axis names, as in `arguments`."""
    given: "Mapping[str, SearchStrategy[Any]]"
    """Argument -> strategy of its value or shape, as in `arguments`."""
    values: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Any]]
    """Argument -> function of a numpy generator and a shape that makes its values, where any numbers of its dtype will
    not do: `values={"probs": lambda random, shape: random.random(shape)}`."""
    shared: Collection[str]
    """Arguments without an axis of rows, such as parameters; no batch splits or masks them."""
    examples: int
    """How many shapes of batches are drawn, two batches of each; 5 by default."""
    rtol: float
    """Relative tolerance, where sums round; 1e-5 by default."""


_DEFAULTS: LawOptions = {
    "axes": {},
    "given": {},
    "values": {},
    "shared": (),
    "examples": 5,
    "rtol": 1e-5,
}


def all_options(function: str, options: LawOptions) -> dict[str, Any]:
    """The options with the defaults of those that are left out.

    Raises:
        TypeError: an unknown option, with near ones.
    """
    known = LawOptions.__annotations__
    for name in options:
        if name not in known:
            what = f"{function} has no option {name!r}"
            raise TypeError(message(what, expected=", ".join(known), near=nearest(name, known)))
    return {**_DEFAULTS, **options}


def run(check: Callable[[Drawn], None], method: Any, options: dict[str, Any]) -> None:
    """Check drawn batches; raise what is wrong with the first that is wrong.

    Args:
        check: raises what is wrong with one example.
        method: the bound method whose annotations say what is drawn.
        options: all of them, see `all_options`.

    Raises:
        AssertionError: a law is broken.
        DrawError: options that name what does not exist.
    """
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    rules, _ = rules_of(method)
    chosen = Options(options["axes"], options["given"], "usual")
    where, values, shared, patience = options.get("where"), options["values"], options["shared"], Patience()
    check_options(rules, chosen, where)
    known_names("values", values, rules.signature.parameters, rules.name)
    known_names("shared", shared, rules.signature.parameters, rules.name)

    @settings(
        max_examples=options["examples"],
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=(Phase.generate,),
    )
    @given(st.composite(lambda draw: batches(draw, method, chosen, where, values, shared, patience))())
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
