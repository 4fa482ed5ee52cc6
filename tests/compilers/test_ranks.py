"""Real ranks over gloo, each on a host of its own, all load one artifact."""

import pytest

from support.compiler_jobs import CompilerJobs, JaxJobs
from support.ports import reserved_port
from support.tiers import each_of

UNREACHABLE = "http://127.0.0.1:9"
SIZE = 3


@pytest.fixture(params=each_of({"": "", "torch-newest": "torch-newest"}))
def ranks(request, jobs, server, namespace, tmp_path):
    """Return a function that runs a torch job. Its `broken` ranks cannot reach the cache."""
    settings = {"cases": "inductor", "environment": request.param, "namespace": namespace}
    variables = {"TORCHINDUCTOR_CACHE_DIR": "HOST/inductor"}
    with CompilerJobs(tmp_path, jobs=jobs, variables=variables, **settings) as made:

        def run(name, *, broken=()):
            store = f"tcp://127.0.0.1:{reserved_port()}"
            running = [
                made.start(
                    f"{name}/{number}",
                    "rank",
                    {"number": number, "size": SIZE, "store": store},
                    under="fork:inductor",
                    hooks="inductor",
                    url=UNREACHABLE if number in broken else server.url,
                )
                for number in range(SIZE)
            ]
            return [process.finish().report for process in running]

        yield run


def test_agreement_ends_with_its_process_group_and_leaves_out_forked_children(start_program):
    program = """
        import os, weakref
        import torch.distributed as dist
        from graphstash.hooks.inductor.ranks import ranks

        me = {"rank": int(os.environ["RANK"]), "world_size": 2}
        for number, port in enumerate(os.environ["PORTS"].split()):
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **me)
            store = weakref.ref(dist.distributed_c10d._get_default_store())
            known = ranks()
            child = os.fork()
            if child == 0:
                os._exit(0 if ranks() is None else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert ranks() is known
            print(known.claim("name", str(number).encode()).decode())
            dist.monitored_barrier()
            dist.destroy_process_group()
            assert store() is None, "its address is not free for the next group"
        print(ranks())
        """
    ports = " ".join(str(reserved_port()) for _ in range(3))
    place = {"PORTS": ports}
    running = [
        start_program(program, host=str(rank), under="torch", variables=place | {"RANK": str(rank)})
        for rank in range(2)
    ]
    assert [each.finish().report for each in running] == 2 * [["0", "1", "2", "None"]]


def graphs(reports, what):
    return [report["found"].get(f"fxgraph_cache_{what}", 0) for report in reports]


def losses(reports):
    return [report["losses"] for report in reports]


@pytest.mark.extended
def test_all_ranks_load_one_artifact_even_without_access_to_cache(ranks):
    cold, warm = ranks("cold"), ranks("warm", broken=[2])
    assert sum(graphs(cold, "miss")) == 2  # forward and backward, each compiled by one rank
    assert sum(graphs(cold, "hit")) == 2 * (SIZE - 1)

    assert graphs(warm, "miss") == [0] * SIZE
    assert warm[2]["stats"]["hits_ranks"] >= 2
    assert all(report["stats"]["fallbacks"] == {} for report in warm[:2])
    assert losses(warm) == losses(cold)


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [""], indirect=True)
def test_ranks_share_results_if_no_rank_reaches_the_cache(ranks):
    lone = ranks("lone", broken=range(SIZE))
    assert sum(graphs(lone, "miss")) == 2
    assert sum(report["stats"]["hits_ranks"] for report in lone) == 2 * (SIZE - 1)


@pytest.fixture(params=each_of({"": "", "jax-oldest": "jax-oldest"}))
def processes(request, jobs, server, namespace, tmp_path):
    """Return a function that runs a JAX job. Its `broken` processes cannot reach the cache."""
    with JaxJobs(tmp_path, jobs=jobs, environment=request.param, namespace=namespace) as made:

        def run(name, *, broken=()):
            port = reserved_port()
            running = [
                made.start(
                    f"{name}/{rank}",
                    "collective",
                    {"rank": rank, "size": 2, "port": port},
                    url=UNREACHABLE if rank in broken else server.url,
                )
                for rank in range(2)
            ]
            return [process.finish().report for process in running]

        yield run


@pytest.mark.extended
def test_all_processes_of_jax_load_one_executable_even_without_access_to_cache(processes):
    cold = processes("cold")
    assert sum(report["compiled"] for report in cold) == 1  # the process that asked first
    assert len({report["total"] for report in cold}) == 1

    warm = processes("warm", broken=(1,))
    assert [report["compiled"] for report in warm] == [0, 0]
    assert warm[0]["stats"]["fallbacks"] == {}
    assert warm[1]["stats"]["hits_ranks"] == 1
    assert warm[0]["total"] == warm[1]["total"] == cold[0]["total"]

    lone = processes("lone", broken=(0, 1))
    assert sum(report["compiled"] for report in lone) == 1
    assert lone[0]["total"] == lone[1]["total"] == cold[0]["total"]
