"""Handwritten digits: an Equinox classifier on scikit-learn's 1,797 images of 8x8 pixels.

`equikd train equikd.examples.digits` trains it; `configs.py` describes the experiment, `model.py` the model.
"""

from equikd.examples.digits.configs import Digits as Digits
from equikd.examples.digits.configs import get_config as get_config
from equikd.examples.digits.configs import load as load
from equikd.examples.digits.model import Classifier as Classifier
