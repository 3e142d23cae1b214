"""Which cores compute: as many as vLLM lets compute without a connector, where there are enough."""

import os
from types import SimpleNamespace

import pytest
from vllm.utils import ompmultiprocessing
from vllm.utils.cpu_resource_utils import LogicalCPUInfo
from vllm.utils.ompmultiprocessing import OMPProcessManager

from vllm_kvevict.engine.frontend import cores
from vllm_kvevict.engine.frontend.cores import RESERVED


@pytest.fixture
def machine(monkeypatch):
    """Sets how many cores there are, of two logical CPUs each, for vLLM and for us."""
    monkeypatch.delenv(RESERVED, raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def with_cores(count: int, nodes: int = 1) -> None:
        cpus = [LogicalCPUInfo(cpu, cpu // 2, cpu // 2 * nodes // count) for cpu in range(2 * count)]
        monkeypatch.setattr(cores, "get_allowed_cpu_list", lambda: cpus)
        monkeypatch.setattr(ompmultiprocessing.cr_utils, "get_allowed_cpu_list", lambda: cpus)
        monkeypatch.setattr(
            ompmultiprocessing.cr_utils, "get_visible_memory_node", lambda: list(range(nodes))
        )

    return with_cores


def computing(local_ranks: int, has_connector: bool) -> list[int]:
    """How many cores of each rank compute, as vLLM places threads."""
    parallel = SimpleNamespace(
        local_world_size=local_ranks, data_parallel_rank_local=None, _api_process_count=1
    )
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=has_connector or None)
    return [len(cpus) for cpus in OMPProcessManager(config).cpu_lists]


@pytest.mark.parametrize("count, local_ranks", [(2, 1), (3, 1), (4, 1), (16, 1), (4, 2), (16, 2), (6, 2)])
def test_as_many_compute_as_without_a_connector(machine, count: int, local_ranks: int) -> None:
    machine(count, local_ranks)
    stock = computing(local_ranks, has_connector=False)
    # A control: without our asking there is one less in each rank, or none is kept for vLLM itself.
    assert computing(local_ranks, has_connector=True) == [kept - 1 or count // local_ranks for kept in stock]
    cores.compute_on_as_many_as_stock(local_ranks)
    assert computing(local_ranks, has_connector=True) == stock


@pytest.mark.parametrize("count, local_ranks", [(1, 1), (2, 2)])
def test_where_all_compute_that_stays_so(machine, count: int, local_ranks: int) -> None:
    machine(count, local_ranks)
    cores.compute_on_as_many_as_stock(local_ranks)
    assert RESERVED not in os.environ
    assert sum(computing(local_ranks, has_connector=True)) == count


@pytest.mark.parametrize("name, said", [(RESERVED, "3"), ("VLLM_CPU_OMP_THREADS_BIND", "0,1")])
def test_what_the_user_says_comes_first(machine, name: str, said: str) -> None:
    machine(16)
    os.environ[name] = said
    before = dict(os.environ)
    cores.compute_on_as_many_as_stock(1)
    assert os.environ == before
