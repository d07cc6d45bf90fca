"""Precomputed scores of documents' tokens, stored in files and found by the tokens that a prompt begins with."""
