"""Importable experiments on real data, each a package with `configs.py` and `model.py`.

| package | what it shows |
| --- | --- |
| `digits` | a classifier: where to begin |
| `gan` | adversarial training: a step of one's own, two optimizers, samples in TensorBoard |
| `dqn` | Q-learning: a target network in `extra`, evals that play episodes |
"""
