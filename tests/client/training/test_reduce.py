"""Gradients that several processes add up by blocks are what torch adds up."""

import json
from pathlib import Path

import pytest
from torch import nn

from graphstash import ConfigError, training
from graphstash.training.reduce import SparseState, Thresholding
from support.ranks import reports_of_ranks, running_ranks

JOB = Path(__file__).parents[2] / "support" / "reduce_job.py"
WORLD = 3


@pytest.fixture(scope="module")
def reports(jobs, tmp_path_factory):
    return reports_of_ranks(jobs, tmp_path_factory.mktemp("reduced"), JOB, WORLD)


def test_sums_are_those_of_a_dense_all_reduce(reports):
    assert len(reports[0]["sums"]) == 160
    for report in reports:
        assert [case["name"] for case in report["sums"] if not case["equal"]] == []


def test_sums_have_the_same_bits_on_every_rank_and_in_every_run(reports):
    for cases in zip(*(report["sums"] for report in reports), strict=True):
        assert len({digest for case in cases for digest in case["digests"]}) == 1, cases[0]["name"]


def test_what_is_sent_is_a_bit_for_each_block_and_the_blocks_of_the_union(reports):
    for report in reports:
        for case in report["sums"]:
            assert case["handed over"] == case["said"] == case["formula"], case["name"]


def test_ddp_trains_the_same_with_the_hook(reports):
    for name in reports[0]["trained"]:
        cases = [report["trained"][name] for report in reports]
        assert all(case["equal"] for case in cases), (name, cases)
        assert len({case["digest"] for case in cases}) == 1, name


def test_sparse_buckets_are_sent_sparsely(reports):
    for report in reports:
        buckets = report["trained"]["as it is"]["statistics"]
        largest = max(buckets.values(), key=lambda bucket: bucket["looks"] * bucket["sent_bytes"])
        assert 0 < largest["density"] < largest["union_density"] < 0.1
        assert largest["sent_bytes"] < 0.1 * largest["looks"] * 48_000 * 4
        assert largest["whole"] == 0


def test_rows_of_sparse_embeddings_are_counted(reports):
    for report in reports:
        (rows,) = [
            bucket
            for name, bucket in report["trained"]["sparse embedding"]["statistics"].items()
            if name.endswith("/48000")
        ]
        sent = rows["density"] * rows["looks"] * 3000
        assert 0 < rows["density"] < rows["union_density"] < 0.1
        assert rows["sent_bytes"] == pytest.approx(sent * (16 * 4 + 8))
        assert rows["sent_bytes"] + rows["saved_bytes"] == rows["looks"] * 48_000 * 4


def test_dense_buckets_are_looked_at_rarely(reports):
    for report in reports:
        for bucket in report["trained"]["dense"]["statistics"].values():
            assert bucket["whole"] > bucket["looks"] or bucket["looks"] + bucket["whole"] < 4


def test_whole_buckets_are_sent_in_the_type_of_the_wire_too(reports):
    for report in reports:
        for bucket in report["trained"]["dense, bf16 on the wire"]["statistics"].values():
            assert bucket["saved_bytes"] > 0.45 * (bucket["saved_bytes"] + bucket["sent_bytes"])


def test_mistakes_with_groups_and_models_are_named(reports):
    for rank, report in enumerate(reports):
        told = report["misuses"]
        assert "make a SparseState for each model" in told["two models"]
        assert told["in backward"].startswith("torch.float32 cannot be sent as wire_dtype")
        assert "give train the model inside it" in told["twice"]
        assert told["timeout"] == 100
        assert "closed" in told["closed"]
        if rank < 2:
            assert (
                "over the ranks [0, 1], and the model is trained by [0, 1, 2]" in told["some ranks"]
            )


def test_power_sgd_takes_the_dense_buckets(reports):
    for report in reports:
        case = report["trained"]["PowerSGD for the dense"]
        assert case["error"] > 1e-6  # which is lossy
        assert any(bucket["whole"] > 0 for bucket in case["statistics"].values())


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("sizes", ["rank 0: 10 torch.float32", "rank 2: 12 torch.float32"]),
        ("types", ["rank 0: 10 torch.float32", "rank 1: 10 torch.float64"]),
        ("blocks", ["rank 0: 10 torch.float32 in blocks of 8", "float32 in blocks of 10"]),
        ("sizes in other orders", ["rank 0: 10 torch.float32", "rank 1: 12 torch.float32"]),
        ("types in other orders", ["rank 0: 10 torch.float32", "rank 1: 10 torch.int32"]),
        ("limits", ["dense_above=0.5; rank 1", "dense_above=1.0): build"]),
        ("hooks of dense buckets", ["dense=powerSGD_hook", "dense=None"]),
        ("thresholds", ["thresholding=keep 0.1 every 100, 0.5 at most", "thresholding=None"]),
        ("complex to real", ["torch.complex64 cannot be sent as wire_dtype=torch.bfloat16"]),
        ("real to integer", ["torch.float32 cannot be sent as wire_dtype=torch.int8"]),
    ],
)
def test_ranks_that_differ_are_all_told(reports, case, texts):
    told = [report["disagreements"][case] for report in reports]
    assert told[0] == told[1] == told[2]
    assert all(text in told[0] for text in texts), told[0]


def test_what_thresholding_holds_back_is_in_checkpoints(reports):
    assert len({report["held back"]["digest"] for report in reports}) == 1
    for report in reports:
        assert report["held back"]["waits"] > 0
        assert report["held back"]["means"]
        assert report["held back"]["again"]


def test_train_goes_on_with_the_hook_from_a_checkpoint(reports):
    for name in ("looped", "looped and held back"):
        assert len({report[name]["whole"]["digest"] for report in reports}) == 1
        assert len({report[name]["parts"][1]["digest"] for report in reports}) == 1
    for report in reports:
        exact, held = report["looped"], report["looped and held back"]
        assert exact["parts"][1]["digest"] == exact["whole"]["digest"] != held["whole"]["digest"]
        assert exact["whole"]["waits"] == 0 < held["whole"]["waits"]
        first, last = exact["whole"]["seen"][0], exact["whole"]["seen"][-1]
        assert 0 < first["sent_bytes"] < last["sent_bytes"] < last["saved_bytes"]
        assert 0 < last["density"] < last["union_density"] < 0.1


def test_one_process_has_nobody_to_reduce_with():
    state = object.__new__(SparseState)
    state._thresholding = None
    model = nn.Linear(2, 1)
    with pytest.raises(
        ConfigError, match=r"reduce= is for several processes of torch\.distributed"
    ):
        training.train(model, training.SGD(model.parameters(), lr=0.1), [], steps=1, reduce=state)


def test_a_loss_scale_and_thresholding_do_not_go_together():
    state = object.__new__(SparseState)
    model = nn.Linear(2, 1)
    state._thresholding = Thresholding(model)
    with pytest.raises(ConfigError, match=r"another loss scale; use precision='bf16'"):
        training.train(
            model,
            training.SGD(model.parameters(), lr=0.1),
            [],
            steps=1,
            reduce=state,
            precision="fp16",
        )


def test_a_killed_rank_ends_all_others_with_an_error(jobs, tmp_path):
    with running_ranks(jobs, tmp_path, JOB, WORLD, "--killed") as ranks:
        assert [rank.status() for rank in ranks] == [0, 0, -9]
    for rank in ranks[:-1]:
        told = json.loads(rank.report.read_text())["error"]
        assert "onnection" in told or "peer" in told, told
