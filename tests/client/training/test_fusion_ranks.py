"""Fused updates in several processes end where unfused updates end, to the bit."""

import re

import pytest

from support.tiers import most_extended

REPLICATED = [
    ("backward", "LAMB", "views"),
    ("backward", "torch AdamW", "unused, views"),
    ("backward", "AdamW", "static graph"),
    ("forward", "AdamW", "unused, views"),
]


@pytest.fixture(scope="module")
def run(ranks):
    """Return a function that runs a case in three processes."""
    return lambda case, **keywords: ranks(3).run(f"fusion:{case}", **keywords)


@pytest.mark.parametrize(("when", "optimizer", "settings"), REPLICATED)
def test_fused_ddp_equals_optimizer_alone(run, when, optimizer, settings):
    run("replicated", when=when, optimizer=optimizer, settings=settings)


# `sharded_and_accumulated` shards AdamW.
@pytest.mark.parametrize(
    "optimizer", most_extended(["AdamW", "LAMB", "torch AdamW"], quick=["LAMB"])
)
def test_fused_fsdp_equals_optimizer_alone(run, optimizer):
    run("sharded", optimizer=optimizer)


@pytest.mark.parametrize("case", ["with_own_hook", "sharded_and_accumulated"])
def test_fused_training_with_a_hook_or_micro_batches_ends_at_the_same_bits(run, case):
    run(case)


@pytest.mark.parametrize("when", ["backward", "forward"])
@pytest.mark.parametrize("case", ["tensor_parallel", "by_train"])
def test_fused_tensor_parallel_layers_and_train_end_at_the_same_bits(run, case, when):
    run(case, when=when)


@pytest.mark.parametrize("divides_by_all", [True, False])
def test_join_after_fusion_divides_as_without_fusion(run, divides_by_all):
    run("joined_later", divides_by_all=divides_by_all)


REFUSED = {
    "own hook": 'has a communication hook, .* takes only one; use when="forward"',
    "built-in hook": 'has a communication hook, .* takes only one; use when="forward"',
    "mixed precision": r"use torch\.autocast instead",
    "accumulated": 'came twice before the first step.* use when="forward"',
    "accumulated later": 'came twice between two steps.* use when="forward"',
    "inner": r"DistributedDataParallel that fuse\(\) was not given",
    "inner, views": r"DistributedDataParallel that fuse\(\) was not given",
    "join": r'^FusionError: join\(\) of DistributedDataParallel .* use when="forward"',
    "clipped": r"changed between backward\(\) and step\(\)",
    "half updated": r"a backward failed after \d of 10 .* load the last checkpoint",
    "FSDP, forward": 'gather parameters before their module.* use when="backward"',
    "FSDP, reduced twice": "came twice before the first step.*; train without fusion$",
    "FSDP, offloaded": "^FusionError: CPUOffloadPolicy .* train without fusion$",
    "FSDP, clipped": r"changed between backward\(\) and step\(\).*; train without fusion$",
}


@pytest.mark.parametrize("name", REFUSED)
def test_inexact_fusion_is_refused_in_every_process(run, name):
    for message in run("refusal", name=name):
        assert message.startswith("FusionError: ")
        assert re.search(REFUSED[name], message)
