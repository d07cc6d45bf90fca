"""Commands that prepare files for servers."""
