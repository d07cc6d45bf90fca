"""Rows of the token table that begin with something else than plain tokens."""

from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import torch

from sglang_ext.mem_cache.compressed.formats.kv_format import KVFormat

Form = TypeVar("Form")


@dataclass(frozen=True)
class BegunRows(KVFormat, Generic[Form]):
    """Which rows begin with it, and with how much of it.

    Attributes:
        form: how it lies in slots.
        counts: int32 [rows], how much of it each row begins with; 0 for none. Captured graphs read it.
    """

    form: Form
    counts: torch.Tensor

    @classmethod
    def of_table(cls, form: Form, token_table: torch.Tensor) -> Self:
        """None yet, of the rows of a token table."""
        return cls(form, torch.zeros(len(token_table), dtype=torch.int32, device=token_table.device))

    def on_host(self, rows: torch.Tensor) -> list[int]:
        """Counts of ``rows``, int64 [batch], on the host; waits for the device."""
        return self.counts[rows].tolist()
