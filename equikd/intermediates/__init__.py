"""Intermediates: the output of any submodule of any Equinox model by its path, without a change to the model.

    out, found = ek.capture(model_of_batch, ["encoder.layers[1]", "blocks[*].attention"])(model, x)
    found["encoder.layers[1]"]

It is a function transform, usable without the rest of equikd, under and over `jit`, `vmap`, `grad`, `scan` and the
other transforms of JAX:

1. the submodules named get a marked call: the same object, of a subclass that puts its output through a *mark*, an
   identity that carries a name (`_mark.py`, `_tap.py`);
2. the function is traced to a jaxpr, marks and all;
3. the jaxpr is evaluated again, equation by equation, and what is marked becomes an output, of each loop and branch
   that it stands in as well (`_evaluate.py`, `_rules.py`).

What stays in the program is what a person would have written who had returned the value by hand: values, gradients and
costs are those. Where nothing is asked for, the function is called as it is.

In a trainer, the key path `interms.encoder` is all that is needed: see `equikd.wiring`.
"""

from equikd.intermediates._available import available as available
from equikd.intermediates._capture import capture as capture
from equikd.intermediates._errors import IntermediateError as IntermediateError
from equikd.intermediates._gradients import gradients as gradients
from equikd.intermediates._inputs import Inputs as Inputs
from equikd.intermediates._options import Options as Options
from equikd.intermediates._rules import NoGradientWarning as NoGradientWarning
