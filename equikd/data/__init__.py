"""Data: pipelines that yield batches of one fixed shape.

`InMemory` holds arrays; `Iterable` wraps a function that returns an iterator. Both are `Pipeline`s, the protocol that a
trainer and its evals read from; whatever follows it can take their place. A batch is `Batch(data, mask)`, and the mask
says which rows are real.
"""

from equikd.data._iterable import Iterable as Iterable
from equikd.data._iterable import pipeline as pipeline
from equikd.data._memory import InMemory as InMemory
from equikd.data._pipeline import Batch as Batch
from equikd.data._pipeline import Pipeline as Pipeline
from equikd.data._pipeline import as_batch as as_batch
from equikd.data._pipeline import batch_size as batch_size
from equikd.data._pipeline import element_spec as element_spec
from equikd.data._pipeline import exhausted as exhausted
from equikd.data._pipeline import pad as pad
