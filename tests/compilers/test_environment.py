"""What of a process's environment makes another executable."""

from graphstash.hooks.environment import environment_parts


def parts(**environ):
    return environment_parts(environ)


def test_the_order_of_flags_makes_no_difference_the_last_of_two_does():
    assert parts(XLA_FLAGS="--xla_a=1 --xla_b=2") == parts(XLA_FLAGS="--xla_b=2 --xla_a=1")
    assert parts(XLA_FLAGS="--xla_a=1 --xla_a=2") != parts(XLA_FLAGS="--xla_a=2 --xla_a=1")


def test_a_value_that_stands_beside_its_flag_stays_with_it():
    one = parts(NEURON_CC_FLAGS="--optlevel 1 --lnc 2")
    assert one != parts(NEURON_CC_FLAGS="--optlevel 2 --lnc 1")


def test_what_only_says_which_process_it_is_makes_no_difference():
    assert parts(TPU_WORKER_ID="3", NEURON_PJRT_PROCESS_INDEX="3", HOME="/root") == {}
