"""Times attention of one layer over full and compressed KV."""
