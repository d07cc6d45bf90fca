"""Kernels that pack tokens in few bits, and attend to them; those in Gluon are in gluon/."""
