"""Where KV lies: compressed views, the queries that score them, the prefix tree."""
