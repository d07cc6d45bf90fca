"""Packed prompts that wait in host memory at the prefill server, where no decode server has room (HACK, section 6).

SGLang computes prompts ahead of their decode side (``--optimistic-prefill-attempts``), and keeps their full KV until that has slots. A
prompt that will travel as codes is packed as soon as it is computed, and its full KV may go.
"""

from dataclasses import dataclass, field

# Bytes of all that wait at one rank, above which no more is packed ahead: full KV stays in the pool then.
MOST_WAITING = 4 << 30


@dataclass
class PackedPromptStore:
    """Those of one rank. Of the scheduler's thread.

    Attributes:
        most: bytes at which it takes no more.
        held: bytes of all pages.
    """

    most: int = MOST_WAITING
    held: int = 0
    _pages: dict[object, tuple[tuple[int, int], tuple[memoryview, ...]]] = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        """Whether another prompt may wait here."""
        return self.held < self.most

    def __contains__(self, owner: object) -> bool:
        return owner in self._pages

    def put(self, owner: object, coded: tuple[int, int], pages: tuple[memoryview, ...]) -> None:
        """Keep the pages of a prompt whose tokens from ``coded[0]`` to ``coded[1]`` are packed."""
        self._pages[owner] = coded, pages
        self.held += sum(map(len, pages))

    def coded(self, owner: object) -> tuple[int, int] | None:
        """Which tokens of an owner's prompt are packed; None where none waits."""
        return self._pages[owner][0] if owner in self._pages else None

    def take(self, owner: object) -> tuple[memoryview, ...]:
        """An owner's pages, which are kept no longer; none where none wait."""
        _, pages = self._pages.pop(owner, ((0, 0), ()))
        self.held -= sum(map(len, pages))
        return pages
