"""Wiring: key paths connect losses, metrics and models to what a step computes.

A field annotated `KeyPath` holds a path such as `"batch.image"` or `"preds.logits"`; when the owner is called, the
arguments that carry the fields' names are filled from the *context*, the namespace of one step:

    step key batch mask model preds interms losses params grads updates opt_state extra config

A field annotated `KeyPaths` may hold a pattern, `"grads.**.weight"`, and its argument is a dict of what fits.

`interms.encoder.layers[1]` is what that submodule of the model returns (`encoder.scores` another of its methods,
`encoder[0]` its first call, `encoder.inputs[0]` what it is called on), and `grads.interms.encoder` the gradient of the
total loss with respect to it: see `equikd.intermediates`. It is captured because it is named.

The context is filled in that order of computation: forward, losses, gradients, updates, metrics. An eval has no
gradients. All key paths of an experiment are checked at once under `eval_shape`, before anything is placed or compiled;
an error names the config path that holds the wrong one, what is near it, and what is available at that point.
"""

from equikd.wiring._context import NAMES as NAMES
from equikd.wiring._context import UNSET as UNSET
from equikd.wiring._context import ByPath as ByPath
from equikd.wiring._context import Context as Context
from equikd.wiring._context import place_of as place_of
from equikd.wiring._context import shared_axes as shared_axes
from equikd.wiring._context import standing_at as standing_at
from equikd.wiring._fields import KeyPath as KeyPath
from equikd.wiring._fields import KeyPaths as KeyPaths
from equikd.wiring._fields import Unwired as Unwired
from equikd.wiring._fields import arguments_of as arguments_of
from equikd.wiring._fields import fill as fill
from equikd.wiring._fields import key_path_fields as key_path_fields
from equikd.wiring._fields import key_paths as key_paths
from equikd.wiring._lookup import available as available
from equikd.wiring._lookup import leaves_at as leaves_at
from equikd.wiring._lookup import lookup as lookup
from equikd.wiring._lookup import named as named
from equikd.wiring._lookup import reads_rows as reads_rows
from equikd.wiring._lookup import root_of as root_of
