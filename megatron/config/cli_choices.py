"""Choices of command-line options whose implementations are slow to import."""

# scoring: ar, exact, token by token; mc, Monte Carlo estimate of the
# bound of masked diffusion
METHODS = ("ar", "mc")
# held-out text: corpus, windows across
# documents; document, each document alone
WINDOWS = ("corpus", "document")
ORDERS = ("confidence", "random", "left_to_right")  # in which masked diffusion reveals hidden positions
# formats that checkpoints are converted to
TARGETS = ("native", "huggingface", "megatron", "full", "sharded")
TARGET_DTYPES = ("float32", "bfloat16", "float16")  # for --to huggingface
DEVICES = ("cpu", "cuda")
SCORING_DTYPES = ("float32", "bfloat16")
