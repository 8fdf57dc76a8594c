"""Shape checks at run time: jaxtyping's annotations, and `typechecked`.

    @ek.typechecked
    def forward(x: Float[Array, "b d"], w: Float[Array, "d n"]) -> Float[Array, "b n"]: ...

Axis names are bound once a call; a size that disagrees is a `ShapeError` at trace time, so the compiled program pays
nothing. Arrays are found wherever they are: in lists, dicts, TypedDicts, NamedTuples, dataclasses, modules. What is no
array is judged by beartype, which is imported when it is first needed; `float` admits the 0-d float tracer that a
config's float is inside a trace.

- `typechecked`: functions, methods, classes; `install_import_hook`: all of a package; `check`: one value
- `dim("b")`, `shape("b t d")`: sizes, inside a checked function
- `Scope("b")`: names that all calls inside share, `Scope("b", of=loss)`: that the calls of `loss` do; all others are
  local to a call
- `declared(batch)`: the sizes that a typed batch gives to its own names
- `disabled()` and `EQUIKD_TYPECHECK=0`: no checks
- `provenance({"x": "inputs.x = batch.image"})`: for the message, where arguments come from
"""

from jaxtyping import Array as Array
from jaxtyping import ArrayLike as ArrayLike
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Inexact as Inexact
from jaxtyping import Int as Int
from jaxtyping import Integer as Integer
from jaxtyping import Num as Num
from jaxtyping import PRNGKeyArray as PRNGKeyArray
from jaxtyping import PyTree as PyTree
from jaxtyping import Shaped as Shaped
from jaxtyping import UInt as UInt

from equikd.typing._check import check as check
from equikd.typing._check import declared as declared
from equikd.typing._check import typechecker as typechecker
from equikd.typing._decorate import typechecked as typechecked
from equikd.typing._errors import ShapeError as ShapeError
from equikd.typing._hook import install_import_hook as install_import_hook
from equikd.typing._scope import Scope as Scope
from equikd.typing._scope import dim as dim
from equikd.typing._scope import disabled as disabled
from equikd.typing._scope import provenance as provenance
from equikd.typing._scope import shape as shape

Scalar = Shaped[Array, ""]
"""A 0-d array of any dtype."""
