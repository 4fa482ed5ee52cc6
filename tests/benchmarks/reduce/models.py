"""Training in DDP: an embedding with a mostly zero gradient, and a dense CNN.

Every worker draws its own batches, which are equal for all arms.
"""

import time

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.reduce.arms import AGGREGATED
from graphstash.training.reduce import SparseState, Thresholding, sparse_hook

ROWS, WIDTH, BAG, BATCH = 200_000, 64, 8, 64
WARM_UP = 2  # steps: DDP rebuilds its buckets after the first

TRAINED = ("dense", "blocks", "thresholding", "dedicated", "colocated")


class Embedding(nn.Module):
    """An embedding of 48.8 MiB, as in a recommender. A batch uses at most 512 of its rows."""

    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingBag(ROWS, WIDTH)
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

    def __init__(self):
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
        self._replica = DistributedDataParallel(MODELS[model](), gradient_as_bucket_view=True)
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
    if arm == "dense":
        return None
    settings = {"keep": 0.2, "refresh_every": 10, "largest_error": 0.9}
    held = Thresholding(replica.module, **settings) if arm == "thresholding" else None
    through = arms.aggregated(arm) if arm in AGGREGATED else None
    state = SparseState(thresholding=held, through=through)
    replica.register_comm_hook(state, sparse_hook)
    return state
