"""Anchor and residual of KV (Lynx): the most significant bits of a number, and the rest."""
