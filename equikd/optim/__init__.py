"""Optimizers: schedules that trace, masks and groups by pattern, averages of the parameters, precision.

A *schedule* is a config class that is called with the number of updates made so far: the first update sees
`schedule(0)`. Its floats and its step counts are leaves, so that a sweep over peaks, warm-ups and lengths shares one
program; optax's own schedules branch in Python on most of these. On the same numbers the values are optax's, and the
fields are the arguments of its functions. One serves as the argument of an optimizer,
`lazy(optax.adamw)(WarmupCosine(0.0, 3e-4, 100, ref("num_steps")))`, and as the weight of a loss.

Before step 0 a schedule has its initial value (optax mirrors the cosine there, and its one-cycles are 0). None
branches in Python, and no traced step count, however wrong, makes a nan. Numbers that make no sense are refused on the
host, by `validate`.

A *pattern* says which parameters are meant: a glob over their paths (`"encoder.**"`), a predicate (path, leaf), a class
of modules, or a tuple of these. One that matches nothing is refused before anything is computed. `freeze` says what is
not trained, `decay` what decays, a dict or `Groups` which optimizer trains what, `ScaleRates` how fast.

| file | what it holds |
| --- | --- |
| `_base.py` | `Schedule`, to write one's own; the curves of the others |
| `_decay.py` | `Constant`, `Linear`, `Polynomial`, `Cosine`, `Exponential` |
| `_warmup.py` | `WarmupCosine`, `WarmupExponential`, `InverseSquareRoot`, `WarmupStableDecay` |
| `_cycle.py` | `CosineOneCycle`, `LinearOneCycle` |
| `_pieces.py` | `PiecewiseConstant`, `Join` |
| `_select.py` | what patterns match |
| `_masks.py` | `freeze`, `decay` |
| `_optimizer.py` | `Optimizer`, the base of the following; `as_optimizer` |
| `_scale.py` | the factor of the updates, inside of averages |
| `_groups.py` | `Groups`, `ScaleRates` |
| `_average.py` | `Ema`, `Swa`, `averaged` |
| `_lookahead.py` | `Lookahead` |
| `_precision.py` | `Precision` |
"""

from equikd.optim._average import AverageState as AverageState
from equikd.optim._average import Ema as Ema
from equikd.optim._average import Swa as Swa
from equikd.optim._average import averaged as averaged
from equikd.optim._base import Schedule as Schedule
from equikd.optim._cycle import CosineOneCycle as CosineOneCycle
from equikd.optim._cycle import LinearOneCycle as LinearOneCycle
from equikd.optim._decay import Constant as Constant
from equikd.optim._decay import Cosine as Cosine
from equikd.optim._decay import Exponential as Exponential
from equikd.optim._decay import Linear as Linear
from equikd.optim._decay import Polynomial as Polynomial
from equikd.optim._groups import Groups as Groups
from equikd.optim._groups import ScaleRates as ScaleRates
from equikd.optim._lookahead import Lookahead as Lookahead
from equikd.optim._masks import Decay as Decay
from equikd.optim._masks import Freeze as Freeze
from equikd.optim._masks import decay as decay
from equikd.optim._masks import freeze as freeze
from equikd.optim._optimizer import Optimizer as Optimizer
from equikd.optim._optimizer import as_optimizer as as_optimizer
from equikd.optim._pieces import Join as Join
from equikd.optim._pieces import PiecewiseConstant as PiecewiseConstant
from equikd.optim._precision import Precision as Precision
from equikd.optim._warmup import InverseSquareRoot as InverseSquareRoot
from equikd.optim._warmup import WarmupCosine as WarmupCosine
from equikd.optim._warmup import WarmupExponential as WarmupExponential
from equikd.optim._warmup import WarmupStableDecay as WarmupStableDecay
