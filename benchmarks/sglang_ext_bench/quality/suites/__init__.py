"""Task suites that score lossy servers against full KV: generated long-context tasks as in RULER, and GSM8K."""
