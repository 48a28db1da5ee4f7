"""The table: every layer, every constructor argument that torch has.

Sizes are chosen so that no dimension equals a number of samples that the tests use (3, 1, 0).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from oracle import Call, Take, set_seed, take_rows

EVEN_SAME = "ignore:Using padding='same' with even kernel lengths:UserWarning"


@dataclass(frozen=True)
class Bad:
    """An input that must be refused, and the words of the refusal."""

    call: Callable[[], Call]
    match: str


@dataclass(frozen=True)
class Case:
    """A layer with some arguments, and an input: `Case("linear", lambda: nn.Linear(4, 5), randn(4))`.

    All laws run on it. The test's name has that of the case, as in `pytest tests/test_layers.py -k linear_no_bias`.

    Attributes:
        name: That of the class, in torch's functional spelling, and what is special.
        build: Makes the torch.nn module.
        call: Makes the arguments for so many samples; `randn(*shape)` makes one tensor `(B, *shape)`.
        take: Takes one sample out of such arguments.
        twin: Makes the same module in plain operations, where torch has no second derivative or a wrong one.
        training: Whether the module is in train mode.
        sum_of_rows: Whether torch's own batch gradient is the sum over the samples.
        torch_is_wrong: Whether the rows are compared with the twin's, as torch's first derivative is wrong, too.
        bad: Arguments that the layer must refuse, with the words of the refusal: `(bad("linear.*", (4,)),)`.
    """

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[int], Call]
    take: Take = take_rows
    twin: Callable[[], nn.Module] | None = None
    training: bool = True
    sum_of_rows: bool = True
    torch_is_wrong: bool = False
    bad: tuple[Bad, ...] = ()

    def module(self) -> nn.Module:
        """The torch.nn module, with no parameter or statistic left at a value as special as 0 or 1."""
        set_seed(7)
        module = self.build().train(self.training)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.3 * torch.randn_like(p))
            for name, b in module.named_buffers():
                if b.is_floating_point():
                    b.copy_(torch.rand_like(b) + 0.5 * name.endswith("var"))
        return module

    def oracle(self) -> nn.Module:
        """What the loop runs."""
        return self.twice_differentiable() if self.torch_is_wrong else self.module()

    def twice_differentiable(self) -> nn.Module:
        """What the loop runs where second derivatives are due."""
        if self.twin is None:
            return self.module()
        twin = self.twin()
        twin.load_state_dict(self.module().state_dict())
        return twin

    def inputs(self, batch: int) -> Call:
        set_seed(11)
        return self.call(batch)

    @property
    def torch_class(self) -> type[nn.Module]:
        """The class of the layer, which a module may hold that makes it a function of tensors `(B, ...)`."""
        return type(layer_of(self.build()))

    def has_parameters(self) -> bool:
        return any(True for _ in self.build().parameters())

    def has_float_input(self) -> bool:
        return bool(self.inputs(1).floats())


def layer_of(module: nn.Module) -> nn.Module:
    return getattr(module, "layer", module)


def randn(*shape: int) -> Callable[[int], Call]:
    return lambda batch: Call((torch.randn(batch, *shape),))


def randn_as(change: Callable[[Tensor], Tensor], *shape: int) -> Callable[[int], Call]:
    """The same in another layout of memory: what `change` makes of `(B, *shape)`."""
    return lambda batch: randn(*shape)(batch).map(change)


def channels_second(x: Tensor) -> Tensor:
    return x.movedim(-1, 1)


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def bad(match: str, *shapes: tuple[int, ...]) -> Bad:
    """Random tensors of such shapes must be refused."""
    return Bad(lambda: Call(tuple(torch.randn(shape) for shape in shapes)), match)


# --- linear ---------------------------------------------------------------------------------------------------

LINEAR = [
    Case("linear", lambda: nn.Linear(4, 5), randn(4), bad=(bad(r"[Ll]inear.*\(4,\)", (4,)),)),
    Case("linear_3d", lambda: nn.Linear(4, 5), randn(6, 4)),
    Case("linear_4d", lambda: nn.Linear(4, 5), randn(2, 6, 4)),
    Case("linear_5d", lambda: nn.Linear(4, 5), randn(2, 1, 6, 4)),
    Case("linear_no_bias", lambda: nn.Linear(4, 5, bias=False), randn(4)),
    Case("linear_no_bias_3d", lambda: nn.Linear(4, 5, bias=False), randn(6, 4)),
    Case("linear_wide", lambda: nn.Linear(40, 50), randn(2, 40)),
    Case("linear_few_features", lambda: nn.Linear(1, 512), randn(9, 1)),
    Case("linear_long", lambda: nn.Linear(4, 2), randn(40, 4)),
    Case("linear_one_feature", lambda: nn.Linear(1, 1), randn(1)),
    Case("linear_transposed", lambda: nn.Linear(4, 5), randn_as(lambda x: x.mT, 4, 6)),
    Case("linear_strided", lambda: nn.Linear(4, 5), randn_as(lambda x: x[..., ::2], 6, 8)),
    Case("linear_no_positions", lambda: nn.Linear(4, 5), randn(0, 4)),
    Case(
        "bilinear",
        lambda: nn.Bilinear(4, 5, 6),
        lambda batch: Call((torch.randn(batch, 4), torch.randn(batch, 5))),
        bad=(bad(r"[Bb]ilinear", (4,), (5,)), bad(r"[Bb]ilinear", (6, 4), (2, 5))),
    ),
    Case(
        "bilinear_no_bias_3d",
        lambda: nn.Bilinear(4, 5, 6, bias=False),
        lambda batch: Call((torch.randn(batch, 2, 4), torch.randn(batch, 2, 5))),
    ),
    Case(
        "bilinear_4d",
        lambda: nn.Bilinear(4, 5, 6),
        lambda batch: Call((torch.randn(batch, 2, 4, 4), torch.randn(batch, 2, 4, 5))),
    ),
]

# --- convolutions ---------------------------------------------------------------------------------------------

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SPACE = {1: (9,), 2: (7, 8), 3: (5, 6, 7)}
UNEVEN = (3, 2, 4)


def conv(d: int, name: str, channels: int = 4, out: int = 6, kernel: object = 3, **arguments: object) -> Case:
    return Case(
        f"conv{d}d_{name}",
        lambda: CONV[d](channels, out, kernel, **arguments),
        randn(channels, *SPACE[d]),
    )


def conv_laid_out(d: int, name: str, change: Callable[[Tensor], Tensor], *shape: int, **arguments: object) -> Case:
    call = randn_as(change, *(shape or (4, *SPACE[d])))
    return Case(f"conv{d}d_{name}", lambda: CONV[d](4, 6, 3, **arguments), call)


def conv_cases(d: int) -> list[Case]:
    space = SPACE[d]
    uneven = UNEVEN[:d]
    cases = [
        Case(
            f"conv{d}d",
            lambda: CONV[d](4, 6, 3),
            randn(4, *space),
            bad=(bad(rf"[Cc]onv{d}d.*\(4, ", (4, *space)),),
        ),
        conv(d, "arguments", kernel=uneven, stride=(2, 1)[:d], padding=(1, 2)[:d], dilation=(1, 2)[:d]),
        conv(d, "no_bias", bias=False),
        conv(d, "one_channel", 1, 1),
        conv(d, "kernel_1", kernel=1),
        conv(d, "kernel_1_stride", kernel=1, stride=2, padding=1),
        conv(d, "kernel_whole", kernel=space),
        conv(d, "stride_leaves_a_rest", stride=3),
        conv(d, "dilation", dilation=2, padding=1),
        conv(d, "many_channels", 20, 24),
        conv(d, "groups", groups=2),
        conv(d, "groups_arguments", kernel=uneven, groups=2, stride=2, padding=1, dilation=2, bias=False),
        conv(d, "depthwise", out=4, groups=4),
        conv(d, "depthwise_multiplier", out=8, groups=4, padding=1, stride=2),
        conv(d, "groups_same_reflect", groups=2, padding="same", padding_mode="reflect"),
        conv(d, "valid", padding="valid"),
        conv(d, "same", padding="same"),
        conv(d, "same_even", kernel=2, padding="same"),
        conv(d, "same_even_dilation", kernel=4, dilation=3, padding="same"),
        conv(d, "same_uneven", kernel=uneven, padding="same", dilation=2),
        *(
            conv(d, f"{mode}_{name}", padding_mode=mode, padding=padding, kernel=kernel, stride=stride)
            for mode in ("reflect", "replicate", "circular")
            for name, padding, kernel, stride in (
                ("uneven", (1, 2)[:d], uneven, 2),
                ("same", "same", 3, 1),
                ("same_even", "same", 4, 1),
            )
        ),
        conv_laid_out(d, "permuted", channels_second, *space, 4),
        conv_laid_out(d, "permuted_groups", channels_second, *space, 4, groups=2, padding=1),
        conv_laid_out(d, "transposed_space", lambda x: x.transpose(2, -1), padding=1, stride=2),
        conv_laid_out(d, "strided", lambda x: x[:, ::2, ..., ::2], 8, *space[:-1], 14),
        conv_laid_out(d, "expanded", lambda x: x.expand(-1, 4, *space), 1, *space),
    ]
    if d == 2:
        cases += [
            conv_laid_out(d, "channels_last", channels_last),
            conv_laid_out(d, "channels_last_groups", channels_last, groups=2, stride=2),
            conv_laid_out(d, "channels_last_same", channels_last, padding="same"),
            Case(
                f"conv{d}d_channels_last_weight",
                lambda: CONV[d](4, 6, 3).to(memory_format=torch.channels_last),
                randn(4, *space),
            ),
        ]
    return cases


def conv_transpose(d: int, name: str, channels: int = 4, out: int = 6, kernel: object = 3, **arguments: object) -> Case:
    return Case(
        f"conv_transpose{d}d_{name}",
        lambda: CONV_TRANSPOSE[d](channels, out, kernel, **arguments),
        randn(channels, *(n - 3 for n in SPACE[d])),
    )


def conv_transpose_cases(d: int) -> list[Case]:
    space = tuple(n - 3 for n in SPACE[d])
    uneven = UNEVEN[:d]
    cases = [
        Case(
            f"conv_transpose{d}d",
            lambda: CONV_TRANSPOSE[d](4, 6, 3),
            randn(4, *space),
            bad=(bad(rf"(?i)conv_?transpose{d}d.*\(4, ", (4, *space)),),
        ),
        conv_transpose(d, "arguments", kernel=uneven, stride=(2, 1)[:d], padding=(1, 0)[:d], dilation=(1, 2)[:d]),
        conv_transpose(d, "no_bias", bias=False),
        conv_transpose(d, "one_channel", 1, 1),
        conv_transpose(d, "kernel_1", kernel=1),
        conv_transpose(d, "stride", stride=2),
        conv_transpose(d, "output_padding", stride=2, output_padding=1, padding=1),
        conv_transpose(d, "output_padding_dilation", stride=3, dilation=2, output_padding=(1, 2)[:d], padding=2),
        conv_transpose(d, "dilation", dilation=2),
        conv_transpose(d, "groups", groups=2),
        conv_transpose(
            d, "groups_arguments", kernel=uneven, groups=2, stride=2, padding=1, output_padding=1, dilation=2
        ),
        conv_transpose(d, "depthwise", out=4, groups=4),
        conv_transpose(d, "depthwise_multiplier", out=8, groups=4, stride=2, bias=False),
        Case(
            f"conv_transpose{d}d_output_size",
            lambda: CONV_TRANSPOSE[d](4, 6, 3, stride=2, padding=1),
            lambda batch: Call((torch.randn(batch, 4, *space),), {"output_size": [2 * n for n in space]}),
        ),
        Case(
            f"conv_transpose{d}d_permuted",
            lambda: CONV_TRANSPOSE[d](4, 6, 3, stride=2),
            randn_as(channels_second, *space, 4),
        ),
    ]
    if d == 2:
        cases.append(
            Case(
                f"conv_transpose{d}d_channels_last",
                lambda: CONV_TRANSPOSE[d](4, 6, 3, groups=2, padding=1),
                randn_as(channels_last, 4, *space),
            )
        )
    return cases


# What one and two dimensions cannot show: a third number in each argument, torch's own kernels for it, its layout.
CONVOLUTIONS_3D = [
    Case(
        "conv3d",
        lambda: nn.Conv3d(4, 6, UNEVEN, stride=(2, 1, 2), padding=(1, 2, 0), dilation=(1, 2, 1)),
        randn(4, *SPACE[3]),
        bad=(bad(r"[Cc]onv3d.*\(4, ", (4, *SPACE[3])),),
    ),
    conv_laid_out(3, "channels_last_groups", channels_last, groups=2, stride=(1, 2, 3)),
    conv(3, "replicate_uneven", kernel=UNEVEN, stride=2, padding=(1, 2, 0), padding_mode="replicate"),
    conv(3, "same_uneven", kernel=UNEVEN, dilation=2, padding="same"),
    Case(
        "conv_transpose3d",
        lambda: nn.ConvTranspose3d(4, 6, UNEVEN, stride=(2, 1, 2), padding=(1, 0, 1), dilation=(1, 2, 1)),
        randn(4, 2, 3, 4),
        bad=(bad(r"(?i)conv_?transpose3d.*\(4, ", (4, 2, 3, 4)),),
    ),
    conv_transpose(3, "output_padding", stride=3, dilation=2, output_padding=(1, 2, 0), padding=2, groups=2),
]

CONVOLUTIONS = [
    *(case for d in (1, 2) for make in (conv_cases, conv_transpose_cases) for case in make(d)),
    *CONVOLUTIONS_3D,
]

# --- embeddings -----------------------------------------------------------------------------------------------

WORDS = 10


def indices(*shape: int, words: int = WORDS) -> Callable[[int], Call]:
    """Random words, repeated within a sample and between samples."""
    return lambda batch: Call((torch.randint(words, (batch, *shape)),))


def one_word_each(batch: int) -> Call:
    return Call((torch.tensor([7, 2, 7])[:batch],))


class Gathered(nn.Embedding):
    """One sample in plain operations: torch's second derivative forgets scale_grad_by_freq and fails without words."""

    def forward(self, input: Tensor) -> Tensor:
        words = input.flatten()
        frequency = (words == words[:, None]).sum(1) if self.scale_grad_by_freq else torch.ones_like(words)
        share = (1 / frequency).reshape(input.shape)
        if self.padding_idx is not None:
            share = share.masked_fill(input == self.padding_idx, 0)
        rows, share = self.weight[input], share.unsqueeze(-1)
        return rows * share + (rows * (1 - share)).detach()


def embedding(name: str, call: Callable[[int], Call], sum_of_rows: bool = True, **arguments: object) -> Case:
    return Case(
        f"embedding_{name}",
        lambda: nn.Embedding(WORDS, 4, **arguments),
        call,
        twin=None if "max_norm" in arguments else lambda: Gathered(WORDS, 4, **arguments),
        sum_of_rows=sum_of_rows,
    )


def repeats(batch: int) -> Call:
    """In the first sample one word four times, in all samples the padding word."""
    words = torch.randint(WORDS, (batch, 6))
    words[:1, :4] = 5
    words[:, -1] = 2
    words[:, -2] = WORDS - 1
    return Call((words,))


def bags(offsets: list[int], last: bool = False, weights: bool = False) -> Callable[[int], Call]:
    """The first bags of a flat list of words; `offsets` has one entry more than there are bags."""

    def call(batch: int) -> Call:
        words = torch.tensor([3, 3, 2, 9, 2, 3, 0, 9, 9])[: offsets[batch]]
        starts = torch.tensor(offsets[: batch + last], dtype=torch.int64)
        kwargs = {"per_sample_weights": torch.randn(len(words))} if weights else {}
        return Call((words, starts), kwargs)

    return call


def take_bag(call: Call, i: int) -> Call:
    """Bag `i` alone, of the call that `bags` makes."""
    words, starts = call.args
    ends = [*starts.tolist(), len(words)]
    bag = slice(ends[i], ends[i + 1])
    kwargs = {name: value[bag] for name, value in call.kwargs.items()}
    return Call((words[bag], torch.zeros(1, dtype=starts.dtype)), kwargs)


def take_bag_last(call: Call, i: int) -> Call:
    words, starts = call.args
    bag = slice(int(starts[i]), int(starts[i + 1]))
    kwargs = {name: value[bag] for name, value in call.kwargs.items()}
    return Call((words[bag], torch.tensor([0, bag.stop - bag.start])), kwargs)


class OneBag(nn.EmbeddingBag):
    """One bag in plain operations: torch's own cannot be differentiated twice."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        words = input.flatten()
        if self.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(self.weight, words, self.max_norm, self.norm_type)
        if self.padding_idx is not None:
            words = words[keep := words != self.padding_idx]
        rows = self.weight[words]
        if self.scale_grad_by_freq:
            share = 1 / (words == words[:, None]).sum(1, keepdim=True)
            rows = rows * share + (rows * (1 - share)).detach()
        if per_sample_weights is not None:
            weights = per_sample_weights.flatten()
            rows = rows * (weights if self.padding_idx is None else weights[keep])[:, None]
        if not len(rows):
            return rows.sum(0, keepdim=True)
        return rows.amax(0, keepdim=True) if self.mode == "max" else getattr(rows, self.mode)(0, keepdim=True)


def embedding_bag(
    name: str,
    call: Callable[[int], Call] = repeats,
    take: Take = take_rows,
    sum_of_rows: bool = True,
    **arguments: object,
) -> Case:
    return Case(
        f"embedding_bag_{name}",
        lambda: nn.EmbeddingBag(WORDS, 4, **arguments),
        call,
        take=take,
        twin=lambda: OneBag(WORDS, 4, **arguments),
        sum_of_rows=sum_of_rows,
        torch_is_wrong="scale_grad_by_freq" in arguments,  # torch 2.13 divides by another word's frequency on the CPU
    )


def weighted(batch: int) -> Call:
    return Call(repeats(batch).args, {"per_sample_weights": torch.randn(batch, 6)})


BAGS = [0, 4, 4, 9]  # the second bag is empty

EMBEDDINGS = [
    Case("embedding", lambda: nn.Embedding(WORDS, 4), indices(6)),
    embedding("1d_index", one_word_each),
    embedding("3d_index", indices(2, 5)),
    embedding("repeats", repeats),
    embedding("int32", lambda batch: repeats(batch).map(lambda t: t.int())),
    embedding("transposed_index", lambda batch: Call((torch.randint(WORDS, (6, batch)).T,))),
    embedding("no_words", indices(0)),
    embedding("padding_idx", repeats, padding_idx=2),
    embedding("padding_idx_negative", repeats, padding_idx=-1),
    embedding("padding_idx_3d", indices(2, 5), padding_idx=2),
    embedding("scale_grad_by_freq", repeats, sum_of_rows=False, scale_grad_by_freq=True),
    embedding("scale_grad_by_freq_padding_idx", repeats, sum_of_rows=False, scale_grad_by_freq=True, padding_idx=2),
    embedding("max_norm", repeats, max_norm=1.0),
    embedding("max_norm_1", repeats, max_norm=1.0, norm_type=1.0, padding_idx=2),
    embedding("sparse", repeats, sparse=True),
    embedding("sparse_padding_idx", repeats, sparse=True, padding_idx=2),
    Case("embedding_wide", lambda: nn.Embedding(50, 40), indices(6, words=50)),
    Case("embedding_bag", lambda: nn.EmbeddingBag(WORDS, 4), repeats, twin=lambda: OneBag(WORDS, 4)),
    *(embedding_bag(mode, mode=mode) for mode in ("sum", "mean", "max")),
    *(embedding_bag(f"{mode}_padding_idx", mode=mode, padding_idx=2) for mode in ("sum", "mean", "max")),
    *(embedding_bag(f"{mode}_offsets", bags(BAGS), take_bag, mode=mode) for mode in ("sum", "mean", "max")),
    *(
        embedding_bag(f"{mode}_offsets_padding_idx", bags(BAGS), take_bag, mode=mode, padding_idx=3)
        for mode in ("sum", "mean", "max")
    ),
    *(
        embedding_bag(
            f"{mode}_include_last_offset", bags(BAGS, last=True), take_bag_last, mode=mode, include_last_offset=True
        )
        for mode in ("sum", "mean", "max")
    ),
    embedding_bag("weights", weighted, mode="sum"),
    embedding_bag("weights_padding_idx", weighted, mode="sum", padding_idx=2),
    embedding_bag("weights_offsets", bags(BAGS, weights=True), take_bag, mode="sum"),
    embedding_bag(
        "weights_include_last_offset",
        bags(BAGS, last=True, weights=True),
        take_bag_last,
        mode="sum",
        include_last_offset=True,
        padding_idx=3,
    ),
    *(
        embedding_bag(f"{mode}_scale_grad_by_freq", sum_of_rows=False, mode=mode, scale_grad_by_freq=True)
        for mode in ("sum", "mean")
    ),
    *(embedding_bag(f"{mode}_max_norm", mode=mode, max_norm=1.0, norm_type=3.0) for mode in ("sum", "mean", "max")),
    *(embedding_bag(f"{mode}_sparse", mode=mode, sparse=True) for mode in ("sum", "mean")),
]

# --- norms ----------------------------------------------------------------------------------------------------

BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d}


def norm(name: str, build: Callable[[], nn.Module], *shape: int, **fields: object) -> Case:
    return Case(name, build, randn(*shape), **fields)


def norm_cases(d: int) -> list[Case]:
    batch_norm, instance_norm, space = BATCH_NORM[d], INSTANCE_NORM[d], (5, 2)[:d]
    b, i = f"batch_norm{d}d", f"instance_norm{d}d"
    tracks = {"affine": True, "track_running_stats": True}
    cases = [
        norm(b, lambda: batch_norm(4), 4, *space, training=False),
        norm(f"{b}_eps", lambda: batch_norm(4, eps=0.1, momentum=None), 4, *space, training=False),
        norm(f"{b}_no_affine", lambda: batch_norm(4, affine=False), 4, *space, training=False),
        norm(f"{b}_no_bias", lambda: batch_norm(4, bias=False), 4, *space, training=False),
        Case(f"{b}_permuted", lambda: batch_norm(4), randn_as(channels_second, *space, 4), training=False),
        norm(i, lambda: instance_norm(4), 4, *space),
        norm(f"{i}_affine", lambda: instance_norm(4, affine=True), 4, *space),
        norm(f"{i}_affine_no_bias", lambda: instance_norm(4, eps=0.1, affine=True, bias=False), 4, *space),
        norm(f"{i}_affine_eval", lambda: instance_norm(4, affine=True), 4, *space, training=False),
        norm(f"{i}_track", lambda: instance_norm(4, **tracks), 4, *space),
        norm(f"{i}_track_momentum", lambda: instance_norm(4, **tracks, momentum=None), 4, *space),
        norm(f"{i}_track_eval", lambda: instance_norm(4, **tracks), 4, *space, training=False),
        Case(
            f"{i}_permuted",
            lambda: instance_norm(4, affine=True),
            randn_as(channels_second, *space, 4),
            bad=(bad(rf"(?i)instance_?norm{d}d", (4, *space)),),
        ),
    ]
    if d == 2:
        call = randn_as(channels_last, 4, *space)
        cases.append(Case(f"{b}_channels_last", lambda: batch_norm(4), call, training=False))
    return cases


NORMS = [
    norm("layer_norm", lambda: nn.LayerNorm(4), 6, 4, bad=(bad(r"(?i)layer_?norm.*\(4,\)", (4,)),)),
    norm("layer_norm_2d", lambda: nn.LayerNorm(4), 4),
    norm("layer_norm_4d", lambda: nn.LayerNorm(4, eps=0.1), 2, 5, 4),
    norm("layer_norm_no_bias", lambda: nn.LayerNorm(4, bias=False), 6, 4),
    norm("layer_norm_no_affine", lambda: nn.LayerNorm(4, elementwise_affine=False), 6, 4),
    norm("layer_norm_shape", lambda: nn.LayerNorm((5, 4)), 2, 5, 4, bad=(bad(r"(?i)layer_?norm.*\(5, 4\)", (5, 4)),)),
    norm("layer_norm_shape_whole", lambda: nn.LayerNorm([5, 4], bias=False), 5, 4),
    Case("layer_norm_transposed", lambda: nn.LayerNorm(4), randn_as(lambda x: x.mT, 4, 6)),
    norm("rms_norm", lambda: nn.RMSNorm(4), 6, 4, bad=(bad(r"(?i)rms_?norm.*\(4,\)", (4,)),)),
    norm("rms_norm_2d", lambda: nn.RMSNorm(4, eps=0.1), 4),
    norm("rms_norm_shape", lambda: nn.RMSNorm((5, 4)), 2, 5, 4),
    norm("rms_norm_no_affine", lambda: nn.RMSNorm(4, elementwise_affine=False), 6, 4),
    norm("group_norm", lambda: nn.GroupNorm(2, 4), 4, 5, bad=(bad(r"(?i)group_?norm", (4,)),)),
    norm("group_norm_2d", lambda: nn.GroupNorm(2, 4), 4),
    norm("group_norm_4d", lambda: nn.GroupNorm(2, 4, eps=0.1), 4, 5, 6),
    norm("group_norm_5d", lambda: nn.GroupNorm(4, 4), 4, 2, 5, 6),
    norm("group_norm_one_group", lambda: nn.GroupNorm(1, 4), 4, 5, 6),
    norm("group_norm_no_bias", lambda: nn.GroupNorm(2, 4, bias=False), 4, 5),
    norm("group_norm_no_affine", lambda: nn.GroupNorm(2, 4, affine=False), 4, 5),
    Case("group_norm_channels_last", lambda: nn.GroupNorm(2, 4), randn_as(channels_last, 4, 5, 6)),
    Case("group_norm_permuted", lambda: nn.GroupNorm(2, 4), randn_as(channels_second, 5, 6, 4)),
    norm("batch_norm1d_2d", lambda: nn.BatchNorm1d(4), 4, training=False),
    *(case for d in (1, 2) for case in norm_cases(d)),
    Case("batch_norm3d_channels_last", lambda: nn.BatchNorm3d(4), randn_as(channels_last, 4, 5, 2, 6), training=False),
    Case(
        "instance_norm3d_affine",
        lambda: nn.InstanceNorm3d(4, affine=True),
        randn(4, 5, 2, 6),
        bad=(bad(r"(?i)instance_?norm3d", (4, 5, 2, 6)),),
    ),
    norm("prelu", lambda: nn.PReLU(), 6, 4),
    Case("prelu_flat", lambda: nn.PReLU(), lambda batch: Call((-torch.rand(batch),))),
    norm("prelu_channels", lambda: nn.PReLU(4, init=0.1), 4, 6),
    norm("prelu_channels_2d", lambda: nn.PReLU(4), 4),
    norm("prelu_channels_4d", lambda: nn.PReLU(4), 4, 5, 6),
    Case("prelu_permuted", lambda: nn.PReLU(4), randn_as(lambda x: x.mT, 6, 4)),
]

# --- recurrent layers -----------------------------------------------------------------------------------------

STEPS, FEATURES, HIDDEN = 5, 4, 6


class Sequences(nn.Module):
    """A recurrent layer as a function of tensors `(B, ...)` with a value `(B, features)`: the outputs and all states.

    Lengths make it pack its input, states come as `(B, layers * directions, features)`.
    """

    def __init__(self, layer: nn.RNNBase, *, enforce_sorted: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.enforce_sorted = enforce_sorted

    def forward(self, x: Tensor, *states: Tensor, lengths: Tensor | None = None) -> Tensor:
        steps, batch_first = x.shape[1], self.layer.batch_first
        given: Any = x if batch_first else x.transpose(0, 1)
        if lengths is not None:
            given = pack_padded_sequence(given, lengths, batch_first, self.enforce_sorted)
        first = tuple(state.transpose(0, 1).contiguous() for state in states)
        hx = None if not first else first if isinstance(self.layer, nn.LSTM) else first[0]
        y, last = self.layer(given, hx)
        if lengths is not None:
            assert isinstance(y, PackedSequence)
            y, returned = pad_packed_sequence(y, batch_first, total_length=steps)
            assert torch.equal(returned, lengths)
        y = y if batch_first else y.transpose(0, 1)
        last = last if isinstance(self.layer, nn.LSTM) else (last,)
        return torch.cat([y.flatten(1), *(state.transpose(0, 1).flatten(1) for state in last)], 1)


class Unrolled(nn.Module):
    """A cell over time, the loop written by the user."""

    def __init__(self, layer: nn.RNNCellBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        lstm = isinstance(self.layer, nn.LSTMCell)
        hx: Any = None if not states else states if lstm else states[0]
        outputs = []
        for step in x.unbind(1):
            hx = self.layer(step, hx)
            outputs.append(hx[0] if lstm else hx)
        return torch.cat([*outputs, hx[1]] if lstm else outputs, 1)


KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTM, {}),
    "lstm_proj": (nn.LSTM, {"proj_size": 2}),
    "gru": (nn.GRU, {}),
}

CELLS: dict[str, tuple[type[nn.RNNCellBase], dict[str, Any]]] = {
    "tanh": (nn.RNNCell, {}),
    "relu": (nn.RNNCell, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTMCell, {}),
    "gru": (nn.GRUCell, {}),
}


def recurrence(states: Sequence[tuple[int, ...]], lengths: tuple[int, ...] = ()) -> Callable[[int], Call]:
    """An input, the initial states, and the lengths of the first samples."""

    def call(batch: int) -> Call:
        tensors = [torch.randn(batch, *shape) for shape in ((STEPS, FEATURES), *states)]
        return Call(tuple(tensors), {"lengths": torch.tensor(lengths[:batch], device="cpu")} if lengths else {})

    return call


def recurrent(
    kind: str,
    name: str = "",
    *,
    states: bool = False,
    lengths: tuple[int, ...] = (),
    ordered: bool = False,
    **more: Any,
) -> Case:
    layer, arguments = KINDS[kind]
    arguments = {"batch_first": True, **arguments, **more}
    number = arguments.get("num_layers", 1) * (2 if arguments.get("bidirectional") else 1)
    sizes = [arguments.get("proj_size") or HIDDEN, *([HIDDEN] if layer is nn.LSTM else [])]
    return Case(
        "_".join(filter(None, [kind, name])),
        lambda: Sequences(layer(FEATURES, HIDDEN, **arguments), enforce_sorted=ordered),
        recurrence([(number, size) for size in sizes] if states else (), lengths),
    )


def recurrent_cell(kind: str, name: str, *, states: bool = False, **more: Any) -> Case:
    cell, arguments = CELLS[kind]
    number = 2 if cell is nn.LSTMCell else 1
    return Case(
        f"{kind}_cell{name}",
        lambda: Unrolled(cell(FEATURES, HIDDEN, **arguments, **more)),
        recurrence([(HIDDEN,)] * number if states else ()),
    )


RECURRENT = [
    *(recurrent(kind) for kind in KINDS),
    *(recurrent(kind, "states_time_first", states=True, batch_first=False) for kind in KINDS),
    *(recurrent(kind, "no_bias_both_ways", bias=False, bidirectional=True) for kind in KINDS),
    *(recurrent(kind, "deep_both_ways", num_layers=2, bidirectional=True, states=True) for kind in KINDS),
    *(recurrent(kind, "packed", lengths=(2, 5, 1), states=True, batch_first=False) for kind in KINDS),
    *(
        recurrent(kind, "packed_deep_both_ways", lengths=(2, 4, 4), states=True, num_layers=2, bidirectional=True)
        for kind in KINDS
    ),
    recurrent("lstm", "packed_sorted", lengths=(5, 3, 1), ordered=True, bidirectional=True, states=True),
    recurrent("gru", "packed_no_bias", lengths=(1, 1, 1), bias=False),
    recurrent("gru", "dropout_0_three_layers", num_layers=3, dropout=0.0),
    *(
        recurrent_cell(kind, name, **more)
        for kind in CELLS
        for name, more in (("", {"states": True}), ("_no_bias", {"bias": False}))
    ),
]

# --- modules with parameters of their own: the general rule -----------------------------------------------------


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Position(nn.Module):
    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, length, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position[:, : x.shape[1]]


class ClassToken(nn.Module):
    """A parameter of its own, expanded over the batch, and layers below it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, size))
        self.before = nn.Linear(size, size)
        self.after = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 5))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(x.shape[0], -1, -1)
        return self.after(torch.cat([token, self.before(x)], 1).tanh())


class Holder(nn.Module):
    """Parameters in a list and in a dict belong to the module that uses them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(size, size) for _ in range(2)])
        self.biases = nn.ParameterDict({"first": torch.randn(size), "second": torch.randn(size)})

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases.values(), strict=True):
            x = torch.tanh(x @ weight + bias)
        return x


class Gate(nn.Module):
    """A keyword argument, a shared child used twice and a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(()))
        self.inner = nn.Sequential(Scale(size), nn.Linear(size, size))
        self.register_buffer("offset", torch.randn(size))

    def forward(self, x: Tensor, *, context: Tensor) -> Tensor:
        return self.gate.sigmoid() * self.inner(x) + self.inner(context + self.offset).sin()


GENERAL = [
    Case("scale", lambda: Scale(4), randn(6, 4)),
    Case("scale_2d", lambda: Scale(4), randn(4)),
    Case("position", lambda: Position(7, 4), randn(6, 4)),
    Case("class_token", lambda: ClassToken(4), randn(6, 4)),
    Case("holder", lambda: Holder(4), randn(6, 4)),
    Case(
        "gate",
        lambda: Gate(4),
        lambda batch: Call((torch.randn(batch, 6, 4),), {"context": torch.randn(batch, 6, 4)}),
    ),
    Case(
        "network",
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            Scale(8),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(48, 5),
        ),
        randn(1, 6, 8),
    ),
]

CASES = [*LINEAR, *CONVOLUTIONS, *EMBEDDINGS, *NORMS, *RECURRENT, *GENERAL]
if "bias" not in signature(nn.GroupNorm).parameters:  # older versions of torch
    CASES = [case for case in CASES if not re.fullmatch(r"(group|batch|instance)_norm.*_no_bias", case.name)]
