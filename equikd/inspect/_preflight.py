"""Preflight: an experiment looked at before it runs. Shapes are evaluated (`eval_shape`), nothing is computed.

    print(ek.inspect.check(trainer))

First everything that `train` would refuse is refused here, all at once. Then it is told what the experiment consists
of: every path of the context that a key path may name, with shape, dtype and who reads it; the results that training
and evals will report; what is trained, frozen and a hyperparameter; which floats are traced and why the others are not.
What is legal, but hardly meant, is a warning: data that nothing reads, a loss without a gradient.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from equikd.config._values import Pin
from equikd.data import Batch
from equikd.evals import eval_context
from equikd.inspect._devices import Devices, devices_of, uneven_parts
from equikd.inspect._memory import Memory, memory_of
from equikd.inspect._readers import counted, read_by, readers_of
from equikd.inspect._tables import contexts, tables
from equikd.metrics import Aux
from equikd.model import static_floats
from equikd.model._floats import spelled
from equikd.train import Trainer
from equikd.train._check import abstract, eval_view
from equikd.train._feed import batches_from
from equikd.train._in_step import enclosed
from equikd.train._init_from import weights_of
from equikd.train._program import program_for
from equikd.train._setup import Setup, prepare
from equikd.train._state import TrainState, split
from equikd.train._step import apply_updates, begin, forward, loss_and_gradients, losses_of
from equikd.train._trainer import writers_of
from equikd.train._weights import Taken
from equikd.tree import join, named_leaves, parse, walk
from equikd.wiring import Context, named

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Leaves:
    """How many leaves of a model there are of one kind.

    Attributes:
        leaves: number of arrays (of hyperparameters: of numbers).
        elements: number of elements in them.
        bytes: their size.
    """

    leaves: int
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What `check` has found; printed as tables.

    Attributes:
        paths: every path of the training step's context -> shape and dtype, in the order of computation.
        evals: eval name -> the same for its context.
        results: `split/name` -> shape and dtype of each reported result, or the class of an image, text or histogram;
            None where only rows can tell.
        readers: key path -> the config paths that hold it.
        trainable: the leaves that are trained.
        frozen: arrays of the model that are not.
        hyperparameter: floats of the model that each step takes from the config.
        floats: config path -> `"traced"`, or `"static: ..."` with the reason.
        warnings: what is legal, but hardly meant.
        memory: bytes of the compiled step, where they were asked for.
        accumulate: micro-batches in a step; `paths` are those of the whole batch.
        init_from: what of the weights of `init_from` is taken, and what is not; None where the trainer names none.
        devices: what the devices of a mesh hold; None without one.
    """

    paths: dict[str, Shape]
    evals: dict[str, dict[str, Shape]]
    results: dict[str, Shape | str | None]
    readers: dict[str, tuple[str, ...]]
    trainable: Leaves
    frozen: Leaves
    hyperparameter: Leaves
    floats: dict[str, str]
    warnings: tuple[str, ...]
    memory: Memory | None = None
    accumulate: int = 1
    init_from: Taken | None = None
    devices: Devices | None = None

    @property
    def context(self) -> str:
        """The tables of all that key paths can name, in training and in each eval."""
        return contexts(self)

    def __str__(self) -> str:
        return tables(self)


def check(trainer: Trainer, *, model: Any = None, model_state: Any = None, memory: bool = False) -> Preflight:
    """Check an experiment before it runs, and tell what it consists of.

    Args:
        trainer: the experiment; its data is opened, the step is neither compiled nor run, and nothing is written.
        model: a live model, as in `Trainer.init`.
        model_state: its `eqx.nn.State`.
        memory: compile the step and report its memory; takes as long as the first step of training.

    Returns:
        Context, results, leaves, floats and warnings; printed as tables.

    Raises:
        EquikdError: whatever `train` would refuse; all wrong key paths and shapes in one report.

    Example:
        >>> import equinox as eqx, numpy as np, optax, equikd as ek
        >>> trainer = ek.Trainer(
        ...     model=ek.lazy(eqx.nn.MLP)(3, 1, 8, 1),
        ...     inputs={"x": "batch.x"},
        ...     losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        ...     optimizer=ek.lazy(optax.sgd)(0.1),
        ...     train_data=ek.data.InMemory({"x": np.ones((8, 3)), "y": np.ones((8, 1)), "id": np.arange(8)}, 4),
        ...     num_steps=1,
        ... )
        >>> found = check(trainer)
        >>> found.paths["preds"].shape, found.trainable.elements, found.floats["optimizer.learning_rate"]
        ((4, 1), 41, 'traced')
        >>> found.warnings
        ('batch.id: nothing reads it',)
    """
    setup = prepare(trainer, model, model_state)
    batches_from(setup, 0)  # what opening the data refuses, and the writers, `train` would refuse too
    writers_of(trainer)
    weights = weights_of(trainer, setup.state)
    readers = readers_of(setup)
    paths = _paths(setup, readers)
    return Preflight(
        paths=paths,
        evals={one.name: _eval_paths(setup, one) for one in setup.evals},
        results=_results(setup),
        readers=readers,
        trainable=_leaves(setup.state, trained=True),
        frozen=_leaves(setup.state, trained=False),
        hyperparameter=Leaves(*_hyperparameters(setup.state)),
        floats=_floats(trainer, setup),
        warnings=(*_unread(setup, paths, readers), *_without_gradient(setup), *_idle(setup), *uneven_parts(setup)),
        memory=memory_of(program_for(setup.config, setup.state, setup.spec)) if memory else None,
        accumulate=setup.config.accumulate,
        init_from=None if weights is None else weights.taken,
        devices=devices_of(setup),
    )


def _shapes(run: Callable[..., Context], *args: Any, readers: dict[str, tuple[str, ...]] | None = None) -> Any:
    """Path -> shape of all that a context holds, in the order of computation (a dict in a trace has another).

    Key paths among `readers` with negative indices are put as these paths have them.
    """
    paths: list[str] = []

    def arrays(*args: Any) -> list[Any]:
        context = run(*args)
        if readers is not None:
            held, paths_now = dict(readers), [counted(context, path) for path in readers]
            readers.clear()
            for path, texts in zip(paths_now, held.values(), strict=True):
                readers[path] = (*readers.get(path, ()), *texts)
        found = {path: value for path, value in named(context) if eqx.is_array(value)}
        paths[:] = found
        return list(found.values())

    shapes = abstract(arrays, *args)
    return dict(zip(paths, shapes, strict=True))


def _paths(setup: Setup, readers: dict[str, tuple[str, ...]]) -> dict[str, Shape]:
    """The context of a training step; of a step of one's own, what the pieces before its update would have."""

    def run(config: Any, state: TrainState, spec: Batch) -> Context:
        if config.step is not None:
            try:
                return forward(config, state, spec)
            except Exception:  # a step of one's own may call the model in another way: nothing is known of it
                return begin(config, state, spec, state.model)
        return apply_updates(config, state, loss_and_gradients(config, state, spec))[1]

    config = dataclasses.replace(setup.config, accumulate=1)  # predictions are named as for the whole batch
    return _shapes(run, config, setup.state, setup.spec, readers=readers)


def _eval_paths(setup: Setup, one: Any) -> dict[str, Shape]:
    return _shapes(eval_context, one.config, eval_view(one.config, setup.state), one.data.spec())


def _results(setup: Setup) -> dict[str, Shape | str | None]:
    """What training and evals report; of metrics that compute with numpy, as far as they compute without rows."""
    found: dict[str, Shape | str | None] = {}
    auxes = {"train": program_for(setup.config, setup.state, setup.spec).empty}
    for split_name, aux in (auxes | {one.name: one.empty for one in setup.evals}).items():
        shapes: dict[str, Shape | str | None] = {}
        try:
            summaries: dict[str, str] = {}
            shapes |= abstract(functools.partial(_traced, summaries), aux) | summaries
        except Exception:  # it computes with numpy, which takes no tracers; that it computes is checked by prepare
            for name, state in aux.metrics.items():
                shapes |= _computed(dataclasses.replace(aux, metrics={name: state}), name)
        found |= {f"{split_name}/{name}": shape for name, shape in shapes.items()}
    return found


def _traced(summaries: dict[str, str], aux: Aux) -> dict[str, jax.Array]:
    """The scalars as arrays; of summaries, the names of their classes are noted."""
    scalars, found = aux.computed()
    summaries |= {name: type(summary).__name__ for name, summary in found.items()}
    return {name: jnp.asarray(value) for name, value in scalars.items()}


def _computed(aux: Aux, metric: str) -> dict[str, Shape | str | None]:
    """The results with one metric, computed on the host over no rows."""
    shapes: dict[str, Shape | str | None]
    with np.errstate(all="ignore"):
        try:
            scalars, summaries = aux.computed()
            shapes = {name: Shape(np.shape(value), jnp.result_type(value)) for name, value in scalars.items()}
            return shapes | {name: type(summary).__name__ for name, summary in summaries.items()}
        except Exception:  # it needs rows
            shapes = {metric: None}
            for name in dataclasses.replace(aux, metrics={}).results():
                shapes[name] = Shape((), jnp.result_type(float))
            return shapes


def _leaves(state: TrainState, *, trained: bool) -> Leaves:
    leaves = jax.tree.leaves(state.model)
    kept = [
        leaf
        for leaf, yes, hyper in zip(leaves, state.trainable, state.hyperparameter, strict=True)
        if hasattr(leaf, "dtype") and yes is trained and not hyper
    ]
    return Leaves(len(kept), sum(leaf.size for leaf in kept), sum(leaf.size * leaf.dtype.itemsize for leaf in kept))


def _hyperparameters(state: TrainState) -> tuple[int, int, int]:
    kept = [leaf for leaf, yes in zip(jax.tree.leaves(state.model), state.hyperparameter, strict=True) if yes]
    return len(kept), sum(np.size(leaf) for leaf in kept), sum(jnp.result_type(leaf).itemsize for leaf in kept)


def _unread(setup: Setup, paths: Mapping[str, Shape], readers: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Data and predictions that no key path names. A step of one's own may read what it likes."""
    if setup.config.step is not None:
        return []
    return [
        f"{path}: nothing reads it"
        for path in paths
        if parse(path)[0] in ("batch", "preds") and not read_by(path, readers)
    ]


def _ever_runs(one: Any, num_steps: int) -> bool:
    return one.final or (one.every or num_steps + 1) <= num_steps or any(step <= num_steps for step in one.at)


def _idle(setup: Setup) -> list[str]:
    """What may surprise: nothing to train, an eval without results, a model's state with micro-batches."""
    found = [] if any(setup.state.trainable) or setup.config.step is not None else ["trainable: nothing is trained"]
    if setup.config.accumulate > 1 and setup.state.model_state is not None:
        found.append("accumulate: the model's eqx.nn.State (batch normalisation) sees one micro-batch at a time")
    found += [
        f"evals.{one.name}: it never runs in {setup.num_steps} steps"
        for one in setup.evals
        if (one.settings.every or one.settings.at) and not _ever_runs(one.settings, setup.num_steps)
    ]
    return found + [
        f"evals.{one.name}: it reports nothing, since no loss or metric of the trainer can run in it"
        for one in setup.evals
        if not one.empty.losses and not one.empty.metrics
    ]


def _without_gradient(setup: Setup) -> list[str]:
    """Losses whose value does not depend on the parameters in a way that can be differentiated."""
    if setup.config.step is not None or not any(setup.state.trainable):
        return []
    reached: set[str] = set()

    def run(config: Any, state: TrainState, spec: Batch) -> Any:
        params, rest = split(forward(config, state, spec).model, state.trainable)

        def means(params: Any) -> dict[str, Any]:
            context = forward(config, state, spec, model=eqx.combine(params, rest)).replace(params=params)
            _, context = losses_of(config, context)
            return {name: _watched(name, reached)(state.mean()) for name, state in context.losses.items()}

        values, pull = jax.vjp(means, params)
        return pull(jax.tree.map(jnp.ones_like, values))

    abstract(run, setup.config, setup.state, setup.spec)
    return [
        f"losses.{name}: it has no gradient with respect to any trainable parameter"
        for name in setup.config.losses
        if name not in reached
    ]


def _watched(name: str, reached: set[str]) -> Any:
    """An identity that notes whether a tangent, other than one that JAX knows to be zero, comes through."""

    @jax.custom_jvp
    def watch(x: Any) -> Any:
        return x

    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (tangent,) = primals, tangents
        if type(tangent) is jax.custom_derivatives.SymbolicZero:
            return x, jnp.zeros_like(x)
        reached.add(name)
        return x, tangent

    watch.defjvp(rule, symbolic_zeros=True)
    return watch


def _floats(trainer: Trainer, setup: Setup) -> dict[str, str]:
    """Config path -> whether the float there is traced, or why not."""
    whole = enclosed(trainer)
    declared = {} if whole.model is None else static_floats(whole)
    leaves, traced = named_leaves(whole), named_leaves(setup.config)
    found = {}
    for at, value in walk(whole):
        path = join(at)
        if type(value) is Pin:
            found[spelled(path)] = "static: pinned"
        elif path in traced and path in leaves and jnp.issubdtype(leaves[path].dtype, jnp.floating):
            found[spelled(path)] = "traced"
        elif path in declared:
            found[spelled(path)] = f"static: {declared[path]} is a static field"
        elif path in leaves and jnp.issubdtype(leaves[path].dtype, jnp.floating):
            found[spelled(path)] = "static: left out by `trace`"
        elif type(value) is float:
            found[spelled(path)] = "static: its field is declared static"
    return found
