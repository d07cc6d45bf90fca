"""Tables of the results pages, generated from the JSON files in ``benchmarks/results``."""
