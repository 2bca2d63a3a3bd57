"""Published tokenised subsets of C4 on the Hugging Face hub: .bin/.idx datasets, checked by their counts.

Prabhudesai et al. (arXiv 2507.15857) published their 100 million tokens and validation set as datasets of
GPT-2's tokenizer, and other subsets as text. utils/epoch_tokens.yaml has the tokens of one epoch of each.
"""

import hashlib
import re
from pathlib import Path

from megatron.config.presets import load_epoch_tokens
from megatron.io import write_json
from megatron.text.hub import HubRepository

QUICKSTART_REPO = "ZahlenReal/diffusion_data_constraint_quickstart"
SUBSETS_REPO = "ZahlenReal/diffusion_data_constraint_c4subsets"
VALIDATION = "validation"
# datasets whose names do not contain that of the subset
KNOWN_PREFIXES = {"100M": "gpt2tok_c4_100_text_document", VALIDATION: "gpt2tok_c4_val_text_document"}
TOKENIZER = "gpt2"


def locate_subset(name: str, repo: str | None, prefix: str | None) -> tuple[str, str | None]:
    """Return the repository and the prefix of a subset; a prefix of None is searched in the repository."""
    if repo is None and prefix is None and name in KNOWN_PREFIXES:
        return QUICKSTART_REPO, KNOWN_PREFIXES[name]
    return repo or SUBSETS_REPO, prefix


def fetch_subset(repository: HubRepository, name: str, prefix: str | None, folder: Path) -> tuple[Path, int]:
    """Download a dataset and write its sidecar; return its local prefix and its tokens.

    The index arrives first. If it does not list the tokens of the subset, it is deleted and ValueError is
    raised, before the tokens are downloaded. Raises FileNotFoundError if the repository has no such dataset.
    """
    from megatron.data.indexed import IndexedTokens, count_index_tokens  # numpy and the C++ helper
    from megatron.text.merge_inputs import detect_eod
    from megatron.tokenizer.kinds import load_tokenizer

    remote = prefix or _find_prefix(repository, name)
    local = folder / remote
    index = repository.fetch(f"{remote}.idx", folder)
    n_tokens = count_index_tokens(index)
    expected = load_epoch_tokens().get(name)  # None: the validation set, whose count is not published
    if expected is not None and n_tokens != expected:
        index.unlink()
        raise ValueError(
            f"{repository.repo}/{remote}.idx: got {n_tokens:,} tokens, expected {expected:,} of {name} as in "
            "utils/epoch_tokens.yaml. Give its own dataset with --prefix."
        )
    repository.fetch(f"{remote}.bin", folder)
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
        "sha256": {part: _check_sha256(repository, f"{remote}.{part}", folder) for part in ("bin", "idx")},
        "sources": [{"hub": repository.repo, "commit": repository.commit, "path": remote}],
    }  # fmt: skip
    if ends is not None:
        about["append_eod"] = ends.eod_id is not None
    # last: a dataset without sidecar is one whose download was interrupted
    write_json(Path(f"{local}.json"), about)
    return local, n_tokens


def _find_prefix(repository: HubRepository, name: str) -> str:
    """Return the only .idx file with the subset's name in its own, without the suffix."""
    # c4_7B6_text_document is 7B6; c4_7B6_2ep_text_document is 7B6_2ep and not 7B6
    word = re.compile(rf"(?<![0-9a-z]){re.escape(name)}(?![0-9a-z]|_[0-9]+ep)", re.IGNORECASE)
    paths = [file.path for file in repository.list_files("*")]
    candidates = [path for path in paths if path.endswith(".idx") and word.search(path)]
    if len(candidates) != 1:
        raise FileNotFoundError(
            f"{repository.repo}: got {len(candidates)} .bin/.idx datasets of {name} among "
            f"{', '.join(paths[:20])}, expected one. Give --prefix, or tokenize text from "
            "`download_assets.py c4 --repo REPO --files PATTERN`."
        )
    return candidates[0].removesuffix(".idx")


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
