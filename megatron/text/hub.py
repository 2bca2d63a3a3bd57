"""Models of the Hugging Face hub by their name, through `huggingface_hub`.

Weights are safetensors only: loading a pickle executes code in it.
"""

import os
import re
from pathlib import Path

# files of a model: configuration, weights, tokenizer
MODEL_FILES = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json",
    "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
# owner/name@revision; owner and revision are optional.
# No part begins with a dot, so none is "..".
HUB_NAME = re.compile(r"((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(\w[\w.-]*))?", re.ASCII)


def parse_hub_name(text: str) -> tuple[str, str] | None:
    """Return (repository, revision) of NAME, OWNER/NAME or either with @REVISION; None for other text.

    A path below an existing folder is not a name of the hub.
    """
    match = HUB_NAME.fullmatch(text)
    if match is None or ("/" in match[1] and Path(match[1]).parts[0] and Path(match[1]).parent.is_dir()):
        return None
    return match[1], match[2] or "main"


def open_hub_model(name: str) -> Path:
    """Return the folder of a model of the hub in the hub's cache; missing files are downloaded into it.

    Without a network the files of the cache are used. Several ranks may call this at the same time. Raises
    FileNotFoundError if the model is neither there nor on the hub, OSError for a full disk.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its HTTP library's, of any name

    parsed = parse_hub_name(name)
    if parsed is None:
        raise FileNotFoundError(f"{name}: got neither a file or folder nor a name of the hub")
    repo, revision = parsed
    try:
        # the library reads these variables once, when it is imported
        endpoint, cache = os.environ.get("HF_ENDPOINT"), os.environ.get("HF_HUB_CACHE")
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=[*MODEL_FILES], endpoint=endpoint, cache_dir=cache
        )
        return Path(folder)
    except (OSError, HTTPError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{name}: no file or folder of this name, and no model of the hub ({reason}). Check the name, "
            "the network, and HF_TOKEN for a private model."
        ) from error
