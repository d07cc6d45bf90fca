"""What select_tokens.py launches, one after the other; and Quest's choice of pages, which attention launches (quest_pages.py).

exact_logits.py leaves the logits of queries with keys as the pool has them (quantized_keys/quantized_logits.py with keys of few bits), and what
each chunk of a context needs for their normalizers. token_marks.py has the kernels that make scores of them, mark the highest, and write down
what is marked.
"""
