"""Warning about sequences longer than a model was trained on."""

from megatron.checkpoint.model_weights import Weights


def check_trained_length(weights: Weights, n_positions: int, key: str) -> list[str]:
    """Return a list with a warning, which begins with `key`, if n_positions exceeds the trained length."""
    if weights.seq_len is None or n_positions <= weights.seq_len:
        return []
    return [
        f"{key}: got {n_positions:,} positions, {weights.source} was trained on {weights.seq_len:,}. "
        "Results at later positions do not measure the model. Use fewer positions."
    ]
