"""The plugin's hooks in SGLang: their tables (table.py, transfer_table.py), their checks and application (activation.py), and the hooks."""
