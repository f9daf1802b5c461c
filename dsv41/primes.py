"""Bucket counts of the Engram hash: distinct primes, found by trial division."""

from __future__ import annotations

import math


def is_prime(number: int) -> bool:
    """Whether `number` is prime, by trial division (the released primes are near 16 million: 4000 divisions)."""
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))


def next_prime(start: int, taken: set[int]) -> int:
    """Smallest prime above `start` that is not in `taken`."""
    candidate = start + 1
    while candidate in taken or not is_prime(candidate):
        candidate += 1
    return candidate


def engram_primes(layers: int, max_ngram_size: int, heads: int, vocab_size: int) -> list[list[int]]:
    """Bucket counts of all Engram hash columns (ARCHITECTURE 6, "Buckets").

    Primes are handed out in the order layer, n-gram size (2 to `max_ngram_size`), head. Each (layer, size) starts its
    search just above ``vocab_size - 1``, and no prime is used twice.

    Returns:
        One list per layer with ``(max_ngram_size - 1) * heads`` primes.
    """
    taken: set[int] = set()
    table: list[list[int]] = []
    for _ in range(layers):
        row: list[int] = []
        for _ in range(2, max_ngram_size + 1):
            prime = vocab_size - 1
            for _ in range(heads):
                prime = next_prime(prime, taken)
                taken.add(prime)
                row.append(prime)
        table.append(row)
    return table
