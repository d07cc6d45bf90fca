"""The prefix tree. Its nodes hold full KV on the device and on the host, and compressed segments."""
