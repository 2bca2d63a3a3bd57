"""What is to be said where a model reads more positions than it was trained on."""

from megatron.checkpoint.weights import Weights


def warn_past_trained(weights: Weights, n_positions: int, key: str) -> list[str]:
    """Return a warning, which begins with `key`, for more positions than the model was trained on."""
    if weights.seq_len is None or n_positions <= weights.seq_len:
        return []
    return [
        f"{key}: got {n_positions:,} positions, {weights.source} was trained on {weights.seq_len:,}. "
        "What it gives for later positions is no measure of the model; use fewer."
    ]
