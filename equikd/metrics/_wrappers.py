"""Metrics around a metric: one that may be absent, and one for each leaf of a tree.

    ek.metrics.SkipIfMissing(ek.metrics.Accuracy(preds="preds", labels="batch.label"), missing="batch.label")
    ek.metrics.TreeMap(ek.metrics.Mean(values="preds"))

A wrapper has no key paths of its own: `reads` and the errors speak of those of the metric inside.
"""

from typing import Any, final

import jax

from equikd.config import config
from equikd.errors import ConfigError, WiringError, listing, message, nearest
from equikd.metrics._base import BaseMetric, Metric, is_numeric
from equikd.metrics._state import State, state_field, static_field
from equikd.tree import named_leaves, nested
from equikd.wiring import Context, Unwired, key_paths, lookup, place_of, standing_at


class Skipped(State):
    """The state of a metric that has been left out; it gives no result.

    Attributes:
        missing: the key path that leads nowhere.

    Example:
        >>> (Skipped("batch.label") | Skipped("batch.label")).compute()
        {}
    """

    missing: str = static_field()

    def compute(self) -> dict[str, Any]:
        """Nothing."""
        return {}


@config
class _Around(BaseMetric):
    """What wrappers have in common."""

    metric: BaseMetric
    """What is wrapped."""

    @property
    def takes_mask(self) -> bool:
        """As the metric."""
        return self.metric.takes_mask

    @property
    def inner(self) -> Metric:
        """What this is around in the end."""
        return self.metric.inner

    def reads(self) -> dict[str, str]:
        """The key paths of the metric, below `metric`."""
        return {f"metric.{name}": path for name, path in self.metric.reads().items()}


@final
@config
class SkipIfMissing(_Around):
    """A metric that gives no result where one of its key paths leads nowhere, such as labels that an eval lacks.

    Only the path that is named may be missing: another one that leads nowhere is an error as ever. So is a path that is
    missing everywhere, in training and in all evals that have the metric, since it is misspelt then.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.metrics import Mean
        >>> metric = SkipIfMissing(Mean(values="batch.weight"), missing="batch.weight")
        >>> metric.from_context(Context(batch={"x": jnp.ones(2)}, mask=jnp.ones(2, bool))).compute()
        {}
    """

    metric: BaseMetric
    """What is computed where nothing is missing."""
    missing: str
    """The key path that may lead nowhere; one of those of the metric."""

    def validate(self) -> None:
        """Refuse a path that the metric does not read."""
        paths = self.metric.reads()
        if self.missing not in paths.values():
            what = f"missing = {self.missing!r}: the metric does not read it"
            near, read = nearest(self.missing, paths.values()), listing(dict.fromkeys(paths.values()))
            raise ConfigError(message(what, expected=f"one of {read}", near=near))

    def connect(self, context: Context) -> dict[str, Any]:
        """The arguments of the metric; none where the path is missing and nothing else is wrong."""
        try:
            return self.metric.connect(context)
        except Unwired as error:
            paths = key_paths(error.owner)
            others = [(name, text) for name, text in error.errors if paths.get(name) != self.missing]
            if others or error.unfilled:
                raise Unwired(error.owner, others, error.unfilled, f".metric{error.below}") from None
            return {}

    def from_context(self, context: Context) -> State:
        """The state of the metric, or `Skipped`."""
        self.connect(context)  # what else is wrong is an error, missing or not
        if self._is_missing(context):
            return Skipped(self.missing)
        with standing_at(f"{place_of(self)}.metric"):
            return self.metric.from_context(context)

    def _is_missing(self, context: Context) -> bool:
        try:
            lookup(context, self.missing, many=True)
        except WiringError:
            return True
        return False


class TreeStates(State):
    """The states of one metric for each leaf of a tree.

    Attributes:
        states: path of a leaf -> state.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.metrics import Average
        >>> TreeStates({"a": Average.of(jnp.ones(2)), "b[0]": Average.of(jnp.zeros(2))}).compute()["b"][0].item()
        0.0
    """

    states: dict[str, State] = state_field()

    def compute(self) -> dict[Any, Any]:
        """The values, nested as the tree is."""
        return nested({path: type(state).compute(state) for path, state in self.states.items()})


@final
@config
class TreeMap(_Around):
    """A metric for each leaf of a tree; results are named by the paths of the leaves, `NAME/head[0].logits`.

    The arguments of the metric that are trees are taken apart, leaf by leaf: their arrays must have the same paths, and
    what is no array (an activation function in a model) is passed over. Arguments that are arrays, and the mask, are
    the same for all leaves.

    Example:
        >>> import jax.numpy as jnp
        >>> from equikd.metrics import Mean
        >>> preds = {"left": jnp.array([1.0, 3.0]), "right": jnp.array([5.0, 7.0])}
        >>> state = TreeMap(Mean(values="preds")).from_context(Context(preds=preds, mask=jnp.ones(2, bool)))
        >>> {name: value.item() for name, value in state.compute().items()}
        {'left': 2.0, 'right': 6.0}
    """

    metric: Metric
    """What is computed of each leaf."""

    def connect(self, context: Context) -> dict[str, Any]:
        """The arguments of the metric, trees among them."""
        try:
            return self.metric.connect(context)
        except Unwired as error:
            raise Unwired(error.owner, error.errors, error.unfilled, f".metric{error.below}") from None

    def from_context(self, context: Context) -> State:
        """The states of the leaves.

        Raises:
            WiringError: no argument is a tree, or two trees have other paths; with key paths. And what the metric says.
        """
        arguments, where = self.connect(context), f"{place_of(self)}.metric"
        trees = {
            name: {path: leaf for path, leaf in named_leaves(value).items() if is_numeric(leaf)}
            for name, value in arguments.items()
            if name != "mask" and not jax.tree_util.treedef_is_leaf(jax.tree.structure(value))
        }
        first = self._paths(trees, where)
        states = {}
        for path in first:
            leaf = {name: leaves[path] for name, leaves in trees.items()}
            with standing_at(f"{where} (at {path})"):
                states[path] = self.metric.from_arguments({**arguments, **leaf}, context)
        return TreeStates(states)

    def _paths(self, trees: dict[str, dict[str, Any]], where: str) -> list[str]:
        """The paths that all trees have."""
        read = self.metric.reads()
        if not any(trees.values()):
            got = "\n".join(f"{where}.{name} = {path!r}" for name, path in read.items() if name != "mask")
            what, fix = f"{place_of(self)}: there is no tree to take apart", "without TreeMap, if it is one array"
            raise WiringError(message(what, got=got, expected="a key path of a dict, tuple or module", fix=fix))
        first, *others = trees
        for other in others:
            lack = [path for path in trees[first] if path not in trees[other]]
            more = [path for path in trees[other] if path not in trees[first]]
            if lack or more:
                only = ((first, lack), (other, more))
                got = "\n".join(f"only in {read[name]!r}: {listing(paths)}" for name, paths in only if paths)
                what = f"{where}: the trees {read[first]!r} and {read[other]!r} have different paths"
                raise WiringError(message(what, got=got, expected="the same paths in all of them, or arrays"))
        return list(trees[first])
