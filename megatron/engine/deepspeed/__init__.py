"""Engine of DeepSpeed."""
