"""Methods of the literature that choose tokens for each step, a file each; compared with spade.py."""
