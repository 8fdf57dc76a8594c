"""How values are taken out of loops and branches that do not give one for each request."""

from typing import Literal

from equikd.config import config

WhileLoops = Literal["error", "last"]
Absent = Literal["error", "zeros", "nan"]


@config
class Options:
    """How intermediates are captured, where there is a choice; in a trainer, `intermediates=Options(...)`."""

    while_loops: WhileLoops = "error"
    """What is computed in a while loop: "last" is the value of the last iteration, nan where there is none (0 for
    integers); "error" refuses it, since a while loop has as many values as it has iterations."""
    absent: Absent = "error"
    """What stands for a value that only some branches of a `cond` or `switch` compute: "zeros", or "nan" (0 for
    integers); "error" refuses it."""
