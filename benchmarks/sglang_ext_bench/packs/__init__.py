"""The command pack-cycles: AsyncSpade's Table 2, cycles of a pack of layers at a cache rank."""
