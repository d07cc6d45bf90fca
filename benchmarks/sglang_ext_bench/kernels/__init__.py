"""Single kernels and layers, without a server."""
