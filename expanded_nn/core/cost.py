"""Every threshold of the algebra, by name: its unit, what it trades, and where it was measured.

A threshold holds for a processor. Where no other is named, "measured" means one thread of an AMD EPYC (Zen 4, AVX-512)
with torch's own products, float32, medians of alternating runs in one process. Times are those of what is done where
the predicate is true, relative to what is done otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2, prod
from typing import Any, cast

import torch


def is_symbol(size: object) -> bool:
    """Whether a size is a symbol of a traced graph, for any size: it cannot be the length of a loop."""
    return isinstance(size, torch.SymInt)


def usual_size(size: int) -> int:
    """A size, and of a symbol that of the call which is traced: others are assumed to be about as large."""
    hint: int = cast(Any, size).node.hint if is_symbol(size) else size
    return hint


def usual_shape(sizes: Iterable[int]) -> tuple[int, ...]:
    """The usual size of each."""
    return tuple(map(usual_size, sizes))


def at_once(numel: int, limit: int) -> int:
    """How many things of `numel` numbers are made at once: as many as have `limit` numbers, but one at the least."""
    return max(1, limit // max(1, numel))


CHUNK_NUMEL = 1 << 22
"""How many numbers of dense rows are made at once, where they are needed only in passing.

It trades memory (16 MB in float32) against calls. Chosen, not measured.
"""

KEPT_SAMPLES = 2**18
"""How many numbers that tell the samples of folded rows are kept for the next forward, which asks for the same.

It trades memory (2 MB) against looking them up again. Chosen, not measured.
"""

TURNS_OF_A_SAMPLE = 32
"""Every how many calls one sample is compared alone, in a forward on the whole batch whose values may mix samples.

It trades finding such a mixture late against a forward of one sample: every fourth call, that took 0.05 to 0.1 of a
plain step (Qwen-VL, mixtures of experts; AMD EPYC, one thread).
"""

LOOKED_UP_FOR_EACH = 1 << 26
"""Up to how many numbers a result is made for each sample, where nothing tells to which sample a row of it belongs.

It trades memory against going sample by sample. Chosen, not measured.
"""

PARTS_OF_A_WEIGHT = 1 << 10
"""For how many experts at most a weight is taken apart, each part one of the graph's tensors. Chosen, not measured."""

DERIVED_NUMEL = 1 << 14


def derives_once(numel: int) -> bool:
    """Whether what a module computes from weights alone is computed only once; the largest result has `numel` numbers.

    It trades a weight for each sample, and products with it, against calls. Measured on steps of linear layers: 1.2 to
    2.3 with 2^8 numbers, 0.6 to 2.3 with 2^12, 0.2 to 0.4 from 2^16 on; of norms that scale by `1 + weight`, which
    gain nothing by it, 1.1 to 2 with up to 2^10.
    """
    return numel >= DERIVED_NUMEL


DERIVED_AT_ONCE = 1 << 17
"""How many numbers of rows go back at once through what a module computes from weights alone.

It trades the cache and fresh pages against calls. Measured on steps of a standardized WRN-16-4 with 16 samples,
relative to this: 1.2 with 2^15, 1.05 with 2^19, 1.3 with 2^21.
"""

COMPARED_NUMEL = 1 << 20


def compares_rows(numel: int) -> bool:
    """Whether rows of `numel` numbers in all are compared as they are, and not by products with a few vectors.

    It trades memory (8 MB in float64). Chosen, not measured.
    """
    return numel <= COMPARED_NUMEL


FEW_FEATURES, TURNED_NUMEL, TURNED_OUT = 8, 1 << 12, 64


def multiplies_turned(positions: int, out: int, features: int) -> bool:
    """Whether products of `features` by `out` numbers are computed in place of those of `out` by `features`.

    A product's kernel works along the last dimension, and is idle for the most part where that is short. It trades
    another pass over the result. Measured at 1 to 8 features and 64 to 1024 outputs: 0.05 to 0.6 on the AMD EPYC, 0.2
    to 1.1 on an Intel Xeon; there up to 1.9 with fewer `positions * out` for each feature.
    """
    if features > FEW_FEATURES or out < TURNED_OUT:
        return False
    return is_symbol(positions) or positions * out >= TURNED_NUMEL * features


SMALL_ROWS_NUMEL = 1 << 15


def rows_are_small(numel: int) -> bool:
    """Whether rows with `numel` numbers in all are dense from the start.

    It trades arithmetic and memory against calls. Measured on steps of perceptrons: 0.55 to 0.85 with fewer numbers,
    0.8 to 1.6 from 2^15 to 2^17, 2 to 8 with more; the same on an Intel Xeon.
    """
    return numel <= SMALL_ROWS_NUMEL


SMALL_PRODUCT = 1 << 13


def product_is_small(count: int) -> bool:
    """Whether a product of matrices, of `count` multiplications, is a part of the loops around it in a compiled graph.

    It trades the kernel of a library against its call. Measured on compiled steps of perceptrons, one thread of an
    Intel Xeon (AVX-512): 0.6 to 0.8 up to here, 0.8 to 1.1 with four times as many, 1.1 to 1.5 with 16 times.
    """
    return count <= SMALL_PRODUCT


JOINED_NUMEL = 1 << 16


def is_worth_joining(numel: int) -> bool:
    """Whether dense rows with `numel` numbers in all are put side by side with those of other parameters.

    It trades a copy against calls. Measured on the clipping of six parameters: 0.5 to 0.7 up to here, 1 with twice as
    many numbers, 1.5 to 3 with more.
    """
    return numel <= JOINED_NUMEL


KEPT_ROWS_PER_FACTOR = 4


def keeps_rows_of_norms(
    numel: int,  # of the dense rows
    factor_numel: int,  # of their factors
) -> bool:
    """Whether dense rows, made for the norms, are kept for the weighted sum.

    It trades memory against time. Measured: 0.5. The limit, in numbers per number of the factors, was chosen.
    """
    return numel <= min(CHUNK_NUMEL, KEPT_ROWS_PER_FACTOR * factor_numel)


MANY_POSITIONS = 16


def sums_faster_dense(positions: int) -> bool:
    """Whether adding up dense rows, once they are there, is faster than the product of their factors.

    It trades reading memory against arithmetic. Measured: 1 at 4 positions where the rows are in the cache, at 8 where
    they are not; at twice as many where products are twice as fast.
    """
    return positions >= MANY_POSITIONS


JOINED_BLOCKS_NUMEL = 1 << 22
"""How many numbers of several passes' factors are put together, for one product in place of one for each pair of them.

It trades memory (16 MB in float32) against calls. Measured on the inner products of 100 passes of two samples: 0.03
(Zen 3). The limit was chosen.
"""

SPARE_MEMORY = 2


def memory_serves(size: int, wanted: int) -> bool:
    """Whether a piece of memory of `size` is used again where `wanted` is needed.

    It trades memory against fresh pages. Measured on an Intel Xeon: 476 MB are filled in 103 ms on fresh pages, in
    10 ms on used ones. How much larger the piece may be was chosen.
    """
    return wanted <= size <= SPARE_MEMORY * wanted


def inner_by_pairs(
    t: int,  # positions of one row
    s: int,  # positions of the other
    out: int,
    features: int,
) -> bool:
    """Whether `<g hᵀ, a cᵀ>` over all pairs of positions takes fewer multiplications than dense rows made for it.

    Counted, not measured; so are the next two.
    """
    return t * s * (out + features) < max(t, s) * out * features


PANELS_OF_POSITIONS, PANELLED_POSITIONS = 4, 128


def is_product_of_positions_by_panels(positions: int) -> bool:
    """Whether the products of all positions with each other, which are symmetric, are made by panels.

    It trades three eighths of the arithmetic against calls. Measured with 64 to 1024 features on an AMD EPYC (Zen 3),
    on one thread and on two: 1.0 to 1.6 at 64 positions, 1.1 at 96, 0.43 to 0.91 from 128 on.
    """
    return not is_symbol(positions) and positions >= PANELLED_POSITIONS


def gram_by_pairs(t: int, s: int, out: int, features: int) -> bool:
    """The same for all pairs of rows, for which each row is made dense only once."""
    return t * s * (out + features) < out * features


def inner_by_entries(
    entries: int,  # pairs of entries of two padded inputs
    windows: int,  # pairs of positions, for each entry of the kernel
) -> bool:
    """Whether products of the entries of two inputs are fewer than those of their windows, of which they are sums."""
    return entries < windows


ROWS_PER_FACTOR, ROWS_PER_FACTOR_OF_MANY_CHANNELS, MANY_CHANNELS = 8, 2, 128


def rows_by_columns(
    numel: int,  # of the rows
    factor_numel: int,  # of their factors
    channels: int,  # of the output
    entries: int,  # of the kernel
    dtype: torch.dtype,
    device: str,
) -> bool:
    """Whether a convolution's rows are made from columns, and not by a convolution with a group per sample.

    Measured at some 200 random shapes, relative to the batch gradient: groups 0.7 to 1.6, where columns, a loop over
    the samples or a product for each entry of the kernel are 1.2 to 5. But columns are up to 100 times as fast as
    groups in other dtypes than float32 and for kernels of one entry, and up to twice as fast where rows are much larger
    than factors, sooner if there are many channels to multiply a column with. On an Intel Xeon
    the choice takes 1.1 of the faster one's time at most, at 12 shapes. Nothing was measured on a GPU.
    """
    ratio = ROWS_PER_FACTOR_OF_MANY_CHANNELS if channels >= MANY_CHANNELS else ROWS_PER_FACTOR
    return dtype != torch.float32 or device != "cpu" or entries == 1 or numel > ratio * factor_numel


COLUMNS_NUMEL = 1 << 18
"""How many numbers of columns are made at once on a CPU; elsewhere `CHUNK_NUMEL`.

It trades the cache (1 MB in float32) against calls. Measured: 2^16 to 2^20 numbers within a tenth of each other, 2^22
up to 3.
"""

GROUPED_NUMEL = 1 << 20
"""How many numbers of inputs, gradients and rows, which are copied, go into one convolution of several samples.

It trades memory against calls. Measured: 2^18 numbers 0.9 to 1.2, 2^22 1, but 4 where rows are large.
"""


FEW_STATES, FEW_STATES_OF_THREADS = 1 << 10, 1 << 12
"""Up to how many numbers in the states of one step torch's kernel for all steps is fastest: on one thread, on several.

It trades calls and threads, for which a loop's operations are too small, against computing the gates twice. Measured on
whole steps, eager and compiled, on an AMD EPYC (Zen 4) and an Intel Xeon: on one thread 0.97 to 0.99 with 2^10 numbers,
1.03 to 1.08 with 2^11, 1.09 to 1.2 with 2^13; on two threads 0.8 to 0.95 with 2^10 and 2^11, 0.93 to 0.98 with 2^12,
0.95 to 1.04 with 2^13, 0.95 to 1.1 with 2^14.
"""


def keeps_gates(dtype: torch.dtype, device: str, states: int, threads: int, *, has_kernel: bool) -> bool:
    """Whether the forward of an LSTM or GRU is a loop over time that keeps the gates for the backward.

    It trades memory and torch's own kernel, if that does all steps at once, against computing the gates twice. Measured
    on whole steps: a GRU 0.8 with 512 units and 128 steps, 1 with 128 units and 32 steps; an LSTM 0.92 to 0.96 with 128
    units or more and 32 samples or more. On an Intel Xeon a GRU 0.77 to 0.89, an LSTM 0.83 to 1. Elsewhere than on a
    CPU nothing was measured.
    """
    few = FEW_STATES if threads == 1 else FEW_STATES_OF_THREADS
    takes_kernel = has_kernel and usual_size(states) <= few
    return device == "cpu" and dtype in (torch.float32, torch.float64) and not takes_kernel


MANY_STEPS = 32


def turns_weight_once(steps: int) -> bool:
    """Whether a loop over time copies the transpose of its weight before the first step.

    It trades a copy against products with a transposed matrix, step by step. Measured on an Intel Xeon, the products of
    32 steps: 0.7 to 0.9 with 32 to 128 units and 1 to 64 samples, 0.84 to 0.97 with 512 and 1024 units.
    """
    return steps >= MANY_STEPS


KEPT_QUERIES_NUMEL = 1 << 26


def keeps_queries(numel: int) -> bool:
    """Whether dense rows with `numel` numbers in all, made for inner products, are kept for the next ones.

    It trades memory (256 MB in float32) against making them again for each batch. Chosen, not measured.
    """
    return numel <= KEPT_QUERIES_NUMEL


SYMMETRIC_PANEL = 256


def is_product_by_panels(features: int, count: int) -> bool:
    """Whether `xᵀ x` of an `x (count, features)` is made by panels of `SYMMETRIC_PANEL` columns.

    It trades half of the arithmetic against calls and a copy. Measured: with fewer products in a sum it takes no less
    time.
    """
    return features > SYMMETRIC_PANEL and count >= SYMMETRIC_PANEL


def is_second_moment_to_wait(features: int, count: int) -> bool:
    """Whether few `x (count, features)` wait until there are `SYMMETRIC_PANEL` of them for one sum of `xᵀ x`.

    It trades their copy against reading and writing the sum each time, and half of the arithmetic.
    """
    return features > SYMMETRIC_PANEL > count


SHUFFLED_NUMEL = 1 << 20
"""How many numbers of rows are made and sketched at once.

It trades the cache (4 MB in float32) against calls. Chosen, not measured.
"""

KEPT_BUCKETS = 1 << 12


def keeps_buckets(shape: Sequence[int]) -> bool:
    """Whether a projection keeps the bucket of each number of a parameter, for one call with those of the others.

    It trades memory, 12 bytes for each number, against calls that find the buckets of each parameter anew. Measured
    with three linear layers of 16 and 8 samples: 0.5. The limit, which vectors have not, was chosen.
    """
    return len(shape) == 1 or prod(shape) <= KEPT_BUCKETS


SPECTRUM_SHARE = 16
"""What part of `CHUNK_NUMEL` the numbers are that are transformed at once: 2^18, 1 MB in float32.

It trades fresh pages against calls. Measured, relative to all at once: 0.2 to 0.5 with more numbers than that, where
the system takes memory of that size back at once; 1.04 where it does not, as beside larger tensors.
"""

NUMBER_OF_ROW, NUMBER_OF_FACTOR, NUMBER_OF_FFT, NUMBER_OF_SPECTRUM = 8, 8, 3, 12


def sketch_by_factors(
    positions: int,
    out: int,
    features: int,
    length: int,  # of the Fourier transforms
) -> bool:
    """Whether a row is sketched by Fourier transforms of its factors' sketches, and not made dense.

    The unit of the four costs is a multiplication in a product of matrices, measured at 0.023 ns (Zen 5). They are
    those of writing a number of a dense row and reading it again; of putting a number of a factor into its bucket,
    beyond what shuffling takes; of a transform, for each of its `n log2(n)`; of multiplying two numbers of spectra and
    adding them up. At 216 shapes of 1 to 128 positions the choice takes 1.01 of the faster one's time on average.
    """
    transforms = length * (2 * NUMBER_OF_FFT * log2(max(2, length)) + NUMBER_OF_SPECTRUM)
    by_factors = positions * (transforms + NUMBER_OF_FACTOR * (out + features))
    return by_factors < out * features * (positions + NUMBER_OF_ROW)
