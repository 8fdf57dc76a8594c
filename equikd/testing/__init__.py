"""Property tests for what users write: laws that are checked on drawn instances and calls.

Needs the extra `[testing]` (pytest, hypothesis). One line in a test each:

- `check_config(MyConfig)`: what a config class must keep
- `check_shapes(f)`: valid arguments are taken, the result fits, and what is broken in one place is refused; for
  functions, methods, modules (the class), losses and metrics
- `check_metric(MyMetric(...))`, `check_loss(MyLoss(...))`: exact whatever the batches, the padding,
  the order and the devices; their options are `LawOptions`

Strategies for tests of your own: `configs(MyConfig)`, `arguments(f)`, `violations(f)`.
"""

from equikd.testing._arguments import Arguments as Arguments
from equikd.testing._arguments import arguments as arguments
from equikd.testing._configs import check_config as check_config
from equikd.testing._losses import check_loss as check_loss
from equikd.testing._metrics import check_metric as check_metric
from equikd.testing._parts import DrawError as DrawError
from equikd.testing._running import LawOptions as LawOptions
from equikd.testing._shapes import check_shapes as check_shapes
from equikd.testing._strategies import configs as configs
from equikd.testing._violations import Violation as Violation
from equikd.testing._violations import violations as violations
