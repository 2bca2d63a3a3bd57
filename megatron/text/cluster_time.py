"""Time that a cluster takes to tokenise a corpus: a model of few measured and few assumed numbers."""

from dataclasses import dataclass
from math import ceil

TOKEN_BYTES = 2  # uint16, for a vocabulary below 65,500


@dataclass(frozen=True)
class CorpusSize:
    """Size of a corpus.

    text_gb     of JSON lines, uncompressed
    stored_gb   of the files that are read, compressed
    tokens_b    10^9 tokens
    """

    text_gb: float
    stored_gb: float
    tokens_b: float


@dataclass(frozen=True)
class ClusterSize:
    """Nodes, their cores, and the GB/s that one node reads and writes together on the shared file system.

    efficiency   share of the rate of one core alone that each of all cores reaches; above 0 and at most 1
    """

    nodes: int
    cores: int
    node_gb_s: float = 1.0
    efficiency: float = 0.7


@dataclass(frozen=True)
class PreparationTime:
    """Hours of each stage. Encoding, reading and writing overlap; a copy of the joined parts follows."""

    encode_h: float
    transfer_h: float
    join_h: float

    @property
    def total_h(self) -> float:
        """Hours from the first byte read to the last byte written."""
        return max(self.encode_h, self.transfer_h) + self.join_h

    def __str__(self) -> str:
        minutes = [60 * h for h in (self.encode_h, self.transfer_h, self.join_h, self.total_h)]
        return "encoding {:.1f} min, reading and writing {:.1f}, joining {:.1f}: {:.1f}".format(*minutes)


def estimate_preparation(
    corpus: CorpusSize, cluster: ClusterSize, mb_per_cpu_s: float, n_tasks: int = 0, copy: bool = False
) -> PreparationTime:
    """Estimate the time of all stages after the download.

    mb_per_cpu_s   MB of JSON lines that one core encodes in a second, with reading and decompression
    n_tasks        tasks of one core and of equal size; 0: enough to share the work evenly
    copy           the parts are copied to one file on one node, instead of a list of parts

    encode = text / (nodes x cores x rate x efficiency), times ceil(tasks / cores) / (tasks / cores) for whole
    rounds of tasks. transfer = (stored + tokens) / (nodes x GB/s). join = 2 x tokens / GB/s of one node.

    Raises ValueError for a number that is not above 0, and for an efficiency above 1.
    """
    numbers = {
        "text_gb": corpus.text_gb, "stored_gb": corpus.stored_gb, "tokens_b": corpus.tokens_b,
        "nodes": cluster.nodes, "cores": cluster.cores, "node_gb_s": cluster.node_gb_s,
        "efficiency": cluster.efficiency, "mb_per_cpu_s": mb_per_cpu_s,
    }  # fmt: skip
    for name, value in numbers.items():
        if not value > 0 or (name == "efficiency" and value > 1):
            raise ValueError(
                f"{name}: got {value}, expected above 0{' to 1' if name == 'efficiency' else ''}"
            )
    n_cores = cluster.nodes * cluster.cores
    # 1,024 tasks on 128 cores take 8 full rounds; 130 tasks take 2, and the second one uses 2 cores
    unevenness = ceil(n_tasks / n_cores) / (n_tasks / n_cores) if n_tasks else 1.0
    encode_s = corpus.text_gb * 1000 / (n_cores * mb_per_cpu_s * cluster.efficiency) * unevenness
    token_gb = corpus.tokens_b * TOKEN_BYTES
    transfer_s = (corpus.stored_gb + token_gb) / (cluster.nodes * cluster.node_gb_s)
    join_s = 2 * token_gb / cluster.node_gb_s if copy else 0.0
    return PreparationTime(encode_s / 3600, transfer_s / 3600, join_s / 3600)


def estimate_text_per_hour(corpus: CorpusSize, cluster: ClusterSize, mb_per_cpu_s: float) -> float:
    """Return the TB of JSON lines that a cluster encodes in an hour, for a corpus of these proportions."""
    return corpus.text_gb / 1000 / estimate_preparation(corpus, cluster, mb_per_cpu_s).total_h
