"""What was measured, in tables, plots and a file."""
