"""What slots of a copy may hold besides plain tokens: packed blocks, cells of uneven heads, pointers."""
