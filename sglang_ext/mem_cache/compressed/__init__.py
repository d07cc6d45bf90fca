"""Compressed KV in SGLang's pool: how it is made, shared and read, and the queries that select its tokens."""
