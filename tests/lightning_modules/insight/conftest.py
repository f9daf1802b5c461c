"""Tokens that models are looked at with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Two rows of 30 tokens; in the second they end after 21, in the middle of a group of two."""
    ids = torch.randint(3, 500, (2, 30), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 21:] = 0
    return {"input_ids": ids, "attention_mask": mask}
