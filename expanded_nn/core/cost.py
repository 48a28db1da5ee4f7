"""Every threshold of the algebra, by name: its unit, what it trades, and where it was measured.

A threshold is a processor's, not a law. Unless another place is named, "measured" means: by turns in one process, the
median, float32, one thread of an AMD EPYC (Zen 4, AVX-512), torch 2.13.
"""

from __future__ import annotations

import torch

CHUNK_NUMEL = 1 << 22
"""Numbers in the dense rows that are made at once, where they are needed only in passing: memory against calls."""

SMALL_ROWS_NUMEL = 1 << 15
"""Numbers in all rows of a parameter up to which they are dense from the start: memory against calls.

Below, keeping the factors takes longer than multiplying them. Measured on small perceptrons.
"""

JOINED_NUMEL = 1 << 16
"""Numbers in all rows of a parameter up to which dense rows are put side by side with others: a copy against calls.

Below, an operation costs more than its arithmetic. Measured on small perceptrons.
"""

KEPT_ROWS_PER_FACTOR = 4
"""Numbers of dense rows for each number of their factors up to which rows that norms need are kept: memory against
making them again for the weighted sum. Measured on the clipping of recurrent layers.
"""

MANY_POSITIONS = 16
"""Positions from which the sum of dense rows, once they are there, costs less than the product of the factors.

The memory traffic of one dense row takes about as long as the arithmetic of so many positions.
"""

COLUMNS_NUMEL = 1 << 18
"""Numbers in a convolution's columns that are made at once on a CPU: cache (1 MB in float32) against calls."""

GROUPED_NUMEL = 1 << 20
"""Numbers in the samples of one convolution with a group per sample, which copies them all: memory against calls."""

ROWS_PER_FACTOR = 8
"""Numbers of rows for each number of their factors from which a convolution's rows are made from columns."""

MANY_CHANNELS = 128
"""Output channels from which `ROWS_PER_FACTOR_OF_MANY_CHANNELS` takes the place of `ROWS_PER_FACTOR`."""

ROWS_PER_FACTOR_OF_MANY_CHANNELS = 2

SPARE_MEMORY = 2
"""Times the size that is asked for, up to which a piece of memory is used again: memory against fresh pages.

Filling fresh pages takes ten times as long as filling used ones (476 MB: 103 ms and 10 ms).
"""


def rows_at_once(numel: int) -> int:
    """How many rows of so many numbers are made dense at once, where they are needed only in passing."""
    return max(1, CHUNK_NUMEL // max(1, numel))


def rows_are_small(numel: int) -> bool:
    """Whether rows of so many numbers in all are dense from the start."""
    return numel <= SMALL_ROWS_NUMEL


def is_worth_joining(numel: int) -> bool:
    """Whether dense rows of so many numbers in all are put side by side with those of other parameters."""
    return numel <= JOINED_NUMEL


def keeps_rows_of_norms(
    numel: int,  # of the dense rows
    held: int,  # of their factors
) -> bool:
    """Whether rows that the norms make anyway are kept for what comes after."""
    return numel <= min(CHUNK_NUMEL, KEPT_ROWS_PER_FACTOR * held)


def sums_faster_dense(positions: int) -> bool:
    """Whether adding up dense rows, once they are there, costs less than the product of the factors."""
    return positions >= MANY_POSITIONS


def memory_serves(size: int, wanted: int) -> bool:
    """Whether a piece of memory is used again for something of the wanted size."""
    return wanted <= size <= SPARE_MEMORY * wanted


def inner_by_pairs(
    t: int,  # positions of one row
    s: int,  # positions of the other
    out: int,
    features: int,
) -> bool:
    """Whether `<g hᵀ, a cᵀ>` over all pairs of positions takes fewer multiplications than dense rows made for it.

    Counted, not measured; so is `gram_by_pairs`.
    """
    return t * s * (out + features) < max(t, s) * out * features


def gram_by_pairs(t: int, s: int, out: int, features: int) -> bool:
    """The same for all pairs of rows, for which dense rows are made but once."""
    return t * s * (out + features) < out * features


def inner_by_entries(
    entries: int,  # pairs of entries of two padded inputs
    windows: int,  # pairs of positions, for each entry of the kernel
) -> bool:
    """Whether products of the entries of two inputs are fewer than those of their windows, of which they are sums."""
    return entries < windows


def convolves_by_group(dtype: torch.dtype, device: str, entries: int) -> bool:
    """Whether a convolution with a group per sample is fast, for a kernel of so many entries.

    Measured at some 200 random shapes: it takes 0.7 to 1.6 times as long as the batch gradient, where a loop over the
    samples, columns, or a product for each entry of the kernel take 1.2 to 5 times. But columns are up to 100 times as
    fast for kernels of one entry and for other dtypes than float32. Nothing was measured on a GPU.
    """
    return dtype == torch.float32 and device == "cpu" and entries > 1


def rows_by_columns(
    numel: int,  # of the rows
    held: int,  # of their factors
    channels: int,  # of the output
) -> bool:
    """Whether a convolution's rows are so large that columns are faster than a group per sample.

    Measured at the same shapes: then up to twice as fast, sooner if there are many channels to multiply a column with.
    """
    most = ROWS_PER_FACTOR_OF_MANY_CHANNELS if channels >= MANY_CHANNELS else ROWS_PER_FACTOR
    return numel > most * held


def samples_by_columns(device: str, numel: int) -> int:
    """How many samples' columns, each of so many numbers, are made at once."""
    return max(1, (COLUMNS_NUMEL if device == "cpu" else CHUNK_NUMEL) // max(1, numel))


def samples_by_group(numel: int) -> int:
    """How many samples, each with so many numbers of input, gradient and row, make one convolution."""
    return max(1, GROUPED_NUMEL // max(1, numel))
