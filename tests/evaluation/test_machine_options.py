"""Machine options of the scoring tools."""

from argparse import ArgumentParser

import pytest
import torch

from megatron.evaluation.machine_options import add_machine_options, open_requested_world


def test_the_requested_device_is_used_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = ArgumentParser()
    add_machine_options(parser, batch_size=4, unit="windows")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch finds no GPU"):
        open_requested_world(parser.parse_args(["--device", "cuda"]))
    with open_requested_world(parser.parse_args([])) as world:  # not requested: the default is the CPU
        assert world.device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ["--device", "cpu", "--threads", str(torch.get_num_threads())]
    with open_requested_world(parser.parse_args(words)) as world:
        assert world.device.type == "cpu"
