"""Which GPU is a process's own, and what connects it with the others."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.parallel.world import backend_for, device_index, resolve_host


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


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".invalid", "a b"])
def test_a_host_without_an_address_is_named_within_seconds(host: str) -> None:
    """Names under .invalid never resolve (RFC 6761)."""
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="MASTER_ADDR: got .*expected the host of rank 0"):
        resolve_host(host, wait_s=1.5)
    assert 1 < time.monotonic() - begin < 20


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_host_with_an_address_is_not_waited_for(host: str) -> None:
    begin = time.monotonic()
    resolve_host(host)
    assert time.monotonic() - begin < 9


def test_a_name_that_comes_late_and_a_lookup_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def late(host: str, port: None) -> list[str]:
        calls.append(host)
        if len(calls) < 3:
            raise socket.gaierror("not yet")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", late)
    resolve_host("node1")
    assert calls == ["node1"] * 3
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(5))
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="no answer for 0.5 s"):
        resolve_host("node1", wait_s=0.5)
    assert time.monotonic() - begin < 4


def test_a_run_whose_first_host_has_no_address_ends_with_a_sentence(root: Path) -> None:
    words = [sys.executable, "tools/pretrain.py", "examples_scaling/training/small.yaml"]
    words += ["dataset.path_train=synthetic", "dist.cpu_only=true", "logging.run_dir=/nonexistent/run"]
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29999"}
    environment = {**os.environ, **ranks, "MASTER_ADDR": "no-such-host.invalid"}
    done = subprocess.run(words, env=environment, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "error: MASTER_ADDR: got 'no-such-host.invalid', expected the host of rank 0" in done.stderr
    assert "Traceback" not in done.stderr
