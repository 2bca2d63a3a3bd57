"""Training on tokens in object storage: the losses of a run on local files."""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron.plan.run_dir import read_metrics
from tests.remote_servers import STORE_VARIABLES, serve_store


@pytest.mark.slow
def test_a_run_reads_its_tokens_from_a_store_and_has_the_losses_of_local_files(
    pretrain, words, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_store() as url:
        import s3fs

        for name, value in {
            **STORE_VARIABLES,
            "AWS_ENDPOINT_URL": url,
            "SCALING_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        store = s3fs.S3FileSystem(endpoint_url=url, key="test", secret="hidden")
        store.mkdir("tokens")
        for file in corpus.iterdir():
            store.put_file(str(file), f"tokens/{file.name}")
        remote = [word.replace(f"{corpus}{os.sep}", "s3://tokens/") for word in words]
        for name, settings in (("local", words), ("remote", remote)):
            done = pretrain([*settings, f"logging.run_dir={tmp_path / name}"])
            assert done.returncode == 0, done.stderr
    local, from_store = (read_losses(tmp_path / name) for name in ("local", "remote"))
    np.testing.assert_array_equal(local, from_store)
    assert len(local) > 12  # training steps and the held-out loss


def read_losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run) if "loss" in line]
