"""Scores of documents' tokens that were computed ahead: files, found by the tokens that a prompt begins with."""
