"""Published tokenised subsets of C4 on the Hugging Face hub: .bin/.idx datasets, checked by their counts.

Prabhudesai et al. (arXiv 2507.15857) published their 100 million tokens and validation set as datasets of
GPT-2's tokenizer, and other subsets as text. utils/epoch_tokens.yaml has the tokens of one epoch of each.
"""

import hashlib
import re
from pathlib import Path

from megatron.config.presets import load_epoch_tokens
from megatron.io import write_json
from megatron.text.hub_download import HubFile, HubRepository

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
    (index,) = repository.list_files(f"{remote}.idx")
    (tokens,) = repository.list_files(f"{remote}.bin")
    local = folder / Path(remote).name
    index_path, tokens_path = Path(f"{local}.idx"), Path(f"{local}.bin")
    _fetch_missing(repository, index, index_path)
    n_tokens = count_index_tokens(index_path)
    expected = load_epoch_tokens().get(name)  # None: the validation set, whose count is not published
    if expected is not None and n_tokens != expected:
        index_path.unlink()
        raise ValueError(
            f"{repository.repo}/{index.path}: got {n_tokens:,} tokens, expected {expected:,} of {name} as in "
            "utils/epoch_tokens.yaml. Give its own dataset with --prefix."
        )
    _fetch_missing(repository, tokens, tokens_path)
    tokenizer = load_tokenizer(TOKENIZER)
    ends = detect_eod(IndexedTokens(local), tokenizer.eod_id)
    about = {
        "dtype": IndexedTokens(local).dtype.name,
        "documents": IndexedTokens(local).n_documents,
        "tokens": n_tokens,
        "tokenizer": {
            "name": TOKENIZER, "sha256": tokenizer.sha256,
            "n_tokens": tokenizer.n_tokens, "eod_id": tokenizer.eod_id,
        },
        "sha256": {"bin": _hash_file(tokens, tokens_path), "idx": _hash_file(index, index_path)},
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
    files = repository.list_files("*")
    candidates = [file.path for file in files if file.path.endswith(".idx") and word.search(file.path)]
    if len(candidates) != 1:
        names = ", ".join(file.path for file in files[:20])
        raise FileNotFoundError(
            f"{repository.repo}: got {len(candidates)} .bin/.idx datasets of {name} among {names}, expected "
            "one. Give --prefix, or tokenize text from `download_assets.py c4 --repo REPO --files PATTERN`."
        )
    return candidates[0].removesuffix(".idx")


def _fetch_missing(repository: HubRepository, file: HubFile, target: Path) -> None:
    if not target.is_file() or target.stat().st_size != file.n_bytes:
        repository.fetch(file, target)


def _hash_file(file: HubFile, path: Path) -> str:
    """Return the sha256 that the hub lists and `fetch` has verified, or that of a file too small for one."""
    if file.sha256 is not None:
        return file.sha256
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
