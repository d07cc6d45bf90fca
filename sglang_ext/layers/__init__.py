"""Forwards of the model, attention over full and compressed KV, and kernels."""
