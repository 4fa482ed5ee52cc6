"""Sync-free optimizers: the host never reads the device to decide about a step.

`step(found_inf=...)` decides on the device whether the step counts, the number of steps lives
there, and so does whatever a schedule changes. With `LossScale` a whole mixed-precision step is one
graph without a gap in it, and no number in it changes from step to step and with it the graph.

    sgd adam lamb   one formula each; `moments` is what the latter two share
    update          the pure part: new values, and the choice between old and new on the device
    cohort          who is updated together; the birth of state
    base            parameter groups, state dictionaries, the step
"""

from graphstash.training.optimizers.adam import Adam, AdamW
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.lamb import LAMB
from graphstash.training.optimizers.sgd import SGD

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "SyncFreeOptimizer"]
