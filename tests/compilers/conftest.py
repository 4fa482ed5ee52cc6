"""Promise: a host loads artifacts that another host compiled, and computes the same bits. If the
cache fails, the compiler compiles and the hook counts the reason.

Real compilers run, each in the oldest and the newest tested version, on hosts that share a real
server.
"""

import textwrap

import pytest

from support.run_case import RUN_CASE, case_arguments

pytest.register_assert_rewrite("support.hook_contract")


@pytest.fixture
def start_program(jobs, tmp_path):
    """Return a function that starts a program in a process that has imported its compiler.

    The report of the job is the list of printed lines.
    """

    def start(text, *, host="host", **arguments):
        options = case_arguments("programs:printed", text=textwrap.dedent(text))
        return jobs.start(tmp_path / host, *options, script=RUN_CASE, **arguments)

    return start


@pytest.fixture
def jax_program(start_program):
    """Return a function that runs a JAX program and returns the printed lines."""
    return lambda text, **arguments: start_program(text, under="jax", **arguments).finish().report


@pytest.fixture
def host(server, namespace, tmp_path):
    """Return a function that makes hosts of torch.compile in one namespace, one host at a time."""
    from support.inductor_host import inductor_host

    def make(name, **settings):
        settings = {"url": server.url, "namespace": namespace} | settings
        return inductor_host(tmp_path / name, **settings)

    return make
