"""What writes the copies of contexts that are drafted on: of the tokens that each KV head keeps K and V (gather_kept.py), those of heads that
keep different numbers of them one after the other (scatter_cells.py), or pointers to where they lie (write_pointers.py).
"""
