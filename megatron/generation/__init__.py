"""Text from autoregressive and masked-diffusion models."""
