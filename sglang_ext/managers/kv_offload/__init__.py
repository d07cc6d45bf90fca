"""Offloading of full KV to the host: load reservations, the cost model and the policy."""
