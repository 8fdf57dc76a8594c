"""Adversarial training: a generator of handwritten digits, and a discriminator that tells them from real ones.

`equikd train equikd.examples.gan` trains both, on scikit-learn's 8x8 digits; TensorBoard shows samples as they get
better. `configs.py` describes the experiment, `model.py` the two players, `step.py` how both are updated, `losses.py`
and `metrics.py` what they play for and how well they do.
"""

from equikd.examples.gan.configs import Adversarial as Adversarial
from equikd.examples.gan.configs import get_config as get_config
from equikd.examples.gan.losses import Verdict as Verdict
from equikd.examples.gan.metrics import FrechetDistance as FrechetDistance
from equikd.examples.gan.metrics import VerdictAccuracy as VerdictAccuracy
from equikd.examples.gan.model import Discriminator as Discriminator
from equikd.examples.gan.model import Gan as Gan
from equikd.examples.gan.model import Generator as Generator
from equikd.examples.gan.step import adversarial_step as adversarial_step
