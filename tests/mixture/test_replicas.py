"""Several servers and direct reading deliver the same chunks, also when a server is lost."""

from pathlib import Path

import numpy as np
import pytest

from megatron.mixture.adaptive import NotReadyError
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve.client import MixtureDataset
from megatron.mixture.serve.replicas import ReplicatedChunks, open_replicas

ADAPTIVE = "adaptive: {rule: loss, every_steps: 2, delay_steps: 2}\n"


def read_texts(source: object, first: int, n: int) -> list[str]:
    return source.read(first, n).column("text").to_pylist()


def losses(chunk: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([3.0, 1.0 + chunk % 5, 2.0]) * 10, np.full(3, 10.0)


def test_clients_of_two_servers_and_of_files_get_the_same_documents_when_a_server_is_killed(
    mixture, start
) -> None:
    with DocumentChunks(mixture, seed=5) as direct:
        expected = [read_texts(direct, chunk, 1) for chunk in range(24)]
        servers = [start(mixture, "--port", 0, "--seed", 5) for _ in range(2)]
        locations = [location for _, location in servers]
        remote = open_replicas(locations, "code", patience_s=2)
        several = ReplicatedChunks([*remote._openers, lambda: direct])
        clients = [MixtureDataset(lambda: several, group, 2) for group in range(2)]
        seen: dict[int, list[str]] = {}
        for client in clients:
            for chunk in client:
                seen[chunk.number] = chunk.documents
                if chunk.number >= 22:
                    break
                if chunk.number == 9:
                    servers[0][0].kill()
                    servers[0][0].wait(timeout=60)
        assert [seen[chunk] for chunk in range(22)] == expected[:22]
        # of the servers alone, one is enough
        assert [read_texts(remote, chunk, 1) for chunk in range(24)] == expected
        servers[1][0].kill()
        servers[1][0].wait(timeout=60)
        with pytest.raises(ConnectionError, match="none of 2 sources of the mixture answers"):
            remote.read(0, 1)


def test_sources_of_another_seed_or_other_weights_are_refused(mixture) -> None:
    with DocumentChunks(mixture) as first, DocumentChunks(mixture, seed=1) as two:
        sources = ReplicatedChunks([lambda: first, lambda: two])
        with pytest.raises(
            ValueError, match="source 2 of the mixture: has other documents, weights or another"
        ):
            for chunk in range(0, 64, first.at_once):
                sources.read(chunk, 1)
        other = mixture.with_name("other.yaml")
        other.write_text(mixture.read_text().replace("C: 1", "C: 2"))
        with DocumentChunks(other) as three:
            assert three.identity == first.identity
            assert three.order != first.order


def test_a_source_that_was_lost_is_tried_again(mixture, monkeypatch) -> None:
    from megatron.mixture.serve import replicas

    monkeypatch.setattr(replicas, "RETRY_S", 0.0)
    n_opened = [0]
    with DocumentChunks(mixture) as direct:

        class Flaky:
            """Fails at every second call."""

            def __init__(self, place: int) -> None:
                n_opened[place] += 1
                self.__dict__ |= {name: getattr(direct, name) for name in ("identity", "names", "chunk_size")}
                self.at_once, self.order, self.n_calls = 1, direct.order, 0

            def read(self, first: int, n: int) -> object:
                self.n_calls += 1
                if self.n_calls == 2:
                    raise ConnectionError("gone")
                return direct.read(first, n)

        several = ReplicatedChunks([lambda: Flaky(0), lambda: direct])
        for chunk in range(10):
            assert read_texts(several, chunk, 1) == read_texts(direct, chunk, 1)
    assert n_opened[0] >= 2


@pytest.fixture
def adaptive(mixture: Path) -> Path:
    mixture.write_text(mixture.read_text() + ADAPTIVE)
    return mixture


def test_a_follower_of_the_log_delivers_the_documents_of_the_owner_and_refuses_losses(adaptive) -> None:
    with DocumentChunks(adaptive, chunk_size=60, follow=True) as early:  # before the log exists
        with DocumentChunks(adaptive, chunk_size=60) as owner:
            with pytest.raises(ValueError, match=r"has locked this log. Follow it \(--follow\)"):
                DocumentChunks(adaptive, chunk_size=60)
            expected = []
            for chunk in range(30):
                expected.append(read_texts(owner, chunk, 1))
                owner.report(chunk, *losses(chunk))
            assert owner.settle(60)
            known_to = owner.distributor.weights.known_to
            with pytest.raises(ValueError, match="Report losses to the server without --follow"):
                early.report(0, *losses(0))
        with DocumentChunks(adaptive, chunk_size=60, follow=True) as late:
            for follower in (early, late):
                assert [read_texts(follower, chunk, 1) for chunk in range(30)] == expected
                assert follower.distributor.weights.known_to == known_to
                assert len({tuple(weights) for _, weights in follower.distributor.weights.entries}) > 4
                follower.learner.settle = lambda wait_s: False
                with pytest.raises(NotReadyError):
                    follower.read(known_to, 1)


def test_a_follower_reads_whole_lines_only_and_refuses_another_log(adaptive, tmp_path) -> None:
    with DocumentChunks(adaptive, chunk_size=60) as owner:
        owner.report(0, *losses(0))
        assert owner.settle(60)
    path = adaptive.with_suffix(".mixture") / "logs" / "main.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with DocumentChunks(adaptive, chunk_size=60, follow=True) as follower:
        assert follower.distributor.weights.known_to == 2
        path.write_bytes(content)
        assert follower.settle(0)
        assert follower.distributor.weights.known_to == 4
    with pytest.raises(ValueError, match="is the log of other documents or settings"):
        DocumentChunks(adaptive, chunk_size=60, seed=1, follow=True)
    DocumentChunks(adaptive, chunk_size=60).close()  # a follower takes no lock


def test_a_second_server_follows_the_log_of_the_first_one(adaptive, start) -> None:
    owner, owner_at = start(adaptive, "--port", 0)
    _, follower_at = start(adaptive, "--port", 0, "--follow")
    several = open_replicas([owner_at, follower_at], "code", patience_s=3)
    alone = open_replicas([follower_at], "code", patience_s=3)
    texts = []
    for chunk in range(8):
        texts.append(read_texts(several, chunk, 1))
        several.report(chunk, *losses(chunk))
    assert [read_texts(alone, chunk, 1) for chunk in range(8)] == texts
    with pytest.raises(ValueError, match="Report losses to the server without --follow"):
        alone.report(8, *losses(8))
    owner.kill()
    owner.wait(timeout=60)
    assert [read_texts(several, chunk, 1) for chunk in range(8)] == texts
