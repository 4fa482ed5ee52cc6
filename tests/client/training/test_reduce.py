"""Sums of gradients by blocks equal torch's sums on every rank."""

import pytest
from torch import nn

from graphstash import ConfigError, training
from graphstash.training.reduce import SparseState, Thresholding
from support.processes import python
from support.tiers import most_extended
from support.warm_ranks import WarmRanks

HOOKS = [
    *("plain", "accumulated", "uneven", "gradients in buckets", "sparse embedding"),
    *("dense", "dense, bf16 on the wire", "fp16 around it", "PowerSGD for the dense"),
    pytest.param("bf16 on the wire", marks=pytest.mark.extended),
]


def test_sums_equal_torch_on_every_rank_and_send_union_of_blocks(ranks):
    ranks(3).run("reduce:sums", count=24)


def test_tensors_of_sums_are_freed_by_the_thread_that_sums(ranks):
    ranks(3).run("reduce:sums_free_their_tensors", count=100)


@pytest.mark.parametrize("name", HOOKS)
def test_ddp_trains_the_same_with_the_hook(ranks, name):
    ranks(3).run("reduce:trains_the_same", name=name)


@pytest.mark.parametrize("world", most_extended([1, 2, 3, 4], quick=[2, 3]))
def test_blocks_are_rows_and_bytes_are_near_those_of_sparse_gradients(ranks, world):
    ranks(world).run("tables:bytes_of_rows")
    ranks(world).run("tables:small_sums_take_one_round")


TABLES = {
    "as they are": {},
    "sparse and accumulated, fp64": {"sparse": True, "accumulate": 3, "dtype": "float64"},
    "static graph, views of buckets": {"static_graph": True, "through_views": True},
    "fp16": {"dtype": "float16"},
    "bf16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_several_tables_are_those_of_ddp(ranks, name):
    ranks(3).run("tables:equal_torch", **TABLES[name])


@pytest.mark.parametrize("world", most_extended([1, 2, 4], quick=[2]))
def test_gradients_of_any_number_of_ranks_are_those_of_ddp(ranks, world):
    ranks(world).run("tables:equal_torch")


DISAGREEMENTS = {
    "sizes": ["rank 0: 10 torch.float32", "rank 2: 12 torch.float32"],
    "types": ["rank 0: 10 torch.float32", "rank 1: 10 torch.float64"],
    "blocks": ["rank 0: 10 torch.float32 in blocks of 8", "float32 in blocks of 10"],
    "sizes in other orders": ["rank 0: 10 torch.float32", "rank 1: 12 torch.float32"],
    "types in other orders": ["rank 0: 10 torch.float32", "rank 1: 10 torch.int32"],
    "limits": ["dense_above=0.5; rank 1", "dense_above=1.0): build"],
    "hooks of dense buckets": ["dense=powerSGD_hook", "dense=None"],
    "thresholds": ["thresholding=keep 0.1 every 100, 0.5 at most", "thresholding=None"],
    "complex to real": ["torch.complex64 cannot be sent as wire_dtype=torch.bfloat16"],
    "real to integer": ["torch.float32 cannot be sent as wire_dtype=torch.int8"],
}


def test_all_ranks_report_differing_arguments(ranks):
    first, *others = ranks(3).run("reduce:disagreements")
    assert others == [first, first]
    for name, texts in DISAGREEMENTS.items():
        assert first[name].startswith("ConfigError: "), name
        assert all(text in first[name] for text in texts), first[name]


def test_invalid_groups_and_models_are_refused_with_reason(ranks):
    for rank, messages in enumerate(ranks(3).run("reduce:misuses")):
        assert "make a SparseState for each model" in messages["two models"]
        assert "torch.float32 cannot be sent as wire_dtype" in messages["in backward"]
        assert "give train the model inside it" in messages["twice"]
        assert "closed" in messages["closed"]
        if rank < 2:
            ranks_differ = "over the ranks [0, 1], and the model is trained by [0, 1, 2]"
            assert ranks_differ in messages["some ranks"]


def test_held_back_gradients_are_in_checkpoints(ranks):
    ranks(3).run("reduce:held_back")


def test_train_resumes_from_checkpoint_with_the_hook(ranks, tmp_path):
    ranks(3).run("reduce:resumed", directory=tmp_path)


ENDS_AT_ONCE = """
import time
import torch
from torch import distributed
from graphstash.training.reduce import SparseState

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
state = SparseState()
done = state._later((0, 1), torch.ones(1), lambda: torch.ones(1))
done.add_done_callback(lambda _: time.sleep(0.3))
done.wait()
"""


@pytest.mark.extended
def test_process_that_ends_right_after_its_last_bucket_ends_well():
    """torch aborted because a thread was still returning from torch when the interpreter exited."""
    python(ENDS_AT_ONCE, check=True)


def test_a_killed_rank_ends_all_others_with_an_error(jobs, tmp_path):
    with WarmRanks(jobs, tmp_path, 3) as ranks:
        ranks.begin("reduce:killed")
        for message in ranks.answers(killed=[2], end_others=True):
            assert "onnection" in message or "peer" in message, message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"reduce= is for several processes of torch\.distributed"),
        ({"precision": "fp16"}, r"another loss scale; use precision='bf16'"),
    ],
    ids=["one process", "a loss scale and thresholding"],
)
def test_invalid_reduction_is_refused(options, message):
    state, model = object.__new__(SparseState), nn.Linear(2, 1)
    state._thresholding = Thresholding(model) if options else None
    optimizer = training.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        training.train(model, optimizer, [], steps=1, reduce=state, **options)


STRIDED_REFUSED = {
    "expanded": "elements share one address",
    "transposed": "shape (10, 4): give one dimension",
    "sparse": "layout torch.sparse_coo: give a dense one",
}


def test_sum_of_a_strided_tensor_is_exact_and_writes_nothing_else(ranks):
    for refused in ranks(2).run("strided_sums:layouts"):
        assert refused.keys() == {"group", "through"}
        for messages in refused.values():
            assert all(cause in messages[name] for name, cause in STRIDED_REFUSED.items())


def test_8_bit_floats_are_refused_and_zeros_have_the_same_sign_on_all_ranks(ranks):
    for refused in ranks(2).run("strided_sums:refused_types"):
        assert all("torch.float8_" in each for messages in refused.values() for each in messages)
        assert all("take one of these" in each for each in refused["state"])


def test_refusal_of_types_and_factors_does_not_depend_on_density(ranks):
    for refused in ranks(2).run("strided_sums:refused_values"):
        assert ["do not add torch." in each for each in refused["types"]] == [True] * 20
        assert ["makes NaN of zeros" in each for each in refused["scales"]] == [True] * 4
        assert ["cannot be multiplied" in each for each in refused["fractions"]] == [True] * 3
        assert ["cannot be added up" in each for each in refused["small floats"]] == [True] * 4
        assert "27000000000 sparse places" in refused["places"][0]
