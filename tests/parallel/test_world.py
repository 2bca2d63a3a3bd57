"""Which GPU is a process's own, and what connects it with the others."""

import pytest
import torch

from megatron.parallel.world import backend_for, device_index


def test_gloo_is_there_for_the_hosts_whatever_the_device() -> None:
    assert backend_for(torch.device("cpu")) == "gloo"
    assert backend_for(torch.device("cuda", 3)) == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("local_rank", [0, 3, 7])
def test_a_process_that_sees_all_gpus_takes_the_one_of_its_number(local_rank: int) -> None:
    assert device_index(local_rank, n_visible=8) == local_rank


def test_a_process_that_sees_its_own_gpu_alone_takes_it() -> None:
    assert device_index(5, n_visible=1) == 0


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="local rank 4 finds 4 GPUs on this node, wanted one for each"):
        device_index(4, n_visible=4)
