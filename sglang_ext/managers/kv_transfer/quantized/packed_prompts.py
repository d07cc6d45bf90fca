"""Packed prompts that wait in host memory of the prefill server until a decode server has slots (HACK, section 6).

SGLang prefills prompts ahead of their decode side (``--optimistic-prefill-attempts``), and keeps their full KV until that side has slots. A
prompt that will be sent as quantized KV is packed as soon as it is prefilled, and its full KV can be freed.
"""

from dataclasses import dataclass, field

# Bytes of packed prompts at one rank from which no more are packed ahead. Full KV stays in the pool then.
MOST_WAITING = 4 << 30


@dataclass
class PackedPromptStore:
    """Packed prompts of one rank. Used by the scheduler's thread.

    Attributes:
        most: Bytes from which no more prompts are accepted.
        held: Bytes of all stored pages.
    """

    most: int = MOST_WAITING
    held: int = 0
    _pages: dict[object, tuple[tuple[int, int], tuple[memoryview, ...]]] = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        """Whether another prompt can be stored."""
        return self.held < self.most

    def __contains__(self, owner: object) -> bool:
        return owner in self._pages

    def put(self, owner: object, coded: tuple[int, int], pages: tuple[memoryview, ...]) -> None:
        """Store the pages of a prompt whose tokens from ``coded[0]`` to ``coded[1]`` are packed."""
        self._pages[owner] = coded, pages
        self.held += sum(map(len, pages))

    def coded(self, owner: object) -> tuple[int, int] | None:
        """Return the range of packed tokens of an owner's prompt; None if it is not stored."""
        return self._pages[owner][0] if owner in self._pages else None

    def take(self, owner: object) -> tuple[memoryview, ...]:
        """Remove and return an owner's pages; empty if there are none."""
        _, pages = self._pages.pop(owner, ((0, 0), ()))
        self.held -= sum(map(len, pages))
        return pages
