"""How much memory the compiled step takes, by XLA's own account. This is the one part of a preflight that compiles."""

from typing import NamedTuple

from equikd.train._program import Program


class Memory(NamedTuple):
    """Bytes of the compiled step on one device.

    Attributes:
        arguments: state, hyperparameters, accumulators and batch.
        temporary: what the step needs while it runs: activations, gradients.
        outputs: the new state and accumulators.
        reused: of the outputs, what takes the place of donated arguments.
    """

    arguments: int
    temporary: int
    outputs: int
    reused: int

    @property
    def peak(self) -> int:
        """What must be free for a step: arguments, temporaries, and outputs that take no argument's place."""
        return self.arguments + self.temporary + self.outputs - self.reused


def memory_of(program: Program) -> Memory | None:
    """The memory of a step, which is compiled for it; None where the backend gives no account.

    Args:
        program: the step's program.
    """
    stats = program.lowered().compile().memory_analysis()
    if stats is None:
        return None
    return Memory(
        stats.argument_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
    )
