"""Untrusted checkpoints: no code runs, no other file is read, and memory is bounded by the file sizes."""

import contextlib
import dataclasses
import json
import pickle
import resource
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from megatron.checkpoint import layout, store
from megatron.checkpoint.convert.dcp_folder import read_dcp_tensors
from megatron.checkpoint.convert.formats import convert_checkpoint, read_any
from megatron.checkpoint.convert.huggingface import read_huggingface
from megatron.checkpoint.convert.megatron_layouts import read_megatron
from megatron.checkpoint.model_weights import load_weights
from megatron.checkpoint.torch_file import load_torch_file
from tests.trust.conftest import seal
from tests.trust.hostile_pickles import EXHAUSTING, RUN_BY, RunsWhenRead, run_by

READERS: dict[str, Callable[[Path], Any]] = {
    "resume": store.load_checkpoint,
    "init_from, scoring, generation": load_weights,
    "conversion": lambda path: convert_checkpoint(path, path.with_name("converted"), to="native"),
    "the other layout": lambda path: convert_checkpoint(path, path.with_name("converted"), to="full"),
}


def test_valid_checkpoints_are_read(full: Path, shards: Path) -> None:
    expected = load_weights(full)
    for name, tensor in load_weights(shards).state.items():
        assert torch.equal(tensor, expected.state[name])
    expected.build_model()


@pytest.fixture
def pickled(full: Path, tmp_path: Path) -> Path:
    """Write the weights as torch's distributed checkpoint with a pickled index."""
    dcp.save(dict(load_weights(full).state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_an_index_that_runs_code_is_refused(pickled: Path, target: Path) -> None:
    for way in RUN_BY:
        (pickled / layout.METADATA).write_bytes(run_by(way, target))
        for select in (None, lambda name: True):
            with pytest.raises(ValueError, match=r"\.metadata: cannot be read"):
                read_dcp_tensors(pickled, select)
        assert not target.exists(), way


@pytest.mark.parametrize("content", EXHAUSTING.values(), ids=list(EXHAUSTING))
def test_an_index_that_exhausts_the_reader_is_refused(pickled: Path, content: bytes) -> None:
    (pickled / layout.METADATA).write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"\.metadata: cannot be read"):
        read_dcp_tensors(pickled)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 1 << 19, "512 MiB for a file of 3 MB at most"


def change_location(metadata: Metadata, **new: Any) -> None:
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **new)


def resize(metadata: Metadata, *shape: int) -> None:
    next(iter(metadata.state_dict_metadata.values())).size = torch.Size(shape)


NO_NAME = "expected the name of a file"
CHANGES: list[tuple[Callable[[Metadata], None], str]] = [
    (lambda m: change_location(m, relative_path="../../etc/passwd"), NO_NAME),
    (lambda m: change_location(m, relative_path="/etc/passwd"), NO_NAME),
    (lambda m: change_location(m, offset=1 << 40), "cannot be read"),
    (lambda m: resize(m, 1 << 20, 1 << 20), "cannot be read|elements, expected 1099511627776"),
    (lambda m: resize(m, 64, 17), "elements, expected 1088"),
    (lambda m: m.storage_data.clear(), "got 0 elements"),
    (lambda m: m.state_dict_metadata.update(x=BytesStorageMetadata()), "cannot be read"),
    (lambda m: m.state_dict_metadata.update(x=Path("x")), "cannot be read"),
]


def test_an_index_that_contradicts_its_files_is_refused(pickled: Path) -> None:
    valid = (pickled / layout.METADATA).read_bytes()
    for change, sentence in CHANGES:
        change(metadata := pickle.loads(valid))
        (pickled / layout.METADATA).write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=sentence):
            read_dcp_tensors(pickled)


def test_indexes_of_all_versions_are_read(pickled: Path, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms that torch 2.7 to 2.13 write under Python 3.11 to 3.13."""
    expected = load_weights(full).state
    metadata = pickle.loads((pickled / layout.METADATA).read_bytes())
    metadata.planner_data = {key: tuple(key.split(".")) for key in metadata.state_dict_metadata}
    metadata.storage_meta.modules = ["a"]
    metadata.version = None
    contents = [pickle.dumps(metadata, protocol=protocol) for protocol in (2, 4, 5)]
    # early versions of Python 3.11 pickle enum members by name
    by_name = lambda self, protocol: (getattr, (type(self), self._name_))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    # some versions of torch write the field that others omit if it is None
    state = lambda self: {**vars(self), "transform_descriptors": None}  # noqa: E731
    monkeypatch.setattr(_StorageInfo, "__getstate__", state)
    contents.append(pickle.dumps(metadata))
    assert b"getattr" in contents[-1] and b"transform_descriptors" in contents[-1]
    for content in contents:
        (pickled / layout.METADATA).write_bytes(content)
        tensors = read_dcp_tensors(pickled)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def bomb(path: Path) -> None:
    """Compress the records of a torch file; each tensor record becomes 4 MiB of zeros."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, bytes(1 << 22) if "/data/" in name else content)


def test_a_compressed_chunk_is_refused(pickled: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((pickled / layout.METADATA).read_bytes())
    torch.save(torch.zeros(64, 16), tmp_path / "chunk")
    bomb(tmp_path / "chunk")
    file = pickled / "__0_0.distcp"
    begin, chunk = file.stat().st_size, (tmp_path / "chunk").read_bytes()
    file.write_bytes(file.read_bytes() + chunk)
    index = next(i for i in metadata.storage_data if i.fqn == "embedding.weight")
    metadata.storage_data[index] = _StorageInfo(file.name, begin, len(chunk))
    (pickled / layout.METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="got compressed records"):
        read_dcp_tensors(pickled)


SHARD_CHANGES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda content: b"", "cannot be read"),
    (lambda content: struct.pack("<Q", 1 << 60) + content[8:], "cannot be read"),
    (lambda content: pickle.dumps(Path("x")), "cannot be read"),
    (lambda content: content.replace(b"saved_offsets", b"other_offsets"), "cannot be read"),
    (lambda content: content.replace(b"[0, 0]", b"[9, 0]", 1), "elements in chunks, expected"),
]


def test_a_shard_that_contradicts_itself_is_refused(shards: Path) -> None:
    (file,) = shards.glob("*.safetensors")
    valid = file.read_bytes()
    for change, sentence in SHARD_CHANGES:
        file.write_bytes(change(valid))
        seal(shards)
        for read in (store.load_checkpoint, load_weights):
            with pytest.raises(ValueError, match=sentence):
                read(shards)


HOSTILE_PARTS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "code": (lambda path, target: torch.save({"w": RunsWhenRead(target)}, path), "cannot be read"),
    "bare code": (lambda path, target: path.write_bytes(run_by("posix.system", target)), "cannot be read"),
    "a zip bomb": (lambda path, target: bomb(path), "got compressed records"),
    "a tensor of 2^50 numbers in 4 bytes": (
        lambda path, target: torch.save({"w": torch.zeros(1).expand(1 << 50)}, path),
        "is larger than its storage",
    ),
    "a sparse tensor": (
        lambda path, target: torch.save({"w": torch.eye(3).to_sparse()}, path), "expected a dense CPU tensor",
    ),
    "no zip file": (lambda path, target: path.write_bytes(b"PK" * 1000), "cannot be read"),
    "nothing": (lambda path, target: path.write_bytes(b""), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_PARTS)
@pytest.mark.parametrize("part", ["model", "iter"])
def test_a_hostile_part_is_refused(full: Path, target: Path, name: str, part: str) -> None:
    write, sentence = HOSTILE_PARTS[name]
    if part == "iter" and name == "a zip bomb":
        torch.save({"w": torch.zeros(8)}, full / layout.FILES[part])
    write(full / layout.FILES[part], target)
    seal(full)
    readers = READERS.values() if part == "model" else [store.load_checkpoint]
    for read in readers:
        with pytest.raises(ValueError, match=f"{sentence}|got the full layout"):
            read(full)
    assert not target.exists()


def test_parts_of_wrong_types_are_refused(full: Path) -> None:
    for content in ([torch.zeros(3)], {"w": 3}, 7, {"embedding.weight": torch.zeros(3)}):
        torch.save(content, full / layout.FILES["model"])
        seal(full)
        with pytest.raises(ValueError, match=f"expected a model's weights|{NO_MATCH}"):
            load_weights(full).build_model()
    for content in (5, (1, 2)):
        torch.save(content, full / layout.FILES["iter"])
        seal(full)
        with pytest.raises(ValueError, match=r"iter_state_dict\.pt: got .*, expected values by name"):
            store.load_checkpoint(full)


def test_containers_with_shared_parts_are_visited_once(tmp_path: Path) -> None:
    content: Any = []
    for _ in range(60):
        content = [content, content]
    torch.save(content, tmp_path / "file.pt")
    assert load_torch_file(tmp_path / "file.pt", inert_classes=True) is not None


NO_FILES, NO_MATCH = "expected `files`", "weights do not match the model configuration"
FULL_META: list[tuple[Callable[[dict], None], str]] = [
    (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": ""}}), NO_FILES),
    (lambda m: m.update(files=[1]), NO_FILES),
    (lambda m: m["files"].update({layout.META: {"bytes": "1"}}), NO_FILES),
]
SHAPES: list[tuple[str, Any, str]] = [
    ("n_layers", 10**12, NO_MATCH),
    ("d_model", 10**18, NO_MATCH),
    ("n_heads", 0, "model.n_heads: got 0"),
    ("n_heads", "2", "model.n_heads: got '2'"),
    ("d_model", [], "model.d_model: got"),
    ("positions", ["rotary"], "model.positions: got"),
    ("__class__", "x", "unknown key '__class__'"),
]
STATES: list[Any] = [None, [1], {"lr": {}}]
STATES.append({"lr": {}, "iter": {"x": {store.TENSOR: "AA", "dtype": "load"}}})


def edit_meta(checkpoint: Path, change: Callable[[dict], None]) -> None:
    """Change meta.json and remove its checksum, which is optional."""
    meta = json.loads((checkpoint / layout.META).read_text())
    meta.pop(layout.META_CHECKSUM, None)
    change(meta)
    (checkpoint / layout.META).write_text(json.dumps(meta))


def test_a_meta_json_of_wrong_types_is_refused_quickly_in_one_sentence(full: Path, shards: Path) -> None:
    valid = (full / layout.META).read_text()
    for change, sentence in FULL_META:
        (full / layout.META).write_text(valid)
        edit_meta(full, change)
        for read in (store.load_checkpoint, load_weights):
            with pytest.raises(ValueError, match=sentence):
                read(full)
    for key, value, sentence in SHAPES:
        (full / layout.META).write_text(valid)
        edit_meta(full, lambda m, change={key: value}: m["config"]["model"].update(change))
        with pytest.raises(ValueError, match=sentence):
            load_weights(full).build_model()
    for state in STATES:
        edit_meta(shards, lambda m, state=state: m.update({store.STATE: state}))
        with pytest.raises(ValueError, match="state: got invalid content"):
            store.load_checkpoint(shards)


def test_classes_in_a_checkpoint_of_megatron_stay_inert(tmp_path: Path, target: Path) -> None:
    args = Namespace(num_attention_heads=2, evil=RunsWhenRead(target))
    file = tmp_path / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"args": args, "model": {"w": torch.zeros(2)}, "rng": RunsWhenRead(target)}, file)
    with pytest.raises(ValueError):
        read_megatron(tmp_path / "iter_0000001")
    assert load_torch_file(file, inert_classes=True)["args"].num_attention_heads == 2
    for content in (run_by("posix.system", target), b"", b"PK\3\4"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a torch file"):
            load_torch_file(file, inert_classes=True)
    torch.save({"args": args, "w": torch.zeros(4)}, file)
    bomb(file)
    with pytest.raises(ValueError, match="got compressed records"):
        load_torch_file(file, inert_classes=True)
    assert not target.exists()


@pytest.fixture
def exported(full: Path, tmp_path: Path) -> Path:
    """Export the model to transformers."""
    convert_checkpoint(full, tmp_path / "exported", to="huggingface")
    return tmp_path / "exported"


def test_the_index_of_safetensors_names_no_file_that_is_read(exported: Path, tmp_path: Path) -> None:
    (exported / "model.safetensors").rename(tmp_path / "model.safetensors")  # a valid file outside the folder
    for name in ("../model.safetensors", "/etc/passwd", ".hidden.safetensors", 3, None):
        index = {"weight_map": {"w": name}}
        (exported / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(FileNotFoundError, match="got 0 files"):
            read_huggingface(exported)


def test_safetensors_with_a_wrong_header_are_refused(exported: Path) -> None:
    file = exported / "model.safetensors"
    whole = file.read_bytes()
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]}}).encode()
    for content in (
        struct.pack("<Q", 1 << 62) + whole[8:],
        struct.pack("<Q", len(header)) + header + b"\0" * 64,
        whole[: len(whole) // 2],
        b"",
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="not a safetensors file"):
            read_huggingface(exported)


def test_code_next_to_weights_is_not_imported(exported: Path, target: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (exported / "config.json").write_text(json.dumps(config))
    (exported / "modeling_evil.py").write_text(f"open({str(target)!r}, 'w')")
    with contextlib.suppress(ValueError):  # the reader may refuse the unknown key
        read_any(exported)
    assert not target.exists()
