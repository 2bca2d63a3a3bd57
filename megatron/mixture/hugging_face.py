"""Documents of a mixture as a Hugging Face `datasets.IterableDataset`."""

from collections.abc import Iterator
from copy import copy
from functools import cache
from typing import Any

from megatron.mixture.client import MixtureDataset

COLUMN = {str: "text", dict: "sample"}  # else ids


def hugging_face(dataset: MixtureDataset) -> Any:
    """A `datasets.IterableDataset` of the documents of one data-parallel group, in the mixture's order.

    Rows: text, ids or (of tars) sample, domain (its name), chunk (its number). Its `state_dict` is a place,
    and it goes on from there at once; saved at the end of a chunk, on any number of groups. A DataLoader's
    first worker reads, the others idle: the order is that of one process. `shuffle` shuffles its buffer and
    no more.
    """
    import datasets

    return datasets.IterableDataset(_examples()(dataset))


class Documents:
    """What `datasets` iterates over: documents of a mixture, one shard. `_examples` adds the base class."""

    num_shards = 1
    sleep_on_threads_shutdown = False

    def __init__(self, dataset: MixtureDataset) -> None:
        super().__init__()
        self.dataset = dataset

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.dataset, self._state_dict)

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict = {
            "next_chunk": self.dataset.next_chunk,
            "document": 0,
            "n_groups": self.dataset.n_groups,
            "identity": self.dataset.identity,
            "type": type(self).__name__,
        }
        return self._state_dict

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        state = self._state_dict or self._init_state_dict()
        one = copy(self.dataset)
        if state["n_groups"] != one.n_groups and state["document"]:
            raise ValueError(
                f"state: was saved inside a chunk by {state['n_groups']} groups, {one.n_groups} go on; "
                "save at the end of a chunk, or go on with as many"
            )
        state["n_groups"] = one.n_groups
        one.load_state_dict({"next_chunk": state["next_chunk"], "identity": state["identity"]})
        source = one.open_source()
        for chunk in one.chunks(source=source):
            key = COLUMN.get(type(chunk.documents[0]), "ids")
            state["identity"] = chunk.identity
            rows = list(zip(chunk.documents, chunk.domains, strict=True))
            for place in range(state["document"], len(rows)):
                last = place + 1 == len(rows)
                state["document"] = 0 if last else place + 1
                if last:
                    state |= one.state_dict(chunk)
                document, domain = rows[place]
                told = {key: document, "domain": source.names[domain], "chunk": chunk.number}
                yield f"{chunk.number}-{place}", told

    def shuffle_data_sources(self, generator: Any) -> "Documents":
        """The order within domains is the mixture's already."""
        return self

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "Documents":
        """The one shard there is."""
        return self

    def reshard_data_sources(self) -> "Documents":
        """As it is."""
        return self


@cache
def _examples() -> type:
    """`Documents` as the class that `datasets` wants; made late, for that import takes seconds."""
    from datasets.iterable_dataset import _BaseExamplesIterable

    return type("Documents", (Documents, _BaseExamplesIterable), {})


def _restored(dataset: MixtureDataset, state: dict[str, Any] | None) -> Any:
    made = _examples()(dataset)
    made._state_dict = state
    return made
