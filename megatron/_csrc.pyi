"""Types of the extension in csrc/. What its functions compute is described there, and in their docstrings."""

from typing import Any, final

import numpy as np

@final
class TokenizerModel:
    def __init__(self, content: bytes) -> None: ...
    def __len__(self) -> int: ...
    @property
    def largest_id(self) -> int: ...
    @property
    def settings(self) -> str: ...
    def find(self, piece: str) -> int | None: ...
    def single_characters(self) -> list[str]: ...
    def vocab_json(self) -> bytes: ...
    def merges_json(self) -> bytes: ...
    def merge_ids(self) -> np.ndarray: ...

@final
class BpeVocabulary:
    def use_gpt2_pattern(self, classes: np.ndarray) -> None: ...
    def add_stage(self, classes: np.ndarray, transitions: np.ndarray, drops_gaps: bool) -> None: ...
    def set_added_tokens(
        self, first: list[tuple[Any, ...]], after: list[tuple[Any, ...]], kinds: np.ndarray
    ) -> None: ...
    def set_combining(self, ranks: np.ndarray) -> None: ...
    def set_whole_words(self, model: TokenizerModel, letters: np.ndarray) -> None: ...

@final
class BpeWorker:
    def __init__(self, vocabulary: BpeVocabulary) -> None: ...

# tokenizer
def bpe_vocabulary(byte_ids: np.ndarray, merges: np.ndarray) -> BpeVocabulary: ...
def character_vocabulary(
    model: TokenizerModel, prefix: str, splits_words: bool, normalizes: bool
) -> BpeVocabulary: ...
def release_memory() -> None: ...
def ranked_merge_ids(pieces: str, merges: str) -> np.ndarray: ...
def encode_lines(
    worker: BpeWorker, input: int, begin: int, end: int,
    key: str, special: bool, eod: int, wide: bool, ids_out: int, lengths_out: int,
) -> tuple[int, int, int, int, bool]: ...  # fmt: skip
def encode_buffer(
    worker: BpeWorker, lines: bytes | memoryview,
    key: str, special: bool, eod: int, wide: bool, ids_out: int, lengths_out: int,
) -> tuple[int, int, int, int, bool]: ...  # fmt: skip
def encode_texts(
    worker: BpeWorker,
    texts: np.ndarray,
    ends: np.ndarray,
    special: bool,
    eod: int,
    is_normalized: bool = False,
) -> tuple[np.ndarray, np.ndarray]: ...

# datasets and the order of samples
def check_index(
    file: int, at: int, n_sequences: int, n_documents: int, itemsize: int
) -> tuple[int, int, bool, bool]: ...
def map_file(path: str, n_bytes: int) -> np.ndarray: ...
def sample_starts(lengths: np.ndarray, order: np.ndarray, stride: int, n_rows: int) -> np.ndarray: ...
def shuffled(
    key: np.ndarray, pos: int, parts: np.ndarray, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, int]: ...

# mixtures
def domain_units(
    domain: np.ndarray, number: np.ndarray, length: np.ndarray, seed: np.ndarray
) -> np.ndarray: ...
def mixture_turns(
    parts: np.ndarray, done: np.ndarray, lag: np.ndarray, limit: np.ndarray,
    size: int, first_chunk: int, n_chunks: int, seed: int, until_empty: bool = False,
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...  # fmt: skip
def read_spans(descriptor: int, begins: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, int, int]: ...

# kernels
def softmax_nll(logits: np.ndarray, targets: np.ndarray, n_threads: int) -> np.ndarray: ...
def softmax_nll_gradient(
    logits: np.ndarray, targets: np.ndarray, scale: np.ndarray | None, n_threads: int
) -> np.ndarray: ...
def rms_norm(
    x: np.ndarray, gain: np.ndarray, eps: float, out: np.ndarray, inverse: np.ndarray, n_threads: int
) -> None: ...
def rms_norm_backward(
    x: np.ndarray, gain: np.ndarray, inverse: np.ndarray,
    grad: np.ndarray, grad_x: np.ndarray, grad_gain: np.ndarray, n_threads: int,
) -> None: ...  # fmt: skip
def short_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray,
    causal: bool, scale: float, out: np.ndarray, n_threads: int,
) -> None: ...  # fmt: skip
def short_attention_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, grad: np.ndarray, causal: bool, scale: float,
    grad_q: np.ndarray, grad_k: np.ndarray, grad_v: np.ndarray, n_threads: int,
) -> None: ...  # fmt: skip
