"""Promise: on an NVIDIA GPU, hooks share artifacts and training computes as on CPUs.

Only `make test-gpu` runs these tests, and prints what each part has shown. It fails on a machine
without a GPU. With TEST_DEVICE=cpu, the bodies of many tests run on a CPU:

    TEST_DEVICE=cpu .venv/bin/python -m pytest --gpu tests/gpu -k "not captured and not graph"
"""

from support.device_table import print_table


def pytest_terminal_summary(terminalreporter):
    print_table(terminalreporter, __file__)
