"""The Engram table: rows that hash ids point at.

One process holds the whole table here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsv41.engram_hash import check_integer_ids
from dsv41.initialization import NamedDraws


class EngramTable(nn.Module):
    """Rows [rows, width] addressed by int64 hash ids.

    Args:
        rows: Number of rows.
        width: Channels of a row.
        std: Standard deviation of fresh rows.
        strict_validation: Check ids on the host; see `check_integer_ids`.
    """

    def __init__(self, rows: int, width: int, std: float, strict_validation: bool = True) -> None:
        super().__init__()
        self.std = std
        self.strict_validation = strict_validation
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.init_weights(NamedDraws())

    def init_weights(self, draws: NamedDraws) -> None:
        """Draw the rows, in blocks."""
        draws.normal_rows_(self.weight, "weight", self.std)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids`, any shape, int32 or int64.

        Returns:
            Rows [*ids.shape, width] in the table's dtype.

        Raises:
            ValueError: An id is outside 0 to rows - 1.
        """
        check_integer_ids(ids, "hash ids", self.weight.shape[0], self.strict_validation)
        return F.embedding(ids, self.weight)
