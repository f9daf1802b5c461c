"""How many bytes of text a token stands for."""

import re

import torch
from transformers import PreTrainedTokenizerFast

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Count the UTF-8 bytes that each token id stands for.

    Exact for byte-level tokenizers, also for tokens that hold a part of a character: the lengths of a text's tokens add
    up to the text's number of bytes. For tokenizers that write a space as "▁" and rare bytes as "<0x0A>" it is exact
    but for spaces that they add.

    Args:
        tokenizer: The tokenizer.

    Returns:
        int64 ``[len(tokenizer)]``, 0 for special tokens and for ids without a token.
    """
    backend = tokenizer.backend_tokenizer
    byte_level = "ByteLevel" in str(backend.decoder)  # Also inside a sequence of decoders.
    added = backend.get_added_tokens_decoder()
    special = set(tokenizer.all_special_ids)
    lengths = [0] * len(tokenizer)
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        if number in special:
            continue
        if number in added:  # Written as it is, not in the byte-level alphabet.
            lengths[number] = 0 if added[number].special else len(added[number].content.encode())
        elif byte_level:
            lengths[number] = len(token)  # The byte-level alphabet has a character for each byte.
        elif _BYTE_TOKEN.fullmatch(token):
            lengths[number] = 1
        else:
            lengths[number] = len(token.replace("▁", " ").encode())
    return torch.tensor(lengths, dtype=torch.int64)
