"""Property tests for what users write: laws that a config class must keep, checked on drawn instances.

Needs the extra `[testing]` (pytest, hypothesis). `check_config(MyConfig)` in a test is one line.
"""

from equikd.testing._configs import check_config as check_config
from equikd.testing._strategies import configs as configs
