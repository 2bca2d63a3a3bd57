"""Chunks of documents: formats, positions on any number of groups, changed files, adaptive weights."""

import json
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.mixture import learner
from megatron.mixture.documents import DocumentChunks, OpenFiles
from megatron.mixture.loaders import MixtureDataset, hugging_face, pack_windows
from megatron.mixture.weights import NotReadyError
from tests.datasets import write_dataset
from tests.mixture.conftest import register, write_files, write_lines, write_tar
from tests.mixture.loss_rule import LossProportional


def open_format(folder: Path, files: list[Path], extra: str = "") -> DocumentChunks:
    folder.mkdir(exist_ok=True)
    register(folder / "c", files, ())
    (folder / "m.yaml").write_text(f"catalog: c\ncount: documents\ndry: redistribute\nchunk_size: 7\n{extra}")
    return DocumentChunks(folder / "m.yaml")


def test_chunks_of_every_format_contain_every_document_once(tmp_path) -> None:
    texts = [f"text {i} \u00e9\u4e2d" for i in range(40)]
    lines = [json.dumps({"text": text}) for text in texts]
    folders = [tmp_path / name for name in ("lines", "rows", "samples")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "a.jsonl").write_text("\n\n".join(lines[:20]))  # blank lines, and no newline at the end
    with pa.CompressedOutputStream(str(folders[0] / "b.jsonl.zst"), "zstd") as stream:
        stream.write("\n".join(lines[20:]).encode())
    pq.write_table(pa.table({"text": texts}), folders[1] / "a.parquet", row_group_size=6)
    samples = [(f"{i:02}", {"txt": text.encode(), "png": b"\x89"}) for i, text in enumerate(texts)]
    write_tar(folders[2] / "a.tar", samples)
    for folder in folders:
        with open_format(folder, [folder]) as source:
            samples = [document for chunk in MixtureDataset(lambda: source) for document in chunk.documents]
        assert sorted(samples) == sorted(texts)


def test_text_and_rows_can_be_mixed_and_datasets_cannot(tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", 20)
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(20)]}), tmp_path / "b.parquet")
    with open_format(tmp_path, [tmp_path / "a.jsonl", tmp_path / "b.parquet"]) as source:
        assert len(set(source.read(0, 9).column("text").to_pylist())) == 40
    write_dataset(tmp_path / "ids", [[0, 1, 2]])
    with pytest.raises(ValueError, match="ids.bin: got a .bin/.idx dataset, expected text .* TitanLoader"):
        open_format(tmp_path / "ids-catalog", [tmp_path / "ids"])


def test_states_of_all_ranks_have_a_recent_position(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.mixture.loaders.ANCHOR_CHUNKS", 10)
    monkeypatch.setattr("megatron.mixture.distributor.MAX_WALK_CHUNKS", 30)
    open_source = partial(DocumentChunks, mixture, chunk_size=8)
    whole = [chunk.documents for chunk in islice(MixtureDataset(open_source), 100)]
    state, read = None, []
    for n_groups in (1, 3, 2):
        groups = [MixtureDataset(open_source, group, n_groups) for group in range(n_groups)]
        for dataset in groups:
            if state is not None:
                dataset.load_state_dict(state)
        for chunks in islice(zip(*groups, strict=True), 17):
            read += [chunk.documents for chunk in chunks]
        states = [dataset.state_dict(chunk) for dataset, chunk in zip(groups, chunks, strict=True)]
        state = json.loads(json.dumps(states[0]))
        assert all(other == state for other in states)
        assert groups[-1].state_dict()["next_chunk"] == state["next_chunk"]
    assert read[:100] == whole
    assert state is not None and 102 - state["position"]["chunk"] < 10 + 3
    with pytest.raises(ValueError, match=r"chunk 102: got the nearest known position at chunk 0"):
        DocumentChunks(mixture, chunk_size=8).read(102, 1)


def test_shares_are_those_of_the_weights_and_the_order_is_that_of_the_seed(mixture) -> None:
    with (
        DocumentChunks(mixture, seed=3) as chunks,
        DocumentChunks(mixture, seed=3) as same,
        DocumentChunks(mixture) as other,
    ):
        table = chunks.read(0, 3)
        counts = Counter(chunks.names[k] for k in table.column("domain").to_pylist())
        assert counts == {"Python": 768, "Go": 512, "C": 256}
        assert table.equals(same.read(0, 3))
        assert not table.equals(other.read(0, 3))
        assert pa.concat_tables(chunks.read_pieces(0, 3)).equals(table)


def test_a_file_that_changes_or_is_outside_of_the_roots_is_refused(mixture, tmp_path) -> None:
    with DocumentChunks(mixture) as source:
        source.read(0, 1)
        (tmp_path / "a.jsonl").write_text("x\n")
        with pytest.raises(ValueError, match=r"a\.jsonl: has changed since it was registered"):
            source.read(1, 1)
    with pytest.raises(ValueError, match=r"a\.jsonl: has changed since it was registered. Register it again"):
        DocumentChunks(mixture)
    with pytest.raises(ValueError, match="a.jsonl: is not below /nowhere"):
        DocumentChunks(mixture, roots=[Path("/nowhere")])
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl: is in the catalog but missing on disk"):
        DocumentChunks(mixture)


def test_more_files_than_may_be_open_are_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("megatron.mixture.documents.MAX_FILES", 8)
    with open_format(tmp_path, write_files(tmp_path, 30, 5)) as source:
        texts = source.read(0, 30).column("text").to_pylist()
        assert len(source._files._descriptors._values) <= 8
    assert sorted(texts) == sorted(f"document {i}" for i in range(150))
    assert isinstance(source._files, OpenFiles)


def test_a_new_version_of_the_catalog_is_selected_and_a_snapshot_stays(tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", 10)
    with open_format(tmp_path, [tmp_path / "a.jsonl"]) as source:
        assert source.counts.tolist() == [10]
    write_lines(tmp_path / "b.jsonl", 5)
    with open_format(tmp_path, [tmp_path / "b.jsonl"]) as source:
        assert source.counts.tolist() == [15]
    with open_format(tmp_path, [tmp_path / "b.jsonl"], "snapshot: {code: 1}\n") as source:
        assert source.counts.tolist() == [10]


def test_windows_of_a_chunk_keep_every_token_and_the_domain_of_each_target(mixture) -> None:
    (chunk,) = islice(MixtureDataset(partial(DocumentChunks, mixture, chunk_size=5)), 1)
    windows, domains = pack_windows(chunk, 8, 0, lambda text: [ord(c) for c in text])
    tokens = [ord(c) if c != "\0" else 0 for text in chunk.documents for c in text + "\0"]
    assert windows[:, :-1].ravel().tolist()[: len(tokens) - 1] == tokens[:-1]
    targets = [k for k, text in zip(chunk.domains, chunk.documents, strict=True) for _ in text + "\0"][1:]
    assert domains.ravel().tolist()[: len(targets)] == targets
    assert set(domains.ravel().tolist()[len(targets) :]) <= {-1}
    parsed = MixtureDataset(partial(DocumentChunks, mixture, chunk_size=5), parse=len)
    assert next(iter(parsed)).documents == list(map(len, chunk.documents))


def test_hugging_face_rows_resume_after_any_document_and_on_another_number_of_groups(mixture) -> None:
    pytest.importorskip("datasets")
    open_source = partial(DocumentChunks, mixture, chunk_size=6)
    whole = list(islice(hugging_face(MixtureDataset(open_source)), 40))
    rows = hugging_face(MixtureDataset(open_source))
    read = list(islice(rows, 8))
    again = hugging_face(MixtureDataset(open_source))
    again.load_state_dict(rows.state_dict())
    read += list(islice(again, 10))  # up to the end of the third chunk
    assert read == whole[:18]
    halves = [hugging_face(MixtureDataset(open_source, group, 2)) for group in range(2)]
    for half in halves:
        half.load_state_dict(again.state_dict())
    assert [row for half in halves for row in islice(half, 6)] == whole[18:30]
    middle = rows.state_dict()
    halves[0].load_state_dict(middle)
    with pytest.raises(ValueError, match="saved inside a chunk by 1 groups, got 2 groups"):
        next(iter(halves[0]))


RULE = "tests.mixture.loss_rule:LossProportional"
ADAPTIVE = f"adaptive: {{rule: '{RULE}', every_steps: 2, delay_steps: 3}}\n"


def simulate(source: DocumentChunks, chunks: range) -> list[list[int]]:
    """Read chunks, and report a loss of 2 + k nats per token for domain k."""
    read = []
    for chunk in chunks:
        domain = source.read(chunk, 1).column("domain").to_numpy()
        counts = np.bincount(domain, minlength=3).astype(float)
        source.report(chunk, counts * 10 * (2 + np.arange(3)), counts * 10)
        read.append(domain.tolist())
    return read


def test_adaptive_weights_follow_the_log_after_a_restart(mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "RULE_SAVE_INTERVAL", 20)
    mixture.write_text(mixture.read_text() + ADAPTIVE)
    with DocumentChunks(mixture, chunk_size=60, run="whole") as source:
        whole = simulate(source, range(60))
        weights = source.distributor.weights.weights_at(5)[0]
    rule = LossProportional(np.array([1, 2, 3]) / 6)
    assert weights.tolist() == pytest.approx(rule.observe(60, np.array([2.0, 3, 4]), np.ones(3)).tolist())
    with DocumentChunks(mixture, chunk_size=60, run="cut") as source:
        begun = simulate(source, range(50))
    path = mixture.with_suffix(".mixture") / "logs" / "cut.jsonl"
    with path.open("a") as file:
        file.write('{"chunk": 5')  # a line that was cut short by a kill
    with DocumentChunks(mixture, chunk_size=60, run="cut") as source:
        assert begun + simulate(source, range(50, 60)) == whole
        with pytest.raises(ValueError, match="another process writes this log"):
            DocumentChunks(mixture, chunk_size=60, run="cut")
        with pytest.raises(NotReadyError, match="weights of chunk"):
            source.read(400, 1)
        with pytest.raises(ValueError, match="got a report before the chunk could be read"):
            source.report(400, np.ones(3), np.ones(3))
        with pytest.raises(ValueError, match="expected 3 finite numbers"):
            source.report(58, np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="is the log of other documents or settings"):
        DocumentChunks(mixture, chunk_size=60, seed=1, run="cut")
    path.write_text("not json\n" + path.read_text())
    with pytest.raises(ValueError, match="cut.jsonl: got a line that is not JSON"):
        DocumentChunks(mixture, chunk_size=60, run="cut")


def test_an_error_of_a_rule_of_the_user_reaches_the_reader(mixture: Path, tmp_path, monkeypatch) -> None:
    (tmp_path / "mix_rules.py").write_text(
        "class Empty:\n    def __init__(self, weights): pass\n"
        "class Failing(Empty):\n    def observe(self, n, nats, counts): raise OSError('no')\n"
        "    def as_dict(self): return {}\n    def restore(self, state): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = mixture.read_text()
    reasons = {"mix_rules:Empty": "got no observe, as_dict, restore", "mix_none:X": "cannot|No module"}
    for name, reason in reasons.items():
        mixture.write_text(text + ADAPTIVE.replace(RULE, name))
        with pytest.raises(ValueError, match=reason):
            DocumentChunks(mixture)
    mixture.write_text(text + ADAPTIVE.replace(RULE, "mix_rules:Failing"))
    with DocumentChunks(mixture) as source:
        with pytest.raises(ValueError, match=r"no weights could be computed from chunk 0 \(no\)"):
            source.report(0, np.ones(3), np.ones(3))
        with pytest.raises(NotReadyError):
            source.read(9, 1)
