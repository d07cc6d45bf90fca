"""A pack of layers at a cache rank: its cycle beside the inference that hides it (AsyncSpade, Table 2)."""
