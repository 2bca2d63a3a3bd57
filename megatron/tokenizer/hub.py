"""Whether the Hugging Face hub answers: asked once, where its own libraries try for half a minute."""

import os
import urllib.error
import urllib.request


def why_hub_is_silent(timeout_s: float = 10.0) -> str | None:
    """None where the hub (or $HF_ENDPOINT) answers, else the reason in a few words."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "on", "yes", "true"):
        return "HF_HUB_OFFLINE is set"
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=timeout_s):
            return None
    except urllib.error.HTTPError:
        return None  # an answer, if not a friendly one
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"{address}: {getattr(reason, 'strerror', None) or reason}"
