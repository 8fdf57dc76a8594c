"""Configs: plain data that is also a JAX pytree.

`config` makes a frozen dataclass whose floats are traced leaves; `lazy` writes a call down instead of making it;
`resolve` makes the calls, on the host or inside a trace. `override`, `diff`, `to_json` and `from_json` edit, compare
and store.
"""

from equikd.config._cli import cli as cli
from equikd.config._dataclass import config as config
from equikd.config._dataclass import field as field
from equikd.config._dataclass import roles as roles
from equikd.config._edit import diff as diff
from equikd.config._edit import flatten as flatten
from equikd.config._edit import override as override
from equikd.config._edit import with_defaults as with_defaults
from equikd.config._json import from_json as from_json
from equikd.config._json import to_json as to_json
from equikd.config._lazy import lazy as lazy
from equikd.config._lazy import pin as pin
from equikd.config._lazy import ref as ref
from equikd.config._node import Node as Node
from equikd.config._resolve import resolve as resolve
from equikd.config._validate import host as host
from equikd.config._validate import validate as validate
