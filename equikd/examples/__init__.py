"""Importable experiments on real data, each a package with `configs.py` and `model.py`."""
