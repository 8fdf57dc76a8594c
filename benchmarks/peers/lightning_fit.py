"""PyTorch Lightning: a module with a `training_step`, and `Trainer.fit`, which logs to CSV and to TensorBoard."""

# pyright: reportMissingImports=false

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from benchmarks._task import RATE, Clock, Task
from benchmarks.peers._peer import Peer
from benchmarks.peers.torch_eager import loader, make_model


class Classifier(lightning.LightningModule):
    """A model, its loss and its optimizer."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.loss_of = make_model(task), torch.nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss, which is logged."""
        images, labels = batch
        loss = self.loss_of(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """As the loop by hand has it."""
        return torch.optim.Adam(self.parameters(), lr=RATE)


class Ticking(lightning.Callback):
    """Calls the clock after each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step has been made."""
        self.clock.tick(trainer.global_step)


def fit(task: Task, num_steps: int, clock: Clock, folder: Path) -> None:
    """Train, without checkpoints and progress, as all contestants do."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on workers, which would be processes
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=num_steps,
            logger=[CSVLogger(folder), TensorBoardLogger(folder)],
            log_every_n_steps=task.log_every,
            callbacks=[Ticking(clock)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(task), loader(task))


PEER = Peer(None, fit=fit)
