"""Compressed copies in SGLang's pool: how they are made, shared and read, and the queries that choose what they keep."""
