"""Offloading of full KV to the host: the feature of the worker, its provider, schedule, cost model and policy."""
