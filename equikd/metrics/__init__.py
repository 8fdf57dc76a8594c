"""Metrics: values over all rows of an interval or dataset, exact whatever the batch size.

A metric (`Mean`, `Accuracy`, your own subclass of `Metric`) makes a *state* from the arrays of one batch; states merge
by the rules of their fields; the merged state computes the value. `_state.py` has the algebra, `_base.py` the wiring.
"""

from equikd.metrics._aux import Aux as Aux
from equikd.metrics._aux import EvalWeights as EvalWeights
from equikd.metrics._aux import StepTotals as StepTotals
from equikd.metrics._average import Average as Average
from equikd.metrics._base import Metric as Metric
from equikd.metrics._classification import Accuracy as Accuracy
from equikd.metrics._general import Mean as Mean
from equikd.metrics._state import State as State
from equikd.metrics._state import empty_state as empty_state
from equikd.metrics._state import max_field as max_field
from equikd.metrics._state import min_field as min_field
from equikd.metrics._state import state_field as state_field
from equikd.metrics._state import static_field as static_field
from equikd.metrics._state import sum_field as sum_field
