"""Published tokenised subsets of C4 on the Hugging Face hub: .bin/.idx datasets, checked by their counts.

Prabhudesai et al. (arXiv 2507.15857) published their 100 million tokens and
validation set as datasets of GPT-2's tokenizer, and other subsets as text.
utils/epoch_tokens.yaml has the tokens of one epoch of each.
"""

import hashlib
from pathlib import Path

from megatron.config.presets import load_epoch_tokens
from megatron.io import write_json
from megatron.text.hub import HubRepository

QUICKSTART_REPO = "ZahlenReal/diffusion_data_constraint_quickstart"
SUBSETS_REPO = "ZahlenReal/diffusion_data_constraint_c4subsets"
VALIDATION = "validation"
# published as datasets; the other subsets are text
KNOWN_PREFIXES = {"100M": "gpt2tok_c4_100_text_document", VALIDATION: "gpt2tok_c4_val_text_document"}
TOKENIZER = "gpt2"


def locate_subset(name: str, repo: str | None, prefix: str | None) -> tuple[str, str]:
    """Return the repository and the prefix of a subset.

    Raises ValueError for one that is published as text.
    """
    if prefix is not None:
        return repo or SUBSETS_REPO, prefix
    if repo is None and name in KNOWN_PREFIXES:
        return QUICKSTART_REPO, KNOWN_PREFIXES[name]
    raise ValueError(
        f"{name}: published as text. Tokenize text from `download_assets.py c4 --repo {repo or SUBSETS_REPO} "
        "--files PATTERN`, or give the prefix of a dataset with --prefix."
    )


def fetch_subset(repository: HubRepository, name: str, prefix: str, folder: Path) -> tuple[Path, int]:
    """Download a dataset and write its sidecar; return its local prefix and its tokens.

    The index arrives first. If it does not list the tokens of the subset, it is
    deleted and ValueError is raised, before the tokens are downloaded. Raises
    FileNotFoundError if the repository has no such dataset.
    """
    from megatron.data.indexed import IndexedTokens, count_index_tokens  # numpy and the C++ helper
    from megatron.text.merge_inputs import detect_eod
    from megatron.tokenizer.kinds import load_tokenizer

    local = folder / prefix
    index = repository.fetch(f"{prefix}.idx", folder)
    n_tokens = count_index_tokens(index)
    expected = load_epoch_tokens().get(name)  # None: the validation set, whose count is not published
    if expected is not None and n_tokens != expected:
        index.unlink()
        raise ValueError(
            f"{repository.repo}/{prefix}.idx: got {n_tokens:,} tokens, expected {expected:,} of {name} as in "
            "utils/epoch_tokens.yaml. Give its own dataset with --prefix."
        )
    repository.fetch(f"{prefix}.bin", folder)
    tokenizer, dataset = load_tokenizer(TOKENIZER), IndexedTokens(local)
    ends = detect_eod(dataset, tokenizer.eod_id)
    about = {
        "dtype": dataset.dtype.name,
        "documents": dataset.n_documents,
        "tokens": n_tokens,
        "tokenizer": {
            "name": TOKENIZER, "sha256": tokenizer.sha256,
            "n_tokens": tokenizer.n_tokens, "eod_id": tokenizer.eod_id,
        },
        "sha256": {part: _check_sha256(repository, f"{prefix}.{part}", folder) for part in ("bin", "idx")},
        "sources": [{"hub": repository.repo, "commit": repository.commit, "path": prefix}],
    }  # fmt: skip
    if ends is not None:
        about["append_eod"] = ends.eod_id is not None
    # last: a dataset without sidecar is one whose download was interrupted
    write_json(Path(f"{local}.json"), about)
    return local, n_tokens


def _check_sha256(repository: HubRepository, path: str, folder: Path) -> str:
    """Return the sha256 of a downloaded file. Delete it and raise ValueError if the hub lists another."""
    with (folder / path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    (listed,) = repository.list_files(path)
    if listed.lfs is not None and listed.lfs.sha256 != digest:  # small files are listed without one
        (folder / path).unlink()
        raise ValueError(
            f"{repository.repo}/{path}: got another sha256 than the hub lists. Download it again."
        )
    return digest
