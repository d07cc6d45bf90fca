"""Results of a quality run: tables, plots and JSON."""
