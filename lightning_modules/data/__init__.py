"""Text as Lightning data: corpora, tokenizers, rows of tokens and a training order that can be resumed."""

from lightning_modules.data.module import TextDataModule

__all__ = ["TextDataModule"]
