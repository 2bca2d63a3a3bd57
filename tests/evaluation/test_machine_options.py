"""Machine options of the scoring tools."""

from argparse import ArgumentParser

import pytest
import torch

from megatron.evaluation.machine_options import add_machine_options, open_requested_world


def parse_options(*words: str):
    parser = ArgumentParser()
    add_machine_options(parser, batch_size=4, unit="windows")
    return parser.parse_args(words)


def test_a_requested_gpu_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch finds no GPU"):
        open_requested_world(parse_options("--device", "cuda"))
    with open_requested_world(parse_options()) as world:  # not requested: the default is the CPU
        assert world.device.type == "cpu"


def test_the_requested_cpu_is_used_although_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with open_requested_world(
        parse_options("--device", "cpu", "--threads", str(torch.get_num_threads()))
    ) as world:
        assert world.device.type == "cpu"
