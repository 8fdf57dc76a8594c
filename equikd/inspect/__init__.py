"""Looking at an experiment without running it: which of its floats are traced, and why not."""

from equikd.inspect._traceable import Traceability as Traceability
from equikd.inspect._traceable import Untraceable as Untraceable
from equikd.inspect._traceable import traceable as traceable
