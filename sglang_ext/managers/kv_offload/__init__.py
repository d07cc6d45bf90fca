"""Offloading of full KV to the host: the feature of the worker, load reservations, the cost model and the policy."""
