"""Every change of a table of torch changes the next key, with both ways to compare tables."""

import pytest

from support.tiers import most_extended


@pytest.mark.parametrize("compared", most_extended(["versions", "members"], quick=["versions"]))
@pytest.mark.parametrize(
    "environment", ["", pytest.param("torch-newest", marks=pytest.mark.extended)]
)
def test_changed_table_changes_the_next_key(start_program, environment, compared):
    program = f"""
        import runpy, sys

        sys.argv[1:] = ["{compared}"]
        runpy.run_module("compilers.wrong_hits.changed_tables", run_name="__main__")
        """
    running = start_program(program, under="inductor", environment=environment)
    assert int(running.finish().report[-1]) > 10
