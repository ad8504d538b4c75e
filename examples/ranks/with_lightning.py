"""Lightning with manual optimisation: ``python examples/ranks/with_lightning.py`` (pip install lightning)."""

import lightning
import torch
from problem import EPOCHS, RANKS, loader, network

from gramgn import GramGaussNewton


class Regression(lightning.LightningModule):
    """Lightning wraps this module for several devices; the optimizer is given the plain network in it."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.automatic_optimization = False

    def configure_optimizers(self):
        """Build the optimizer, after Lightning has started the processes."""
        return GramGaussNewton(self.network, lam=1.0, alpha=0.01)

    def training_step(self, batch, _):
        """Take a step on the batch of all ranks."""
        x, y = batch
        self.info = self.optimizers().step(lambda: self.network(x) - y)

    def on_train_epoch_end(self):
        """Print the loss, which is that of all ranks."""
        info = self.info
        if self.global_rank == 0:
            print(
                f"epoch {self.current_epoch + 1}: loss {info.loss:.12e} of {info.num_samples} samples",
                flush=True,
            )


torch.manual_seed(0)
trainer = lightning.Trainer(
    accelerator="cpu", devices=RANKS, strategy="ddp", max_epochs=EPOCHS, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Regression(), loader())
