"""Notebooks show what the tests test: CI runs them; here, the model of one is that of the zoo."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_model_that_is_looked_into_is_that_of_the_zoo() -> None:
    cells = json.loads((ROOT / "notebooks" / "03_looking_inside.ipynb").read_text("utf-8"))["cells"]
    shown = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    zoo = (ROOT / "tests" / "zoo" / "mlp.py").read_text("utf-8")
    assert zoo.endswith(shown[0] + "\n")
    assert shown[0].startswith("import equinox")
