"""Training: the trainer, its step and the pieces of it, the stepper, checkpoints and writers.

`Trainer` describes a run and runs it. `step` is the public door to its step, `Stepper` the fast one; `make_step` is the
functional core, usable alone: the trainer's step is built of its parts. `forward`, `losses_of`, `gradients`,
`loss_and_gradients`, `apply_updates` and `collect` compose the default step, and custom ones.
"""

from equikd.metrics import Aux as Aux
from equikd.train._checkpoint import CheckpointStore as CheckpointStore
from equikd.train._compilations import CompilationError as CompilationError
from equikd.train._core import Step as Step
from equikd.train._core import make_step as make_step
from equikd.train._custom import gradients as gradients
from equikd.train._failure import check_finite as check_finite
from equikd.train._guard import RollBack as RollBack
from equikd.train._guard import SkipNonFinite as SkipNonFinite
from equikd.train._guard import StopOnNonFinite as StopOnNonFinite
from equikd.train._init_from import InitFrom as InitFrom
from equikd.train._profile import Profile as Profile
from equikd.train._progress import Console as Console
from equikd.train._progress import final_table as final_table
from equikd.train._result import Result as Result
from equikd.train._result import predict as predict
from equikd.train._saved_model import load_model as load_model
from equikd.train._saved_model import save_model as save_model
from equikd.train._settings import Checkpoints as Checkpoints
from equikd.train._settings import EarlyStop as EarlyStop
from equikd.train._settings import StopAfter as StopAfter
from equikd.train._state import TrainState as TrainState
from equikd.train._step import apply_updates as apply_updates
from equikd.train._step import begin as begin
from equikd.train._step import collect as collect
from equikd.train._step import default_step as default_step
from equikd.train._step import forward as forward
from equikd.train._step import loss_and_gradients as loss_and_gradients
from equikd.train._step import losses_of as losses_of
from equikd.train._stepper import Stepper as Stepper
from equikd.train._throughput import Throughput as Throughput
from equikd.train._trainer import Trainer as Trainer
from equikd.train._trainer import step as step
from equikd.train._weights import Taken as Taken
from equikd.train._writers import JsonLines as JsonLines
from equikd.train._writers import OpenWriter as OpenWriter
from equikd.train._writers import Record as Record
from equikd.train._writers import Run as Run
from equikd.train._writers import TensorBoard as TensorBoard
from equikd.train._writers import Writer as Writer
