"""A folder that a method reads, which a flag names."""

from typing import NamedTuple


class Folder(NamedTuple):
    """What is to be said where it lacks, or where nobody reads it.

    Attributes:
        flag: that names it.
        why: the method needs it.
        maker: the module that writes it, and its arguments.
    """

    flag: str
    why: str
    maker: str
