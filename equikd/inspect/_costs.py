"""What a step costs, looked at before it runs; it is compiled for that, and neither run nor written anywhere."""

from typing import Any

from equikd.train import Trainer
from equikd.train._compilation_cache import compilation_cache
from equikd.train._costs import Costs as Costs
from equikd.train._costs import costs_of
from equikd.train._program import program_for
from equikd.train._setup import part, prepare


def costs(trainer: Trainer, *, model: Any = None, model_state: Any = None) -> Costs:
    """Floating-point operations and bytes of a training step; compiles it, which takes as long as the first step.

    XLA's account is of the compiled step on one device. It counts the body of every loop once, however often it runs:
    with `accumulate=4` it tells of one micro-batch, and of a model that scans over its layers, one layer. The products
    are counted from the trace, with each round of a scan. Neither can know how often a while loop runs that decides it
    as it goes, and neither sees into kernels of one's own.

    Args:
        trainer: the experiment.
        model: a live model, as in `Trainer.init`.
        model_state: its `eqx.nn.State`.

    Returns:
        FLOPs, bytes and products; printed as a table, with intensity and the peak of the device where it is known.

    Raises:
        EquikdError: whatever `train` would refuse.

    Example:
        >>> import equinox as eqx, numpy as np, optax, equikd as ek
        >>> trainer = ek.Trainer(
        ...     model=ek.lazy(eqx.nn.Linear)(32, 16),
        ...     inputs={"x": "batch.x"},
        ...     losses={"mse": ek.losses.SquaredError(preds="preds", targets="batch.y")},
        ...     optimizer=ek.lazy(optax.sgd)(0.1),
        ...     train_data=ek.data.InMemory({"x": np.ones((64, 32)), "y": np.ones((64, 16))}, batch_size=8),
        ...     num_steps=1,
        ... )
        >>> costs(trainer).products["float32"] == 2 * (2 * 8 * 32 * 16)  # forward, and the gradient of the weight
        True
    """
    with compilation_cache(part(trainer, "compilation_cache")):
        setup = prepare(trainer, model, model_state)
        return costs_of(program_for(setup.config, setup.state, setup.spec), setup)
