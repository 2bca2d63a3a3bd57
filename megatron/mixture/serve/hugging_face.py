"""Documents of a mixture as a Hugging Face `datasets.IterableDataset`."""

from collections.abc import Iterator
from copy import copy
from functools import cache
from typing import Any

from megatron.mixture.serve.client import MixtureDataset

COLUMN_NAMES: dict[type, str] = {str: "text", dict: "sample"}  # column by type of the document; default: ids


def hugging_face(dataset: MixtureDataset) -> Any:
    """Return the documents of one data-parallel group as a `datasets.IterableDataset`, in their order.

    Columns: text, ids or (of tar archives) sample; domain (its name); chunk (its number). Its `state_dict` is
    a position, from which it resumes without replaying documents. A state saved at the end of a chunk resumes
    on any number of groups. In a DataLoader the first worker reads and the others idle, so that the order is
    that of one process. `shuffle` shuffles the buffer of `datasets` only.
    """
    import datasets

    return datasets.IterableDataset(_make_examples_class()(dataset))


class DocumentExamples:
    """Documents of a mixture as one shard for `datasets`.

    `_make_examples_class` adds the base class.
    """

    num_shards = 1
    sleep_on_threads_shutdown = False
    _state_dict: dict[str, Any] | None

    def __init__(self, dataset: MixtureDataset) -> None:
        super().__init__()
        self.dataset = dataset

    def __reduce__(self) -> tuple[Any, ...]:
        # the class is made at run time, so that pickle cannot find it by name
        return _restore_examples, (self.dataset, self._state_dict)

    def _init_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "next_chunk": self.dataset.next_chunk,
            "document": 0,
            "n_groups": self.dataset.n_groups,
            "identity": self.dataset.identity,
            "type": type(self).__name__,
        }
        self._state_dict = state
        return state

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        state = self._state_dict or self._init_state_dict()
        # load_state_dict must not move the dataset of the caller
        dataset = copy(self.dataset)
        if state["n_groups"] != dataset.n_groups and state["document"]:
            raise ValueError(
                f"state: saved inside a chunk by {state['n_groups']} groups, got {dataset.n_groups} groups. "
                "Save at the end of a chunk, or resume with as many groups."
            )
        state["n_groups"] = dataset.n_groups
        dataset.load_state_dict({"next_chunk": state["next_chunk"], "identity": state["identity"]})
        source = dataset.open_source()
        for chunk in dataset.iter_chunks(source=source):
            key = COLUMN_NAMES.get(type(chunk.documents[0]), "ids")
            state["identity"] = chunk.identity
            rows = list(zip(chunk.documents, chunk.domains, strict=True))
            # above 0 in the first chunk after a resume only
            for index in range(state["document"], len(rows)):
                last = index + 1 == len(rows)
                # the state is set before the row is yielded, because the consumer may save it while it has
                # the row
                state["document"] = 0 if last else index + 1
                if last:
                    # next_chunk: the first one of the next round of all groups, from which any number of
                    # groups can resume
                    state |= dataset.state_dict(chunk)
                document, domain = rows[index]
                row = {key: document, "domain": source.names[domain], "chunk": chunk.number}
                yield f"{chunk.number}-{index}", row

    def shuffle_data_sources(self, generator: Any) -> "DocumentExamples":
        """Return self: the mixture has shuffled the documents within domains already."""
        return self

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "DocumentExamples":
        """Return self, the only shard."""
        return self

    def reshard_data_sources(self) -> "DocumentExamples":
        """Return self."""
        return self


@cache
def _make_examples_class() -> type:
    """Return `DocumentExamples` with the base class that `datasets` requires.

    It is created on first use, because the import takes seconds.
    """
    from datasets.iterable_dataset import _BaseExamplesIterable

    return type("Documents", (DocumentExamples, _BaseExamplesIterable), {})


def _restore_examples(dataset: MixtureDataset, state: dict[str, Any] | None) -> Any:
    examples = _make_examples_class()(dataset)
    examples._state_dict = state
    return examples
