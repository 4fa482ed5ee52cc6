"""Sync-free optimizers: the host never reads the device to decide about a step.

`step(found_inf=...)` decides on the device whether the step counts. The step count and all
scheduled values are also there, so the graph contains no number that changes from step to step.
With `LossScale`, a whole mixed-precision step is one graph.

    sgd adam lion muon          formulas; LAMB and AdamW are in adam
    adafactor schedule_free     formulas
    eight_bit                   Adam and AdamW with 8-bit moments
    shampoo soap                formulas with matrix decompositions, computed beside the training
    roots background            when the results are used; the thread that computes them
    factors                     which matrices a tensor has
    base                        parameter groups, state dictionaries, the step
    formula options scalars     new or old values; arguments of all optimizers; numbers on devices
    cohort                      parameters that are updated together, their state, torch's kernels
    gradients                   loss scale and clipping
"""

from graphstash.training.optimizers.adafactor import Adafactor
from graphstash.training.optimizers.adam import LAMB, Adam, AdamW
from graphstash.training.optimizers.base import SyncFreeOptimizer
from graphstash.training.optimizers.eight_bit import Adam8bit, AdamW8bit
from graphstash.training.optimizers.lion import Lion
from graphstash.training.optimizers.muon import Muon, muon_groups
from graphstash.training.optimizers.schedule_free import ScheduleFreeAdamW
from graphstash.training.optimizers.sgd import SGD
from graphstash.training.optimizers.shampoo import Shampoo
from graphstash.training.optimizers.soap import SOAP

__all__ = [
    "LAMB",
    "SGD",
    "SOAP",
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Muon",
    "ScheduleFreeAdamW",
    "Shampoo",
    "SyncFreeOptimizer",
    "muon_groups",
]
