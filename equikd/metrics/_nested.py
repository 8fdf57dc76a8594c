"""Results by path: from `{"layers[0].weight": 1.0}` to the nested dict whose leaves have these paths."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from equikd.tree import parse


def nested(values: Mapping[str, Any]) -> dict[Any, Any]:
    """Nested dicts, in order, in which each value stands at its path.

    Example:
        >>> nested({"total": 5.0, "layers[0].weight": 3.0})["layers"][0]["weight"]
        3.0
    """
    results: OrderedDict[Any, Any] = OrderedDict()
    for path, value in values.items():
        *parents, name = parse(path)
        place = results
        for key in parents:
            place = place.setdefault(key, OrderedDict())
        place[name] = value
    return results
