"""Mix documents by their properties, on one machine and without a server.

    python examples_scaling/mixture/local.py redpajama_sample/derived_slimpajama_schema.jsonl.gz work

Registers the file, mixes C4, GitHub and StackExchange 5 : 3 : 2, reads chunks as two data-parallel groups,
and resumes from a saved state with one group.
"""

import sys
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

from torch.utils.data import DataLoader

from megatron.mixture.catalog import Catalog
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.loaders import MixtureDataset
from megatron.mixture.properties import read_properties

MIXTURE = """\
catalog: catalog
where: "length(source) > 0"
by: [source]
weights: {RedPajamaC4: 5, RedPajamaGithub: 3, RedPajamaStackExchange: 2}
count: documents
dry: repeat
"""


def main(text: str, folder: str) -> None:
    """Register, mix, read, stop, resume."""
    work = Path(folder)
    with Catalog(work / "catalog") as catalog:
        done = catalog.register("slim", [text], read_properties([], preset="slimpajama"))
    print(f"registered {done.n_documents:,} documents, {done.n_broken} broken lines")
    (work / "mixture.yaml").write_text(MIXTURE)
    open_chunks = partial(DocumentChunks, work / "mixture.yaml", seed=1)
    with open_chunks() as source:
        names = source.names
    state = {}
    for group in (0, 1):  # on a cluster: the data-parallel rank
        dataset = MixtureDataset(open_chunks, group, n_groups=2)
        for chunk in islice(DataLoader(dataset, batch_size=None), 3):
            shares = {names[k]: f"{n / len(chunk.domains):.3f}" for k, n in Counter(chunk.domains).items()}
            print(f"group {group} chunk {chunk.number}: {dict(sorted(shares.items()))}")
            state = dataset.state_dict(chunk)  # store it in the checkpoint after training on the chunk

    alone = MixtureDataset(open_chunks)
    alone.load_state_dict(state)
    print(f"one group resumes with chunk {next(iter(alone)).number}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
