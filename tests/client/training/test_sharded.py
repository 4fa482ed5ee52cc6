"""Parameters that two processes shard (FSDP2) are updated like whole ones."""

import pytest

CLIPS = ("", "norm", "value")
OPTIMIZERS = ("SGD momentum", "Adam amsgrad", "AdamW", "LAMB", "Lion")


@pytest.mark.parametrize(
    ("name", "scaled", "clip"),
    [(name, number % 2 == 0, CLIPS[number % 3]) for number, name in enumerate(OPTIMIZERS)],
)
def test_sharded_updates_and_skips_equal_whole_parameters(ranks, name, scaled, clip):
    ranks(2).run("sharded:updates_as_whole", name=name, scaled=scaled, clip=clip)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch's"])
def test_a_sharded_run_resumes_exactly_and_its_checkpoint_fits_a_whole_model(ranks, tmp_path, ours):
    ranks(2).run("sharded:resumes", directory=tmp_path, ours=ours)


def test_state_that_was_sharded_otherwise_is_loaded(ranks):
    ranks(2).run("sharded:loads_other_shards")


def test_sharded_sums_compile_into_one_graph(ranks):
    ranks(2).run("sharded:sums_compile")


REFUSED = {
    "Checkpoints": ["call full_tensor() in every process"],
    "Muon": ["a parameter is sharded: put it into a group"],
    "Shampoo": ["Shampoo needs whole matrices, and a parameter is sharded; use LAMB or AdamW"],
    "SOAP": ["SOAP needs whole matrices, and a parameter is sharded; use LAMB or AdamW"],
    "Adafactor": ["a parameter is sharded", "use Adam"],
    "ScheduleFreeAdamW": ["a parameter is sharded", "use Adam"],
    "Adam8bit": ["a parameter is sharded", "use Adam"],
}


def test_optimizers_of_whole_tensors_refuse_shards(ranks, tmp_path, is_extended):
    names = REFUSED.keys() - {"Checkpoints", "" if is_extended else "Adam8bit"}  # imports torchao
    for messages in ranks(2).run("sharded:refusals", directory=tmp_path, names=sorted(names)):
        assert messages.keys() == names | {"Checkpoints"}
        for name, text in messages.items():
            assert all(expected in text for expected in REFUSED[name]), text
