"""Commands that time single kernels and layers without a server."""
