"""The data module: text of any source as batches of token rows."""

from functools import cached_property
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from lightning_modules.data.corpus import LeftOut, iterate_documents
from lightning_modules.data.rows import RowDataset, unigram
from lightning_modules.data.sampler import (
    OrderedBatchSampler,
    Position,
    ResumableBatchSampler,
    ResumableLoader,
    SharedLoader,
    trainer_position,
)
from lightning_modules.data.settings import cache_folder, check_settings
from lightning_modules.data.splits import SPLITS, Split, split_documents
from lightning_modules.data.token_store import TokenStore, tokenized
from lightning_modules.data.tokenization import load_tokenizer, token_byte_lengths, tokenizer_fingerprint


class TextDataModule(L.LightningDataModule):
    """Text as rows of tokens for training, validation and test.

    A batch is a dict of int64 tensors: ``input_ids``, ``attention_mask``, ``labels`` (not shifted) and
    ``document_ids``, each ``[batch, sequence_length]``, and ``row_id`` ``[batch]``. See ``RowDataset``.

    The order of the training rows depends on the seed and the epoch only, whatever the number of processes, and a run
    that is resumed inside an epoch goes on at the next batch. What is computed once, the trained tokenizer and the
    tokens, is kept in ``cache_dir``.

    Args:
        source: Where the text comes from: "stdlib" (the sources of Python's standard library, always at hand), a file
            or a folder of text, .jsonl, .ndjson or .parquet files, also compressed (.gz, .zst), "hf:NAME" or
            "hf:NAME:CONFIG" (a Hugging Face dataset, streamed), or a list of these.
        tokenizer: "bpe" (byte-level BPE trained on the training documents), "deepseek" (the tokenizer of DeepSeek V4,
            129280 tokens), or the path of a tokenizer.json or of a folder with one.
        vocab_size: Tokens of the trained tokenizer, from 259 to 1048576. Without meaning for other tokenizers.
        sequence_length: Tokens in a row, at least 2.
        batch_size: Rows in a batch of all processes together, at least one for each, so that the same configuration
            trains on the same batches on any number of processes.
        val_fraction: Share of the documents for validation, from 0 to below 1; 0 is without validation.
        test_fraction: Share of the documents for test, from 0 to below 1.
        text_field: Field or column with the text, in .jsonl and .parquet files and Hugging Face datasets.
        max_documents: Take only the first documents of the source, at least 1. Hugging Face datasets need it.
        num_workers: Processes that prepare batches; 0 prepares them in the training process.
        seed: Seed of the order of the training rows, at least 0.
        cache_dir: Folder for the trained tokenizer and the tokens. By default $DSV41_CACHE, or dsv41 in
            $XDG_CACHE_HOME, or ~/.cache/dsv41.

    Attributes:
        left_out: Counts of the files and records of the source that are not used, once the corpus has been read.

    Raises:
        ValueError: If a value is of another type or out of its range.
        FileNotFoundError: If there is no such source or tokenizer.
    """

    def __init__(
        self,
        source: str | list[str] = "stdlib",
        tokenizer: str = "bpe",
        vocab_size: int = 4096,
        sequence_length: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        text_field: str = "text",
        max_documents: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        check_settings(
            source,
            tokenizer,
            text_field,
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            batch_size=batch_size,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            max_documents=max_documents,
            num_workers=num_workers,
            seed=seed,
        )
        self.source = source if isinstance(source, str) else list(source)  # A copy, which nothing else changes.
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.text_field = text_field
        self.max_documents = max_documents
        self.num_workers = num_workers
        self.seed = seed
        self.cache_dir = cache_folder(cache_dir)
        self.left_out = LeftOut()

    def __str__(self) -> str:
        # Lightning's own text counts batches, for which it would read and tokenise the corpus: error messages show it.
        return f"{type(self).__name__}(source={self.source!r}, tokenizer={self.tokenizer!r})"

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The splits of the corpus by name. Their lists of documents are emptied when ``stores`` has been used."""
        self.left_out = LeftOut()
        documents = iterate_documents(self.source, self.text_field, self.max_documents, self.left_out)
        splits = split_documents(documents, self.val_fraction, self.test_fraction)
        if summary := self.left_out.summary():
            rank_zero_info(f"data.source: {summary}")
        return splits

    @cached_property
    def fast_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer. Loaded at the first use, and trained if need be; needs neither trainer nor ``setup``."""
        # Only a trained tokenizer needs the corpus, which may be slow to read.
        documents = self.splits["train"].documents if self.tokenizer == "bpe" else []
        return load_tokenizer(self.tokenizer, documents, self.vocab_size, self.cache_dir)

    @cached_property
    def _fingerprint(self) -> str:
        return tokenizer_fingerprint(self.fast_tokenizer)

    @cached_property
    def _byte_lengths(self) -> torch.Tensor:
        return token_byte_lengths(self.fast_tokenizer)

    @cached_property
    def stores(self) -> dict[str, TokenStore]:
        """The tokens of each split by its name, tokenised if need be."""
        stores = {
            name: tokenized(split, name, self.fast_tokenizer, self._fingerprint, self.cache_dir)
            for name, split in self.splits.items()
        }
        for split in self.splits.values():
            split.documents.clear()  # To free memory: the tokens lie on disk, and nothing needs the texts any more.
        return stores

    def token_byte_lengths(self) -> torch.Tensor:
        """UTF-8 bytes that each token id stands for: int64 ``[len(fast_tokenizer)]``, 0 for special tokens."""
        return self._byte_lengths

    def tokenizer_fingerprint(self) -> str:
        """Hexadecimal SHA-256 of everything that decides how text becomes token ids."""
        return self._fingerprint

    def prepare_data(self) -> None:
        """Train the tokenizer and tokenise the corpus, unless both are in the cache."""
        _ = self.stores

    def setup(self, stage: str) -> None:
        """Open the tokens and check that there are enough for the stage, and rows in a batch for all processes.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            ValueError: If a split that the stage needs is empty, the train split has less than one row, or a batch has
                fewer rows than there are processes.
        """
        processes = self._ranks()[1]
        if self.batch_size < processes:
            raise ValueError(
                f"data.batch_size: must be at least the number of processes, {processes}, since a batch is divided "
                f"among them, got {self.batch_size}"
            )
        if stage == "fit":
            self._check_enough("train")
        if stage == "validate" or (stage == "fit" and self.val_fraction > 0):
            self._check_enough("val")
        if stage in ("test", "predict"):
            self._check_enough("test")

    def _check_enough(self, split: str) -> None:
        """Check that a split has a token, or the train split a row."""
        tokens = len(self.stores[split])
        counts = ", ".join(f"{store.documents} {name}" for name, store in self.stores.items())
        left_out = f" ({summary})" if (summary := self.left_out.summary()) else ""
        if split == "train" and tokens < self.sequence_length:
            raise ValueError(
                f"data.source: the train split has {tokens} tokens, less than one row of sequence_length ="
                f" {self.sequence_length} (documents: {counts}); give more text in source, or lower sequence_length,"
                f" val_fraction or test_fraction{left_out}"
            )
        if tokens == 0:
            without = ", or set val_fraction to 0 to train without validation" if split == "val" else ""
            raise ValueError(
                f"data.{split}_fraction: the {split} split is empty (documents: {counts}); raise {split}_fraction or"
                f" give more documents{without}{left_out}"
            )

    def dataset(self, split: str) -> RowDataset:
        """The rows of a split.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.

        Returns:
            The rows.

        Raises:
            ValueError: If there is no such split.
        """
        return RowDataset(self._store(split), self.sequence_length, self.fast_tokenizer.pad_token_id)

    def _store(self, split: str) -> TokenStore:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        return self.stores[split]

    def train_dataloader(self) -> ResumableLoader:
        """Batches of the train rows, from where the trainer stands. Without a trainer, those of epoch 0."""
        rows = self.dataset("train")
        sampler = ResumableBatchSampler(len(rows), self.batch_size, self.seed, self._position, *self._ranks())
        return ResumableLoader(self._loader(rows, batch_sampler=sampler))

    def val_dataloader(self) -> SharedLoader | list[Any]:
        """Batches of the validation rows, in their order. Without any, an empty list, about which Lightning warns."""
        rows = self.dataset("val")
        return self._ordered(rows) if len(rows) else []

    def test_dataloader(self) -> SharedLoader:
        """Batches of the test rows, in their order."""
        return self._ordered(self.dataset("test"))

    def _ordered(self, rows: RowDataset) -> SharedLoader:
        sampler = OrderedBatchSampler(len(rows), self.batch_size, *self._ranks())
        return SharedLoader(self._loader(rows, batch_sampler=sampler))

    def predict_dataloader(self) -> SharedLoader:
        """Batches of the test rows, in their order."""
        return self.test_dataloader()

    def _loader(self, rows: RowDataset, **batching: Any) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(
            rows,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            # Of its own: each iteration draws from the generator, and drawing from the global one would change the
            # random numbers of the model when training is resumed inside an epoch.
            generator=torch.Generator().manual_seed(self.seed),
            **batching,
        )

    def _ranks(self) -> tuple[int, int]:
        """Number of this process among the data-parallel ones, and their count."""
        ranks = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (ranks["rank"], ranks["num_replicas"]) if ranks else (0, 1)

    def _position(self) -> Position | None:
        return Position(0, 0) if self.trainer is None else trainer_position(self.trainer)

    def unigram_entropy(self, split: str = "val") -> float:
        """The loss that the best model without context reaches on a split: one that knows the tokens' frequencies.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.

        Returns:
            Nats per predicted token. A trained model should be well below.

        Raises:
            ValueError: If there is no such split, or nothing is predicted in it.
        """
        return self._unigram(split)[0]

    def unigram_bits_per_byte(self, split: str = "val") -> float:
        """``unigram_entropy`` per byte of the predicted tokens' text.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.

        Returns:
            Bits per UTF-8 byte.

        Raises:
            ValueError: If there is no such split, or nothing is predicted in it.
        """
        return self._unigram(split)[1] / self.text_bytes_per_token_byte(split)

    def _unigram(self, split: str) -> tuple[float, float]:
        try:
            return unigram(self._store(split), self.sequence_length, self._byte_lengths.numpy())
        except ValueError as error:
            raise ValueError(f"{split} split: {error}") from error

    def text_bytes_per_token_byte(self, split: str) -> float:
        """Bytes of a split's text for each byte that its tokens stand for.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.

        Returns:
            1 for tokenizers that keep all text, more for those that lose some.

        Raises:
            ValueError: If there is no such split.
        """
        store = self._store(split)
        counts: np.ndarray = np.bincount(store.tokens, minlength=len(self._byte_lengths))
        size = int(counts @ self._byte_lengths.numpy())
        return self.splits[split].bytes / size if size else 1.0

    def describe(self) -> str:
        """Documents, tokens, rows and bytes of each split, in one line."""
        return "; ".join(
            f"{name} {store.documents:,} documents, {len(store):,} tokens, {len(self.dataset(name)):,} rows,"
            f" {self.splits[name].bytes:,} bytes"
            for name, store in self.stores.items()
        )

    def state_dict(self) -> dict[str, Any]:
        """What decides which rows are trained on and in what order, for checkpoints."""
        return {
            "hash of the train documents": self.splits["train"].digest,
            "hash of the tokenizer": self._fingerprint,
            "sequence_length": self.sequence_length,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a resumed training goes on with the same rows in the same order.

        Only training is checked; validation and test may use other data than the checkpoint's run.

        Args:
            state_dict: The state in the checkpoint.

        Raises:
            ValueError: If something differs. The message gives both values.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        differences = [
            f"{name} is {value!r} here and {state_dict[name]!r} in the checkpoint"
            for name, value in self.state_dict().items()
            if name in state_dict and state_dict[name] != value
        ]
        if differences:
            raise ValueError(
                f"cannot resume at the next batch: {'; '.join(differences)}. Use"
                " the settings of the checkpoint's run, or start a new run from its weights alone"
            )
