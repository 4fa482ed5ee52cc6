"""Promise: on a TPU VM, hooks share executables, and training and tuning work as on CPUs.

Only `make test-tpu` runs these tests, and prints what each part has shown. It fails on a host
without a TPU. With TEST_DEVICE=cpu, the tests run on a CPU, except the tests of the pjrt hook and
of prewarming:

    TEST_DEVICE=cpu .venv/bin/python -m pytest --tpu tests/tpu -k "not pjrt and not prewarmed"
"""

from support.device_table import print_table


def pytest_terminal_summary(terminalreporter):
    print_table(terminalreporter, __file__)
