"""Where data and state live: on one device, or spread over several by a mesh.

    ek.Trainer(..., mesh=ek.sharding.data_parallel())            # parameters on each device, rows spread
    ek.Trainer(..., mesh=ek.sharding.fsdp(min_bytes=2**20))      # large parameters spread, too

A *spread* is the mesh with its rules: rows of a batch along the first axis, each array of the train state by its size,
everything else whole on each device. The step itself knows nothing of it. It is the same pure function, compiled with
these shardings at its border, and XLA computes what one device would: means over all rows, batch statistics over all
rows, the same random numbers. So results differ in their last bits at most, by the order of additions.

On one device, batches go to the compiled step as they are. JAX compiles once more where an array that was committed to
its device (by `device_put(x, device)`, or as the result of a computation on such arrays) stands in for one that was
not. So the state is committed to its home from init on, and the step is compiled for that device, whatever the arrays
of a live model or a batch are.
"""

from equikd.sharding._placing import everywhere as everywhere
from equikd.sharding._placing import filled_rows as filled_rows
from equikd.sharding._placing import home as home
from equikd.sharding._placing import micro_batches as micro_batches
from equikd.sharding._placing import place as place
from equikd.sharding._placing import settle as settle
from equikd.sharding._processes import check_processes as check_processes
from equikd.sharding._settings import DataParallel as DataParallel
from equikd.sharding._settings import Fsdp as Fsdp
from equikd.sharding._settings import data_parallel as data_parallel
from equikd.sharding._settings import fsdp as fsdp
from equikd.sharding._spread import Home as Home
from equikd.sharding._spread import Spread as Spread
from equikd.sharding._spread import spread_of as spread_of
from equikd.sharding._spread import uneven as uneven
from equikd.sharding._step import SpreadStep as SpreadStep
