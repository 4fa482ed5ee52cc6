"""Training in DDP: an embedding with a mostly zero gradient, and a dense CNN.

Every worker draws its own batches, which are equal for all arms.

dense         DDP's own all-reduce
coo           the same with `sparse=True`, which torch sums as sparse tensors
blocks        sparse_hook
rows          sparse_hook with `sparse=True`
thresholding  sparse_hook that holds small blocks back
dedicated, colocated  sparse_hook through aggregators
PowerSGD      torch's hook with rank 1
top-k         the largest hundredth of the elements of each worker, with error feedback
"""

import time

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.reduce.arms import AGGREGATED
from graphstash.training.reduce import SparseState, Thresholding, sparse_hook

ROWS, WIDTH, BAG, BATCH = 200_000, 64, 8, 64
WARM_UP = 2  # steps: DDP rebuilds its buckets after the first

TRAINED = (
    *("dense", "coo", "blocks", "rows", "thresholding", "dedicated", "colocated"),
    *("PowerSGD", "top-k"),
)
TOP = 100


class Embedding(nn.Module):
    """An embedding of 48.8 MiB, as in a recommender. A batch uses at most 512 of its rows."""

    def __init__(self, *, sparse):
        super().__init__()
        self.rows = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 2))

    def forward(self, rows):
        return self.head(self.rows(rows))

    @staticmethod
    def batch(drawn):
        """Draw popular rows more often. A row's label is its parity, a bag's is its majority's."""
        rows = (ROWS * torch.rand(BATCH, BAG, generator=drawn) ** 3).long()
        return rows, (2 * (rows % 2).sum(dim=1) > BAG).long()


class CNN(nn.Module):
    """A CNN of 4.5 MiB, mostly two dense layers."""

    def __init__(self, *, sparse):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(1152, 980), nn.ReLU(), nn.Linear(980, 10)),
        )

    def forward(self, images):
        return self.layers(images)

    @staticmethod
    def batch(drawn):
        """Draw images that are brighter in one of ten columns, the label."""
        labels = torch.randint(10, (32,), generator=drawn)
        images = torch.rand(32, 1, 28, 28, generator=drawn)
        return images + functional.one_hot(labels, 28)[:, None, None, :], labels


MODELS = {"embedding": Embedding, "CNN": CNN}


class Training:
    """Training of a model on one worker, with settled buckets."""

    def __init__(self, rank, arms, *, model, arm):
        torch.manual_seed(0)
        module = MODELS[model](sparse=arm in {"coo", "rows"})
        # One bucket: torch's hook sends from callbacks, and gloo mixes up those of several buckets.
        one = {"bucket_cap_mb": 1024} if arm == "PowerSGD" else {}
        self._replica = DistributedDataParallel(module, gradient_as_bucket_view=True, **one)
        self._state = hooked(self._replica, arms, arm)
        self._drawn = torch.Generator().manual_seed(rank)
        self._optimizer = torch.optim.SGD(self._replica.parameters(), lr=0.1)
        self._losses = []
        self.run(WARM_UP)

    def run(self, steps):
        began = time.monotonic()
        for _ in range(steps):
            inputs, labels = self._replica.module.batch(self._drawn)
            self._optimizer.zero_grad()
            loss = functional.cross_entropy(self._replica(inputs), labels)
            loss.backward()
            self._optimizer.step()
            self._losses.append(loss.detach())
        return time.monotonic() - began

    def close(self):
        """Return each step's loss, the mean of the workers', and the union's density."""
        found = torch.stack(self._losses)
        distributed.all_reduce(found)
        density = 1.0
        if self._state is not None:
            density = self._state.scalars()["union_density"]
            self._state.close()
        return {"losses": (found / distributed.get_world_size()).tolist(), "union density": density}


def hooked(replica, arms, arm):
    if arm in {"dense", "coo"}:
        return None
    if arm == "PowerSGD":
        # The epsilon avoids a division of zeros by zero.
        settings = {"matrix_approximation_rank": 1, "orthogonalization_epsilon": 1e-8}
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=WARM_UP, **settings)
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return None
    if arm == "top-k":
        replica.register_comm_hook({}, top_k_hook)
        return None
    settings = {"keep": 0.2, "refresh_every": 10, "largest_error": 0.9}
    held = Thresholding(replica.module, **settings) if arm == "thresholding" else None
    through = arms.aggregated(arm) if arm in AGGREGATED else None
    state = SparseState(thresholding=held, through=through)
    replica.register_comm_hook(state, sparse_hook)
    return state


def top_k_hook(errors, bucket):
    """Gather each worker's largest elements, and keep the others for the next step."""
    values, world = bucket.buffer(), distributed.get_world_size()
    values += errors.pop((bucket.index(), len(values)), 0)
    places = values.abs().topk(-(-len(values) // TOP)).indices
    mine = torch.stack([values[places].view(torch.int32), places.int()])
    every = mine.new_empty(world * 2, mine.shape[1])
    distributed.all_gather_into_tensor(every, mine)
    values[places] = 0
    errors[bucket.index(), len(values)] = values.clone()
    values.zero_()
    for chosen, where in every.view(world, 2, -1):
        values.index_add_(0, where, chosen.view(torch.float32), alpha=1 / world)
    done = Future()
    done.set_result(values)
    return done
