"""Looking at an experiment without running it: what it consists of, and which of its floats are traced."""

from equikd.inspect._devices import Devices as Devices
from equikd.inspect._memory import Memory as Memory
from equikd.inspect._preflight import Leaves as Leaves
from equikd.inspect._preflight import Preflight as Preflight
from equikd.inspect._preflight import check as check
from equikd.inspect._traceable import Traceability as Traceability
from equikd.inspect._traceable import Untraceable as Untraceable
from equikd.inspect._traceable import traceable as traceable
