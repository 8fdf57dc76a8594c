"""Losses: values for each row, a mask that says which of them count, and a weight; masked rows may hold anything.

`_base.py` teaches the idea and has `Loss`, to write one's own. Elementwise formulas come from optax where it has them;
a docstring says where a factor differs. All are computed in float32 at least, whatever the model computes in.

| file | what it holds |
| --- | --- |
| `_base.py` | `Loss`, `LossState`, `replace_masked` |
| `_regression.py` | `AbsoluteError`, `SquaredError`, `Huber` |
| `_classification.py` | `SoftmaxCrossEntropy`, `SigmoidBinaryCrossEntropy`, `Focal` |
| `_other.py` | `Cosine`, `KLDivergence`, `Contrastive`, `ParameterL2`, `Value` |
"""

from equikd.losses._base import Loss as Loss
from equikd.losses._base import LossState as LossState
from equikd.losses._base import replace_masked as replace_masked
from equikd.losses._classification import Focal as Focal
from equikd.losses._classification import SigmoidBinaryCrossEntropy as SigmoidBinaryCrossEntropy
from equikd.losses._classification import SoftmaxCrossEntropy as SoftmaxCrossEntropy
from equikd.losses._other import Contrastive as Contrastive
from equikd.losses._other import Cosine as Cosine
from equikd.losses._other import KLDivergence as KLDivergence
from equikd.losses._other import ParameterL2 as ParameterL2
from equikd.losses._other import Value as Value
from equikd.losses._regression import AbsoluteError as AbsoluteError
from equikd.losses._regression import Huber as Huber
from equikd.losses._regression import SquaredError as SquaredError
