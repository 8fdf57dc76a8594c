"""Metrics: values over all rows of an interval or dataset, exact whatever the batch size.

A metric (`Mean`, `Accuracy`, your own subclass of `Metric`) makes a *state* from the arrays of one batch; states merge
by the rules of their fields; the merged state computes the value. `_state.py` has the algebra, `_base.py` the wiring.

| of | metrics; `help(ek.metrics.NAME)` has the formula and where it is from |
| --- | --- |
| any values | `Mean`, `Sum`, `Min`, `Max`, `Std`, `Variance`, `Histogram`, `CollectFirst` |
| trees | `Norm` of parameters, gradients, updates, in all or by leaf |
| classes | `Accuracy`, `TopKAccuracy`, `Precision`, `Recall`, `F1`, `ConfusionMatrix` |
| probabilities | `Perplexity`, `TokenAccuracy`, `ExpectedCalibrationError` |
| binary scores | `BinaryAccuracy`, `RocAuc`, `AveragePrecision` |
| numbers | `MeanSquaredError`, `RootMeanSquaredError`, `MeanAbsoluteError`, `R2` |
| images | `PSNR`, `SSIM` |
| to be shown | `ShowImages`, `ShowTexts` |
| other metrics | `SkipIfMissing`, `TreeMap` |
| one's own | `Metric`, `State`, `Average`; `sum_field`, `max_field`, `truncate_field`, `concat_field`, ... |
"""

from equikd.metrics._aux import Aux as Aux
from equikd.metrics._aux import EvalWeights as EvalWeights
from equikd.metrics._aux import StepTotals as StepTotals
from equikd.metrics._average import Average as Average
from equikd.metrics._base import BaseMetric as BaseMetric
from equikd.metrics._base import Metric as Metric
from equikd.metrics._classification import Accuracy as Accuracy
from equikd.metrics._classification import BinaryAccuracy as BinaryAccuracy
from equikd.metrics._classification import ConfusionMatrix as ConfusionMatrix
from equikd.metrics._classification import TopKAccuracy as TopKAccuracy
from equikd.metrics._collect import CollectFirst as CollectFirst
from equikd.metrics._general import Max as Max
from equikd.metrics._general import Mean as Mean
from equikd.metrics._general import Min as Min
from equikd.metrics._general import Sum as Sum
from equikd.metrics._image import PSNR as PSNR
from equikd.metrics._image import SSIM as SSIM
from equikd.metrics._likelihood import ExpectedCalibrationError as ExpectedCalibrationError
from equikd.metrics._likelihood import Perplexity as Perplexity
from equikd.metrics._likelihood import TokenAccuracy as TokenAccuracy
from equikd.metrics._norms import Norm as Norm
from equikd.metrics._ranking import AveragePrecision as AveragePrecision
from equikd.metrics._ranking import RocAuc as RocAuc
from equikd.metrics._regression import R2 as R2
from equikd.metrics._regression import MeanAbsoluteError as MeanAbsoluteError
from equikd.metrics._regression import MeanSquaredError as MeanSquaredError
from equikd.metrics._regression import RootMeanSquaredError as RootMeanSquaredError
from equikd.metrics._retrieval import F1 as F1
from equikd.metrics._retrieval import Precision as Precision
from equikd.metrics._retrieval import Recall as Recall
from equikd.metrics._rows import Rows as Rows
from equikd.metrics._show import ShowImages as ShowImages
from equikd.metrics._show import ShowTexts as ShowTexts
from equikd.metrics._spread import Histogram as Histogram
from equikd.metrics._spread import Std as Std
from equikd.metrics._spread import Variance as Variance
from equikd.metrics._state import State as State
from equikd.metrics._state import concat_field as concat_field
from equikd.metrics._state import empty_state as empty_state
from equikd.metrics._state import max_field as max_field
from equikd.metrics._state import min_field as min_field
from equikd.metrics._state import state_field as state_field
from equikd.metrics._state import static_field as static_field
from equikd.metrics._state import sum_field as sum_field
from equikd.metrics._state import truncate_field as truncate_field
from equikd.metrics._summaries import BinCounts as BinCounts
from equikd.metrics._summaries import Images as Images
from equikd.metrics._summaries import Summary as Summary
from equikd.metrics._summaries import Texts as Texts
from equikd.metrics._summaries import Values as Values
from equikd.metrics._sums import TwoFloat as TwoFloat
from equikd.metrics._sums import exact_sum as exact_sum
from equikd.metrics._wrappers import SkipIfMissing as SkipIfMissing
from equikd.metrics._wrappers import TreeMap as TreeMap
