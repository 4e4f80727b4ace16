"""No recovery of our own: a failure ends the process, and the layer above starts it again. The honest baseline."""

from __future__ import annotations

from trainer.recovery.base import Train


class Plain:
    def run(self, train: Train) -> int:
        return train(0)
