"""Device selection, backends and host name resolution of a process."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch

from megatron.parallel.world import backend_for, device_index, resolve_host, use_expandable_segments
from tests.tool_modules import Cli


def test_every_backend_includes_gloo_for_the_cpu() -> None:
    assert backend_for(torch.device("cpu")) == "gloo"
    assert backend_for(torch.device("cuda", 3)) == "cpu:gloo,cuda:nccl"


def test_a_process_uses_the_gpu_of_its_local_rank() -> None:
    assert [device_index(local_rank, n_visible=8) for local_rank in (0, 3, 7)] == [0, 3, 7]
    assert device_index(5, n_visible=1) == 0
    with pytest.raises(ValueError, match="local rank 4: got 4 GPUs on this node, expected one per process"):
        device_index(4, n_visible=4)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64 + ".invalid", "a b"])
def test_an_unresolvable_host_is_named_within_seconds(host: str) -> None:
    """Names under .invalid never resolve (RFC 6761)."""
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="MASTER_ADDR: got .*expected the host of rank 0"):
        resolve_host(host, wait_s=0.6)
    assert 0.5 < time.monotonic() - begin < 20


def test_a_late_name_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def resolve_late(host: str, port: None) -> list[str]:
        calls.append(host)
        if len(calls) < 3:
            raise socket.gaierror("not yet")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve_late)
    resolve_host("node1")
    assert calls == ["node1"] * 3


@pytest.mark.slow
def test_a_run_with_an_unresolvable_host_ends(cli: Cli, root: Path) -> None:
    words = ["dataset.path_train=synthetic", "dist.cpu_only=true", "logging.run_dir=/nonexistent/run"]
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29999"}
    config, environment = root / "examples_scaling" / "training" / "small.yaml", {"MASTER_ADDR": "no.invalid"}
    failed = cli("train", config, *words, status=1, env=ranks | environment).error
    assert "error: MASTER_ADDR: got 'no.invalid', expected the host of rank 0" in failed
    assert failed.strip().count("\n") == 0


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_grows_segments_by_default(monkeypatch, name: str) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for variable in names:
        monkeypatch.setenv(variable, "")  # restored after the test
        monkeypatch.delenv(variable)
    use_expandable_segments()
    assert {n: os.environ[n] for n in names if n in os.environ} == {names[0]: "expandable_segments:True"}
    del os.environ[names[0]]
    monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    assert {n: os.environ[n] for n in names if n in os.environ} == {name: "max_split_size_mb:64"}
