"""What options of commands choose from, where the code behind the choice is slow to import."""

METHODS = ("ar", "mc")  # of scoring: exact, token after token; the bound of masked diffusion
WINDOWS = ("corpus", "document")  # of held-out text: across the ends of documents; each document alone
ORDERS = ("confidence", "random", "left_to_right")  # in which masked diffusion settles hidden positions
OBJECTIVES = ("autoregressive", "masked_diffusion")
TARGETS = ("native", "huggingface", "llama2c", "full", "sharded")  # of a conversion
TARGET_DTYPES = ("float32", "bfloat16", "float16")  # of huggingface's
DEVICES = ("cpu", "cuda")
