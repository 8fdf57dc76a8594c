"""Looking at an experiment without running it: what it consists of, which of its floats are traced, what it costs."""

from equikd.inspect._costs import Costs as Costs
from equikd.inspect._costs import costs as costs
from equikd.inspect._devices import Devices as Devices
from equikd.inspect._explain import Difference as Difference
from equikd.inspect._explain import Explanation as Explanation
from equikd.inspect._explain import explain as explain
from equikd.inspect._explain import trace_counts as trace_counts
from equikd.inspect._explain import watch as watch
from equikd.inspect._layers import Intermediates as Intermediates
from equikd.inspect._layers import Layers as Layers
from equikd.inspect._layers import intermediates as intermediates
from equikd.inspect._layers import layers as layers
from equikd.inspect._memory import Memory as Memory
from equikd.inspect._preflight import Leaves as Leaves
from equikd.inspect._preflight import Preflight as Preflight
from equikd.inspect._preflight import check as check
from equikd.inspect._traceable import Traceability as Traceability
from equikd.inspect._traceable import Untraceable as Untraceable
from equikd.inspect._traceable import traceable as traceable
