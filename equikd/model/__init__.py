"""Models: calling an Equinox model on a batch, and deciding which of its leaves are trained.

A model is any `eqx.Module` (or function) written for one example; the trainer maps it over the batch axis
(`axis_name="batch"`), fills its inputs by key path, hands out PRNG keys, threads `eqx.nn.State` and switches inference
mode. The *untraced twin* is the same model built once with Python floats under `eval_shape`; what is an array there is
a parameter, what is a Python float there is a hyperparameter, which is never trained.
"""

from equikd.model._call import call as call
from equikd.model._call import predictions as predictions
from equikd.model._twin import Twin as Twin
from equikd.model._twin import build as build
from equikd.model._twin import check_arrays as check_arrays
from equikd.model._twin import live_twin as live_twin
from equikd.model._twin import static_floats as static_floats
from equikd.model._twin import twin as twin
from equikd.model._twin import with_hyperparameters as with_hyperparameters
from equikd.model._twin import with_state as with_state
