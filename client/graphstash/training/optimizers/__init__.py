"""Sync-free optimizers: the host never reads the device to decide about a step.

`step(found_inf=...)` decides on the device whether the step counts, the number of steps lives
there, and so does whatever a schedule changes. With `LossScale` a whole mixed-precision step is one
graph without a gap in it, and no number in it changes from step to step and with it the graph.

    sgd adam lion muon    the formulas; LAMB and AdamW are with Adam
    base                  parameter groups, state dictionaries, the step; selects old or new values
    cohort                parameters that are updated together, their state, torch's kernels
    gradients             loss scale and clipping
"""

from graphstash.training.optimizers.adam import LAMB, Adam, AdamW
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.lion import Lion
from graphstash.training.optimizers.muon import Muon, muon_groups
from graphstash.training.optimizers.sgd import SGD

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Lion", "Muon", "SyncFreeOptimizer", "muon_groups"]
