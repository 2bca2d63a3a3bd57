"""The machine that a tool was asked to score on."""

from argparse import ArgumentParser

import pytest
import torch

from megatron.evaluation.options import add_machine_options, open_asked_world


def parsed(*words: str):
    parser = ArgumentParser()
    add_machine_options(parser, batch_size=4, unit="windows")
    return parser.parse_args(words)


def test_a_gpu_that_is_asked_for_and_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch finds no GPU"):
        open_asked_world(parsed("--device", "cuda"))
    with open_asked_world(parsed()) as world:  # not asked for: the CPU will do
        assert world.device.type == "cpu"


def test_the_cpu_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with open_asked_world(parsed("--device", "cpu", "--threads", str(torch.get_num_threads()))) as world:
        assert world.device.type == "cpu"
