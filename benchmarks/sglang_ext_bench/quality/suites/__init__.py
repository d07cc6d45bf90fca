"""Task suites that score lossy servers against full KV: long-context tasks after RULER, and GSM8K."""
