"""Every error of the library, raised: who, what was found, what was wanted, what to do.

The table has an entry for each `raise` in the package, with the words of its text; a test says which lines have none.
After it come mistakes with batches that must not end in an error from the inside of torch.
"""

import ast
import contextlib
import copy
import queue
import tempfile
import threading
import traceback
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import expanded_nn as enn
import expanded_nn.functional as EF
from cases import Scale
from expanded_nn import projection_store
from expanded_nn.factored import rebuilt
from expanded_nn.recording.sharded import scattered
from families import FAMILIES, Family
from oracle import Call, assert_close_rows, loop, rows_of, sample_losses, total_loss

PACKAGE = Path(enn.__file__).parent
SAMPLES = 3


class Refusal(NamedTuple):
    """What is refused, and the words of the refusal."""

    error: type[BaseException]
    words: str
    run: Callable[[], object]


REFUSALS: list[Refusal] = []


def refused(words: str, error: type[BaseException] = enn.PerSampleError) -> Callable[..., Any]:
    """Enters a function into the table."""

    def enter(run: Callable[[], object]) -> Callable[[], object]:
        REFUSALS.append(Refusal(error, words, run))
        return run

    return enter


def on(*layers: nn.Module, **settings: Any) -> Any:
    return enn.convert(nn.Sequential(*layers)).per_sample(**{"escalate": False, **settings})


class Feed(nn.Module):
    """A root whose input says B, and a layer that is called as the test has it."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.layer, x)


def feed(layer: nn.Module, call: Callable[[Any, Tensor], Any], samples: int = SAMPLES, **settings: Any) -> Any:
    """The layer called inside a forward of so many samples."""
    return enn.convert(Feed(layer, call)).per_sample(**{"escalate": False, **settings})(torch.randn(samples, 6, 4))


def rows_held(model: nn.Module) -> None:
    model(torch.randn(SAMPLES, 4)).sum().backward()


# --- settings, conversion -------------------------------------------------------------------------------------


@refused(r'loss_reduction is \'none\'; wanted "mean" or "sum"', ValueError)
def another_reduction() -> None:
    enn.Linear(2, 2).per_sample(loss_reduction="none")


@refused(r"^per_sample: batch_size is -1; wanted a whole number, 0 or more", ValueError)
def a_negative_batch_size() -> None:
    enn.Linear(2, 2).per_sample(batch_size=-1)


@refused(r"^per_sample: batch_size is 4\.0; wanted a whole number", ValueError)
def a_batch_size_that_is_no_whole_number() -> None:
    enn.Linear(2, 2).per_sample(batch_size=4.0)  # type: ignore[arg-type]


@refused(r"^per_sample: mode is 'mean'; wanted True or False\. Give settings by name: per_sample\(loss_red", TypeError)
def a_reduction_in_place_of_the_mode() -> None:
    enn.convert(nn.Linear(2, 2)).per_sample("mean")


@refused(r"^per_sample: mode is 64; wanted True or False\. Give settings by name: .*batch_size=64\)", TypeError)
def a_batch_size_in_place_of_the_mode() -> None:
    enn.per_sample(nn.Linear(2, 2), 64)  # type: ignore[arg-type]


@refused(r"^per_sample: mode is np\.True_; wanted True or False", TypeError)
def a_mode_of_numpy() -> None:
    enn.Linear(2, 2).per_sample(np.True_)  # type: ignore[arg-type]


@refused(r"^per_sample: materialize is 'no'; wanted True or False\. Write materialize=True or materialize=F", TypeError)
def a_setting_that_is_neither_on_nor_off() -> None:
    enn.Linear(2, 2).per_sample(materialize="no")  # type: ignore[arg-type]


@refused(
    r"^per_sample: there are no settings \['reduction'\]; wanted some of loss_reduction, batch_first, batch_size, "
    r"materialize, accumulate_grad, keep_factors, escalate, compare\. Correct the name; help\(model\.per_sample\)",
    TypeError,
)
def a_setting_that_is_none() -> None:
    enn.per_sample(enn.Linear(2, 2), reduction="sum")


@refused(r"^convert: inplace is 1; wanted True or False\. Write inplace=True or inplace=False", TypeError)
def converting_in_place_by_a_number() -> None:
    enn.convert(nn.Linear(2, 2), inplace=1)  # type: ignore[arg-type]


@refused(r"2 \(Linear\): the module holds parameters but is a plain one; wanted its expanded twin.*convert\(model")
def a_layer_put_in_later() -> None:
    model = enn.convert(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model.append(nn.Linear(4, 4))
    model.per_sample()


@refused(
    r"cannot be converted:\n  0 \(LazyLinear\): .*no shape yet; run the model once.*\n  1 \(SyncBatchNorm\): it mixes",
    enn.ConversionError,
)
def modules_that_cannot_be_converted() -> None:
    enn.convert(nn.Sequential(nn.LazyLinear(3), nn.SyncBatchNorm(3)))


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, graph: Any, edge_index: Tensor | None = None, batch: Tensor | None = None) -> Tensor:
        x, (start, end) = (graph, edge_index) if edge_index is not None else (graph.x, graph.edge_index)
        x = self.layer(x).index_add(0, end, self.layer(x)[start])
        return x if batch is None else torch.zeros(2, 3).index_add(0, batch, x)


NODES, EDGES = torch.ones(5, 3), torch.tensor([[0, 1, 4], [1, 2, 3]])
NODES_REFUSED = (
    r"Graphs: its edge_index joins the rows of its input, .*not samples; .*"
    r"one graph at a time, per_sample\(batch_size=1, .* per_sample\(batch_size=B\)"
)


@refused(NODES_REFUSED)
def graphs_told_apart_by_a_batch_vector() -> None:
    enn.convert(Graphs()).per_sample()(NODES, EDGES, batch=torch.tensor([0, 0, 0, 1, 1]))


@refused(NODES_REFUSED)
def a_graph_in_an_object() -> None:
    enn.convert(Graphs()).per_sample()(SimpleNamespace(x=NODES, edge_index=EDGES))


class AsksForClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + (0 * self.second(x) if type(self.first) is nn.Linear else 0)


@refused(
    r"AsksForClass: its results do not depend on second\.weight, and those of the plain model do; wanted a forward "
    r"that does the same in both\. .*isinstance\(layer, nn\.Linear\) in place of type\(layer\) is nn\.Linear"
)
def a_forward_that_asks_for_the_class_of_a_layer() -> None:
    enn.convert(AsksForClass()).per_sample()(torch.randn(4, 3))


@refused(r"Linear cannot be copied .*in place: convert\(model, inplace=True\)", enn.ConversionError)
def a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(2, 2)
    model.kept = model(torch.ones(1, 2))
    enn.convert(model)


@refused(
    r"Linear cannot be copied \(cannot pickle .*lock.*\).*in place: convert\(model, inplace=True\)", enn.ConversionError
)
def a_model_that_holds_a_lock() -> None:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    enn.convert(model)


@refused(r"OptimizedModule is, or holds, what torch.compile\(model\) returns. Convert first", enn.ConversionError)
def a_model_that_was_compiled_first() -> None:
    enn.convert(torch.compile(nn.Linear(2, 2), backend="eager"))


class Reduced(nn.Module):
    """It is copied by a function of its own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, features)

    def __reduce__(self) -> Any:
        return Reduced, (self.layer.out_features,)


@refused(r"^Reduced: the class has a __reduce__ of its own.*revert\(model, inplace=True\); convert that again")
def a_copy_by_a_method_of_the_class() -> None:
    copy.deepcopy(enn.convert(Reduced(3)))


def scripted(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@refused(
    r"Linear cannot be copied \(.*cannot be pickled\).*in place: convert\(model, inplace=True\)", enn.ConversionError
)
def a_model_with_a_scripted_function() -> None:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch advises against scripts
        model.activation = torch.jit.script(scripted)
    enn.convert(model)


@refused(
    r"Sequential cannot be copied \(hooks of .*weight_norm, spectral_norm, prune\) .* computed 0\.weight, 2\.bias: "
    r"parametrizations .* can be copied; or set them to None\)\. Convert it in place: convert\(model, inplace=True\)",
    enn.ConversionError,
)
def pruned_layers_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    for layer, name in ((model[0], "weight"), (model[2], "bias")):
        prune.l1_unstructured(layer, name, 0.5)
    enn.convert(model)


@refused(r"Linear\.double refers to this model.*convert\(model, inplace=True\)", enn.ConversionError)
def a_function_that_refers_to_the_model() -> None:
    model = nn.Linear(2, 2)
    model.double = lambda: 2 * model.weight
    enn.convert(model)


@refused(r"Mine is derived from an expanded class.*Derive it from the torch.nn class", enn.ConversionError)
def reverting_a_class_on_top_of_ours() -> None:
    class Mine(enn.Linear):
        pass

    enn.revert(Mine(2, 2))


@refused(r"Wrong expands Softplus but does not derive from it. Declare it as `class Wrong\(Expanded, Soft", TypeError)
def expanding_without_deriving() -> None:
    class Wrong(nn.Module):
        pass

    enn.expands(nn.Softplus)(Wrong)


@refused(r"^expands: it decorates .*Plainly.*; wanted a class that derives from expanded_nn\.Expanded", TypeError)
def a_twin_that_is_no_expanded_module() -> None:
    class Plain(nn.Module):
        pass

    @enn.expands(Plain)
    class Plainly(Plain):
        def expanded_forward(self, x: Tensor) -> Tensor:
            return x


@refused(r"^expands: it decorates a function; wanted a class that derives from expanded_nn\.Expanded", TypeError)
def a_function_as_a_twin() -> None:
    enn.expands(nn.Softplus)(nn.functional.relu)


@refused(r"^expands: it is given the class Linear; wanted a class of modules, .*Write @expands\(TheClass\)", TypeError)
def a_decorator_without_the_class_that_it_expands() -> None:
    enn.expands(enn.Linear)


@refused(r"^alone: it is given a Linear; wanted a class of modules, or its full name.*type\(module\)", TypeError)
def a_module_alone() -> None:
    enn.alone(nn.Linear(2, 2))  # type: ignore[type-var]


@refused(r"^alone: it is given 'Linear'; wanted .* full name, \"package\.module\.Class\"", TypeError)
def a_name_without_its_package() -> None:
    enn.alone("Linear")


@refused(r"Empty has to define expanded_forward", NotImplementedError)
def a_layer_without_a_forward() -> None:
    class Empty(enn.Expanded):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    Empty().per_sample()(torch.ones(SAMPLES, 2))


# --- who is a sample ------------------------------------------------------------------------------------------


@refused(r"^Sequential: no argument is a tensor with a dimension; wanted .* for the samples.*batch_size=")
def no_tensor_to_count() -> None:
    on(nn.Linear(2, 2))([1, 2])


@refused(r"^1 \(Linear\): it is called with 6 samples, .* the 3 samples of an .*one_pass\(model, 3\).*detach")
def samples_made_of_other_samples() -> None:
    model = on(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1](model[0](torch.randn(3, 4)).repeat_interleave(2, 0))


@refused(
    r"^Sequential: its result comes from the 1 samples of an earlier .*kept.*one_pass\(model, 3\).*detach what is kept"
)
def samples_made_of_others_that_were_kept() -> None:
    model = on(nn.Linear(4, 4), nn.Linear(4, 2))
    kept = model[0](torch.randn(1, 4))
    model[0].register_forward_hook(lambda layer, args, output: output + kept)
    model(torch.randn(3, 4))


@refused(r"^1 \(Linear\): since an earlier call .* each other's places \(flip\).*sort the batch before.*detach")
def samples_in_another_order_between_two_calls() -> None:
    model = on(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1](model[0](torch.randn(3, 4)).flip(0))


@refused(r"^Sequential: a transform of torch\.func.*per_sample\(False\)")
def a_transform() -> None:
    torch.func.jacrev(on(nn.Linear(4, 2)))(torch.randn(SAMPLES, 4))


@refused(r"layer \(Linear\): input has shape \(4,\), no batch dimension; wanted .*input\.unsqueeze\(0\)")
def no_batch_dimension() -> None:
    feed(nn.Linear(4, 2), lambda layer, x: layer(x[0, 0]))


@refused(r"layer \(Linear\): input of shape \(1, 4\) has one row, but was computed from 3 rows.*do not mix")
def the_mean_over_the_batch() -> None:
    feed(nn.Linear(4, 4), lambda layer, x: layer(layer(x[:, 0]).mean(0, keepdim=True)))


@refused(
    r"layer \(Linear\): input of shape \(1, 18, 4\) has one row, but the numbers of all 3 samples; wanted one row per "
    r"sample\. Keep the batch in a dimension of its own; or expand"
)
def all_samples_as_one_sequence() -> None:
    feed(nn.Linear(4, 2), lambda layer, x: layer(x.reshape(1, -1, 4)))


@refused(r"layer \(Embedding\): input of shape \(1, 72\) has one row, but the numbers of all 3 samples")
def indices_of_all_samples_as_one_sequence() -> None:
    feed(nn.Embedding(9, 2), lambda layer, x: layer(x.long().abs().reshape(1, -1)))


@refused(
    r"layer \(GRU\): input of shape \(3, 1, 4\) has one row in dimension 1, where the layer has the samples, and 3 in "
    r"dimension 0, where the model has them; wanted .* say per_sample\(batch_first=False\); .* batch_first=True"
)
def one_sample_whose_time_is_taken_for_samples() -> None:
    feed(nn.GRU(4, 2), lambda layer, x: layer(2 * x[:, :1])[0][-1])


@refused(
    r"layer \(MultiheadAttention\): query has shape \(1, 3, 4\): the layer has its samples in dimension 1 "
    r"\(batch_first=False\), and the model has them in dimension 0, where there is one; .*per_sample\(batch_first"
)
def samples_of_one_step_that_are_taken_for_one_sample() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.MultiheadAttention(4, 1), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = self.layer(x, x, x)[0]
            return mixed * self.scale

    on(Scaled())(torch.randn(1, 3, 4))


@refused(r"layer \(\w+\): an argument of shape \(1, 18, 4\) has one row, but the numbers of all 3 samples")
def all_samples_as_one_sequence_of_a_module() -> None:
    feed(Own(lambda module, x: x * module.scale), lambda layer, x: layer(x.reshape(1, -1, 4)))


@refused(r"layer \(Linear\): input has shape \(18, 4\), 18 rows in dimension 0 \(folded batch of 3 x 6\).*unflatten")
def a_folded_batch() -> None:
    feed(nn.Linear(4, 2), lambda layer, x: layer(x.flatten(0, 1)))


@refused(
    r"^1 \(Linear\): input has shape \(12, 4\), 12 rows in dimension 0 \(folded batch of 3 x 4\); .* share\. Keep the "
    r"batch in a dimension of its own: 0 \(Flatten\) folds it, so leave that out, or flatten from dimension 1 on; or "
    r"say where .*batch_size=\.\.\., batch_first=\.\.\.\)\. B = 3 comes from the first tensor of the call\.$"
)
def a_batch_folded_by_a_flatten() -> None:
    on(nn.Flatten(0, 1), nn.Linear(4, 2), nn.Flatten())(torch.randn(3, 4, 4))


@refused(
    r"^0 \(Linear\): input has shape \(12, 4\), .*\(other rows\); wanted 5 rows, one per sample, or 1 that all share\. "
    r"B = 5 comes from per_sample\(batch_size=5\): if there are 12 samples, say so there, or leave it to the first "
    r"tensor of each call, batch_size=None\. Keep .*; or say where .* stand, per_sample\(batch_first=\.\.\.\)\.$"
)
def a_setting_that_says_other_samples() -> None:
    on(nn.Linear(4, 2), batch_size=5)(torch.randn(12, 4))


@refused(
    r"^0 \(Linear\): input has shape \(6, 4\), .*\(folded batch of 3 x 2\); wanted 3 rows, one per sample, or 1 that "
    r"all share\. B = 3 comes from one_pass: if there are 6 samples, say so there\. K.*batch_first=.*\)\.$"
)
def a_pass_that_says_other_samples() -> None:
    model = on(nn.Linear(4, 2))
    with enn.one_pass(model, batch_size=3):
        model[0](torch.randn(6, 4))


@refused(r"^Linear: input has shape \(6, 4\), 6 rows .*B = 3 comes from its weights, .*repeat_interleave\(rows, 0\)")
def weights_of_their_own_for_several_rows_each() -> None:
    model = enn.convert(nn.Linear(4, 2)).per_sample()
    functional_call(model, {"weight": torch.randn(3, 2, 4), "bias": torch.randn(3, 2)}, (torch.randn(6, 4),))


@refused(
    r"layer \(Linear\): input has shape \(2, 4\), 2 rows .*layer\(x\)\[chosen\].*B = 3 comes from the first tensor"
)
def some_of_the_samples() -> None:
    feed(nn.Linear(4, 2), lambda layer, x: layer(x[[0, 2], 0]))


@refused(
    r"layer \(LSTM\): input has shape \(6, 6, 4\): .* both have size 6; .*batch_first=False\) if they stand second"
)
def samples_of_a_time_first_layer() -> None:
    feed(nn.LSTM(4, 4), lambda layer, x: layer(x)[0], samples=6)


@refused(
    r"layer \(LSTM\): input has shape \(3, 6, 4\), 6 rows .* share\. If the samples stand in dimension 1, say "
    r"per_sample\(batch_first=False\)\. If the samples stand in dimension 0, give .* batch_first=True"
)
def a_time_first_layer_on_samples_first() -> None:
    feed(nn.LSTM(4, 2), lambda layer, x: layer(x))


@refused(r"layer \(Linear\): input of shape \(1, 6, 4\) is a slice of a tensor of shape \(3, 6, 4\).*all 3 samples")
def a_loop_over_the_samples() -> None:
    feed(nn.Linear(4, 2), lambda layer, x: [layer(x[i : i + 1]) for i in range(3)])


@refused(r"layer \(Embedding\): input has shape \(3,\) and may be positions that all 3 .*unsqueeze\(0\) for positions")
def an_index_of_two_readings() -> None:
    feed(nn.Embedding(9, 4), lambda layer, x: layer(torch.arange(3)))


@refused(r"layer \(Embedding\): input of shape \(1, 6\) is a slice of a tensor of shape \(3, 6\)")
def a_slice_of_an_index() -> None:
    index = torch.randint(9, (3, 6))
    enn.convert(Feed(nn.Embedding(9, 4), lambda layer, x: layer(x[:1]))).per_sample(escalate=False)(index)


@refused(r"layer \(Embedding\): input has shape \(6, 2\), 6 rows \(folded batch of 3 x 2\).*unsqueeze\(0\) if all")
def a_folded_index() -> None:
    feed(nn.Embedding(9, 4), lambda layer, x: layer(torch.randint(9, (6, 2))))


@refused(r"layer \(EmbeddingBag\): offsets say 2 bags; wanted 3, one per sample.*batch_size=")
def other_bags() -> None:
    feed(nn.EmbeddingBag(9, 4), lambda layer, x: layer(torch.arange(6), torch.tensor([0, 3])), batch_size=SAMPLES)


@refused(
    r"0 \(BatchNorm1d\): it normalizes by the statistics of the batch.*GroupNorm\(32, C\)\), as Opacus' "
    r"ModuleValidator\.fix\(model\) does before convert; or running statistics: \.eval\(\) with track"
)
def batch_norm_in_train_mode() -> None:
    on(nn.BatchNorm1d(4))(torch.randn(SAMPLES, 4))


def step_before_backward(layer: nn.Module, x: Tensor) -> None:
    model = on(nn.Identity(), layer)
    result = model(x)
    loss = (result[0] if isinstance(result, tuple) else result).square().mean()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loss.backward()


CHANGED_EARLY = (
    r"^1\.weight\w*: it was changed in place between the forward and its backward.*backward\(\) before optim"
)


@refused(CHANGED_EARLY)
def a_linear_layer_changed_before_its_backward() -> None:
    step_before_backward(nn.Linear(4, 4), torch.randn(SAMPLES, 4))


@refused(CHANGED_EARLY)
def a_norm_changed_before_its_backward() -> None:
    step_before_backward(nn.LayerNorm(4), torch.randn(SAMPLES, 4))


@refused(CHANGED_EARLY)
def a_convolution_changed_before_its_backward() -> None:
    step_before_backward(nn.Conv1d(4, 4, 2), torch.randn(SAMPLES, 4, 5))


@refused(CHANGED_EARLY)
def a_recurrent_layer_changed_before_its_backward() -> None:
    step_before_backward(nn.LSTM(4, 4, batch_first=True), torch.randn(SAMPLES, 5, 4))


@refused(r"^Sequential: torch\.fx traces it symbolically.*wanted per-sample mode off\. .*per_sample\(False\)")
def a_symbolic_trace() -> None:
    torch.fx.symbolic_trace(on(nn.Linear(4, 4)))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's own warnings, of what is deprecated or a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@refused(r"^torch\.jit\.trace: the model is in per-sample mode; .*per_sample\(False\)")
def a_trace_of_jit() -> None:
    with quiet():
        torch.jit.trace(on(nn.Linear(4, 4)), torch.randn(SAMPLES, 4))


@refused(r"^torch\.jit\.script: the model is converted; wanted a plain one\. .*revert\(model\)")
def a_script() -> None:
    with quiet():
        torch.jit.script(enn.convert(nn.Linear(4, 4)))


@refused(r"or forward-mode differentiation, is applied to a model in per-sample mode.*per_sample\(False\)")
def forward_mode() -> None:
    x = torch.randn(SAMPLES, 4)
    with quiet(), forward_ad.dual_level():
        on(nn.Linear(4, 4))(forward_ad.make_dual(x, x))


@refused(
    r"Linear.*: input is a tensor of layout torch\.sparse_coo; wanted a dense one\. Call it with input\.to_dense\(\)"
)
def a_sparse_input() -> None:
    on(nn.Linear(4, 4))(torch.randn(SAMPLES, 4).to_sparse())


@refused(r"Linear.*: input is a nested tensor; wanted a dense one\..*to_padded_tensor\(input, 0\.0\)")
def a_nested_input() -> None:
    with quiet():
        on(nn.Linear(4, 4), escalate=True)(torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)]))


@refused(r"^clip_grad_sample_norms_: it is called within a backward, as by a hook.*Call it after backward\(\)\.")
def clipping_by_a_hook() -> None:
    model = on(nn.Linear(4, 4))
    hook = lambda _: enn.clip_grad_sample_norms_(model, 1.0)  # noqa: E731
    next(model.parameters()).register_post_accumulate_grad_hook(hook)
    model(torch.randn(SAMPLES, 4)).sum().backward()


class _Shard(nn.Module):
    """What `fully_shard` makes of a layer, as far as it is looked at."""

    def __init__(self, *, synchronized: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        group = SimpleNamespace(reduce_grads=synchronized, all_reduce_grads=True)
        self._get_fsdp_state = lambda: SimpleNamespace(_fsdp_param_groups=[group])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@refused(r"^The gradients of a model sharded by FSDP: they are held back.*Say per_sample\(accumulate_grad=False\)")
def gradients_that_are_held_back() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.fsdp, "FSDPModule", _Shard)
        on(_Shard(synchronized=False))(torch.randn(SAMPLES, 4))


@refused(r"0\.layer \(Own\): it has parameters of its own.*FSDP shards 'inner' by itself.*fully_shard\(it\)")
def a_shard_within() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.fsdp, "FSDPModule", _Shard)
        own(lambda self, x: self.inner(x) * self.scale, inner=_Shard())


@refused(r"^Feed: its forward normalizes by the statistics of the batch \(batch_norm with training=True, line .*F\.gro")
def batch_norm_as_a_function() -> None:
    feed(nn.Linear(4, 4), lambda layer, x: nn.functional.batch_norm(layer(x).flatten(1), None, None, training=True))


@refused(r"^layer \(PReLU\): input of shape \(3, 3\) in a model with batch_first=False may .*input\.unsqueeze\(-1\)")
def samples_first_or_second() -> None:
    feed(nn.PReLU(), lambda layer, x: layer(x[0, 0].expand(3, 4)[:, :3].clone()), 6, batch_first=False, batch_size=3)


# --- recurrent layers, attention ------------------------------------------------------------------------------


@refused(r"layer \(GRU\): input is a PackedSequence of 2 sequences; wanted 3, one per sample")
def other_sequences() -> None:
    feed(nn.GRU(4, 5), lambda layer, x: layer(pack_sequence([x[0], x[1]])))


@refused(r"layer \(LSTM\): input has shape \(6, 4\); wanted a batch of sequences, .*input\.unsqueeze\(0\)")
def an_unbatched_sequence() -> None:
    feed(nn.LSTM(4, 5, batch_first=True), lambda layer, x: layer(x[0]))


@refused(r"layer \(LSTMCell\): input has shape \(4,\), no batch dimension; .*input\.unsqueeze\(0\)")
def an_unbatched_step() -> None:
    feed(nn.LSTMCell(4, 5), lambda layer, x: layer(x[0, 0]))


@refused(r"Unknown nonlinearity: sigmoid", RuntimeError)
def another_nonlinearity() -> None:
    layer = enn.RNNCell(4, 5).per_sample()
    layer.nonlinearity = "sigmoid"
    layer(torch.randn(SAMPLES, 4))


def attend(call: Callable[[Any, Tensor], Any]) -> None:
    feed(nn.MultiheadAttention(4, 2, batch_first=True), call)


@refused(r"layer \(MultiheadAttention\): query has shape \(6, 4\); .*query\.unsqueeze\(0\)")
def an_unbatched_query() -> None:
    attend(lambda layer, x: layer(x[0], x[0], x[0]))


@refused(r"layer \(MultiheadAttention\): is_causal is given without attn_mask.*Pass attn_mask")
def causal_without_a_mask() -> None:
    attend(lambda layer, x: layer(x, x, x, is_causal=True))


@refused(r"layer \(MultiheadAttention\): key has shape \(3, 6, 4\), value \(3, 5, 4\); wanted one value for each key")
def more_keys_than_values() -> None:
    attend(lambda layer, x: layer(x, x, x[:, 1:]))


@refused(r"layer \(MultiheadAttention\): attn_mask has shape \(6, 5\); wanted \(6, 6\), for 3 samples and 2 heads")
def another_mask() -> None:
    attend(lambda layer, x: layer(x, x, x, attn_mask=torch.zeros(6, 5)))


@refused(r"MultiheadAttention: out_proj is a plain Linear; wanted its expanded twin")
def a_plain_projection() -> None:
    layer = enn.MultiheadAttention(4, 2, batch_first=True).per_sample()
    layer.out_proj = nn.Linear(4, 4)
    layer(*[torch.randn(SAMPLES, 6, 4)] * 3)


@refused(r"TransformerEncoderLayer: its weights have a batch dimension, its inputs are \(T, B, .*batch_first=True")
def batched_weights_of_unknown_layout() -> None:
    layer = enn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)
    weights = {name: p.detach().expand(SAMPLES, *p.shape) for name, p in layer.named_parameters()}
    torch.func.functional_call(layer, weights, (torch.randn(6, SAMPLES, 4),))


# --- operations -----------------------------------------------------------------------------------------------


@refused(r"functional\.conv1d: x has shape \(3, 4\), weight \(3, 5, 4, 3\); .*weight\.expand\(len\(x\)")
def a_convolution_without_space() -> None:
    enn.functional.conv1d(torch.randn(3, 4), torch.randn(3, 5, 4, 3))


@refused(
    r"functional\.conv2d: x has shape \(3, 2, 4, 6, 6\), .*A task of several shots is not one sample.*repeat_inter"
)
def a_convolution_of_tasks() -> None:
    enn.functional.conv2d(torch.randn(3, 2, 4, 6, 6), torch.randn(3, 5, 4, 3, 3))


@refused(r"functional\.linear: the input has shape \(2, 4\), the weight \(3, 5, 4\); .*unflatten a folded batch")
def weights_of_other_samples() -> None:
    enn.functional.linear(torch.randn(2, 4), torch.randn(3, 5, 4))


@refused(r"expanded\(weight\): it has 1 row.*of 4 sample.* have had no backward: .*within one_pass")
def a_weight_after_a_frozen_forward_of_more_samples() -> None:
    model = enn.convert(nn.ModuleDict({"frozen": nn.Linear(2, 3).requires_grad_(False), "head": nn.Linear(2, 3)}))
    model.per_sample()
    model["head"](torch.randn(1, 2))
    (model["frozen"](torch.randn(4, 2)) * enn.expanded(model["head"].bias)).sum().backward()


@refused(r"expanded\(weight\): there was no forward since the last backward; .*Call the model first")
def a_weight_expanded_after_the_backward() -> None:
    model = on(nn.Linear(4, 4))
    rows_held(model)
    enn.expanded(model[0].weight)


@refused(r"^expanded: weight is a Linear; wanted a parameter\. .*expanded\(model\.fc\.weight\)", TypeError)
def a_layer_expanded() -> None:
    enn.expanded(nn.Linear(4, 4))  # type: ignore[arg-type]


@refused(r"^PerSampleGrads: rows is a Linear; wanted a mapping .* Give it per_sample_grads\(model\)", TypeError)
def gradients_of_a_model() -> None:
    enn.PerSampleGrads(nn.Linear(4, 4))


@refused(r"^PerSampleGrads: rows\['a'\] is a list; wanted a tensor \(B, \*shape\)", TypeError)
def gradients_in_a_list() -> None:
    enn.PerSampleGrads({"a": [1.0, 2.0]})  # type: ignore[dict-item]


@refused(r"^PerSampleGrads: rows\['a'\] has no dimensions; wanted a tensor \(B, \*shape\)")
def a_gradient_without_samples() -> None:
    enn.PerSampleGrads({"a": torch.tensor(1.0)})


@refused(r"^Projection: grads is a Tensor; wanted a mapping .* Give it per_sample_grads\(model\)", TypeError)
def a_projection_of_a_tensor() -> None:
    enn.Projection(8)(torch.randn(3, 4))


def of_one_layer() -> enn.PerSampleGrads:
    model = on(nn.Linear(4, 4))
    rows_held(model)
    return enn.per_sample_grads(model)


@refused(r"^PerSampleGrads: it has no entry a slice; wanted a parameter's name.* For some samples take rows\(index\)")
def a_slice_of_gradients() -> None:
    of_one_layer()[:2]


@refused(
    r"^PerSampleGrads: it has no entry 0; .*name, one of \['0\.weight', '0\.bias'\]\. .*\{name: rows\[i\]", KeyError
)
def the_first_gradient() -> None:
    of_one_layer()[0]


@refused(r"^Projection: no parameter has per-sample gradients; wanted those of a backward.* after backward and before")
def a_projection_of_nothing() -> None:
    enn.Projection(4)(enn.per_sample_grads(on(nn.Linear(4, 4))))


@refused(r"^PerSampleGrads: it has no entry 'weight'; wanted a parameter's name, one of \['0\.weight'")
def a_name_that_is_none() -> None:
    of_one_layer()["weight"]


@refused(r"^PerSampleGrads\.rows: index is 0; wanted a slice, numbers .* For one sample write rows\(\[i\]\)", TypeError)
def the_gradients_of_a_number() -> None:
    of_one_layer().rows(0)  # type: ignore[arg-type]


@refused(
    r"^functional\.layer_norm: weight has shape \(2, 3\); wanted one for each sample, \(3, 3\)\. One that all samples "
    r"share has the shape \(3,\)\.$"
)
def other_weights_for_a_norm() -> None:
    enn.functional.layer_norm(torch.randn(3, 5, 3), (3,), torch.randn(2, 3))


@refused(
    r"weight: its \.grad was changed .* is a part of a larger tensor, .* gradient_as_bucket_view=False, .* no_sync"
)
def buckets_that_are_made_anew_between_two_backwards() -> None:
    model = on(nn.Linear(4, 4))
    rows_held(model)
    model[0].weight.grad = torch.randn(40)[8:24].view(4, 4)
    with patch("torch.distributed.is_initialized", return_value=True):
        rows_held(model)


@refused(r"^functional\.linear: bias has shape \(2, 1\); wanted one for each sample, \(2, 3\)\. One that .* \(3,\)\.$")
def other_biases_for_the_weights_of_all_samples() -> None:
    enn.functional.linear(torch.randn(2, 4), torch.randn(2, 3, 4), torch.randn(2, 1))


@refused(
    r"^functional\.embedding_bag: weight has shape \(4, 3\); wanted a table for each sample, \(5, entries, dim\)\. For "
    r"one that all samples share, \(entries, dim\), write weight\.expand\(B, -1, -1\)\.$"
)
def a_plain_table_for_bags() -> None:
    enn.functional.embedding_bag(torch.randint(4, (5, 2)), torch.randn(4, 3))


class OfSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.LSTM(3, 4, batch_first=True), nn.Parameter(torch.ones(4))

    def forward(self, sequences: PackedSequence) -> Tensor:
        return self.layer(sequences)[1][0][-1] * self.scale  # type: ignore[no-any-return]


@refused(
    r"^OfSequences: it has parameters of its own and is called with a PackedSequence, .* Hold the parameters in a "
    r"small module of their own, .* or pack within the forward\.$"
)
def a_packed_sequence_for_a_module_with_parameters() -> None:
    sequences = pack_padded_sequence(
        torch.randn(3, 5, 3), torch.tensor([2, 5, 3], device="cpu"), True, enforce_sorted=False
    )
    enn.convert(OfSequences()).per_sample()(sequences)


class OfImages(nn.Module):
    """Where a word is 0 there is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.images, self.scale = nn.Embedding(9, 4), nn.Linear(5, 4), nn.Parameter(torch.ones(4))

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        return self.words(words).masked_scatter((words == 0)[..., None], self.images(images)).mean(1) * self.scale


@refused(
    r"^OfImages: .* sample by sample; .* Where samples have unequal numbers of rows, as of images, say "
    r"per_sample\(batch_size=1\), call the model with each alone"
)
def unequally_many_images() -> None:
    words = torch.tensor([[0, 0, 3, 4], [5, 0, 1, 2], [0, 0, 0, 0]])
    enn.convert(OfImages()).per_sample()(words, torch.randn(7, 5))


@refused(r"^clip_grad_sample_norms_: no trainable parameter has per-sample gradients")
def the_norms_of_a_frozen_model() -> None:
    enn.clip_grad_sample_norms_(on(nn.Linear(4, 4).requires_grad_(False)), 1.0)


@refused(r"^PerSampleGrads\.rows: index is a list; wanted a slice, numbers .* or a mask", TypeError)
def the_gradients_of_lists() -> None:
    of_one_layer().rows([[0, 1], [0, 1]])  # type: ignore[arg-type]


@refused(r"^PerSampleGrads\.rows: index is of torch\.float64; wanted a slice, numbers .* or a mask", TypeError)
def the_gradients_of_fractions() -> None:
    of_one_layer().rows(torch.tensor([0.5]))


@refused(r"^PerSampleGrads\.rows: index is a mask \(9,\); wanted a slice, .* or a mask \(3,\)")
def the_gradients_of_a_mask_of_others() -> None:
    of_one_layer().rows(torch.ones(9, dtype=torch.bool))


@refused(r"^PerSampleGrads\.rows: index has the numbers 0 to 7; wanted a slice, numbers \(n,\) below 3 or a mask")
def the_gradients_of_a_sample_that_is_not_there() -> None:
    of_one_layer().rows(torch.tensor([0, 7]))


@refused(r"^PerSampleGrads: rows\['weight'\] is of torch\.int64; wanted gradients, of a floating dtype")
def rows_of_whole_numbers() -> None:
    enn.PerSampleGrads({"weight": torch.ones(3, 4, dtype=torch.int64)})


@refused(r"^FactoredTensor\.weighted_sum: it is given the shape \(1,\); wanted a tensor \(3,\)\.")
def one_weight_for_all_rows() -> None:
    model = on(nn.Linear(4, 4), keep_factors=True)
    rows_held(model)
    model[0].weight.grad_sample.weighted_sum(torch.ones(1))


@refused(r"^PerSampleGrads\.norms: per_parameter is '0\.weight'; wanted True or False", TypeError)
def the_norms_of_a_name() -> None:
    of_one_layer().norms("0.weight")  # type: ignore[call-overload]


@refused(r"^PerSampleGrads\.project: generator is 3; wanted a torch\.Generator\. Give a number as seed=", TypeError)
def a_number_for_a_generator() -> None:
    of_one_layer().project(4, generator=3)  # type: ignore[arg-type]


@refused(r"^PerSampleGrads\.gram: other is a Tensor; wanted a mapping .* Give it per_sample_grads\(model\)", TypeError)
def products_with_a_tensor() -> None:
    of_one_layer().gram(torch.ones(3, 20))  # type: ignore[arg-type]


@refused(r"^PerSampleGrads\.matvec: vectors is a Tensor; wanted a mapping .*model\.named_parameters\(\)", TypeError)
def products_with_one_vector() -> None:
    of_one_layer().matvec(torch.ones(20))  # type: ignore[arg-type]


@refused(r"^PerSampleGrads\.matvec: vectors\['0\.weight'\] is 1\.0; wanted a tensor", TypeError)
def products_with_numbers() -> None:
    of_one_layer().matvec({"0.weight": 1.0, "0.bias": 1.0})  # type: ignore[dict-item]


@refused(r"^PerSampleGrads\.matvec: '0\.weight' has the shapes \(4, 4\) and \(16,\); wanted the same parameters")
def products_with_a_vector_of_another_shape() -> None:
    of_one_layer().matvec({"0.weight": torch.ones(16), "0.bias": torch.ones(4)})


@refused(
    r"^PerSampleGrads\.precondition: factors is a Tensor; wanted factors by .* what kronecker\(\) returns", TypeError
)
def preconditioning_by_a_tensor() -> None:
    of_one_layer().precondition(torch.eye(4), 1.0)  # type: ignore[arg-type]


@refused(r"^PerSampleGrads\.ekfac: factors\['0\.weight'\] is a tuple; wanted KroneckerFactors", TypeError)
def an_eigenbasis_of_a_tuple() -> None:
    of_one_layer().ekfac({"0.weight": (torch.eye(4), torch.eye(4), 1)})  # type: ignore[dict-item]


@refused(r"^KroneckerFactors: factors of matrices \(2, 2\) and \(1, 1\) are added; .*factors\[name\] \+ more\[name\]")
def factors_of_two_weights() -> None:
    enn.KroneckerFactors(torch.eye(2), torch.eye(2), 1) + enn.KroneckerFactors(torch.eye(1), torch.eye(1), 1)


@refused(r"^EigenFactors: two of them are added, .*Give it to each: factors = grads\.ekfac\(factors\)", TypeError)
def two_eigenbases() -> None:
    eigen = enn.EigenFactors(torch.eye(2), torch.eye(2), torch.eye(2), 1)
    eigen + eigen


NO_ROWS: list[Callable[[enn.PerSampleGrads], object]] = [
    enn.PerSampleGrads.norms,
    enn.PerSampleGrads.sum,
    enn.PerSampleGrads.mean,
    enn.PerSampleGrads.var,
    enn.PerSampleGrads.gram,
    enn.PerSampleGrads.flatten,
    lambda grads: grads.matvec({}),
    lambda grads: grads.project(4),
]


@pytest.mark.parametrize("ask", NO_ROWS)
def test_gradients_before_any_backward(ask: Callable[[enn.PerSampleGrads], object]) -> None:
    grads = enn.per_sample_grads(on(nn.Linear(4, 4)))
    assert not grads
    words = r"^PerSampleGrads\.\w+: no parameter has per-sample gradients; .*after backward and before zero_grad"
    with pytest.raises(enn.PerSampleError, match=words):
        ask(grads)


@refused(
    r"^PerSampleGrads\.norms: no parameter has per-sample gradients; wanted those of a backward in per-sample mode"
)
def norms_of_nothing() -> None:
    enn.PerSampleGrads({}).norms()


NO_MODEL: dict[str, Callable[[Any], object]] = {
    "clip_grad_sample_norms_": lambda model: enn.clip_grad_sample_norms_(model, 1.0),
    "per_sample_grads": enn.per_sample_grads,
    "check": lambda model: enn.check(model, torch.randn(SAMPLES, 4)),
    "convert": enn.convert,
    "revert": enn.revert,
    "one_pass": lambda model: enn.one_pass(model, SAMPLES).__enter__(),
    "ProjectionStore": lambda model: enn.ProjectionStore(tempfile.mkdtemp(), enn.Projection(4), model),
}


@pytest.mark.parametrize("what", NO_MODEL)
def test_what_is_given_in_place_of_a_model(what: str) -> None:
    """As `torch.nn.utils.clip_grad_norm_` takes parameters."""
    wrong = {"a generator": nn.Linear(4, 4).parameters(), "the class Linear": nn.Linear, "None": None}
    for found, value in wrong.items():
        if value is None and what == "ProjectionStore":
            continue
        words = f"^{what}: model is {found}; wanted a model, .* Give the model itself, not its parameters"
        with pytest.raises(TypeError, match=words):
            NO_MODEL[what](value)


def test_a_mode_that_is_no_bool_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="per_sample: mode is 'off'; wanted True or False"):
        enn.per_sample(model, "off")  # type: ignore[arg-type]
    assert type(model[0]) is nn.Linear


@refused(r"^one_pass: batch_size is -1; wanted a whole number, 0 or more", ValueError)
def a_pass_of_less_than_nothing() -> None:
    with enn.one_pass(on(nn.Linear(4, 4)), -1):
        pass


@refused(r"^one_pass: batch_size is 2, inside of a forward of 3 samples; wanted the same number of samples.*outside of")
def a_pass_of_other_samples() -> None:
    model = on(nn.Linear(4, 4), nn.Linear(4, 4))

    def enter(*_: Any) -> None:
        with enn.one_pass(model, 2):
            pass

    model[1].register_forward_pre_hook(enter)
    model(torch.randn(SAMPLES, 4))


@refused(r'padding is \'wide\'; wanted numbers, "valid" or "same"', ValueError)
def a_padding_of_no_name() -> None:
    enn.functional.conv1d(torch.randn(3, 4, 6), torch.randn(3, 5, 4, 3), padding="wide")


@refused(r'padding is "same" and stride \(2,\); wanted stride 1', ValueError)
def the_same_padding_with_a_stride() -> None:
    enn.functional.conv1d(torch.randn(3, 4, 6), torch.randn(3, 5, 4, 3), stride=2, padding="same")


@refused(r"padding_idx is 9; wanted one of the 9 entries", ValueError)
def a_padding_entry_that_is_none() -> None:
    enn.functional.embedding(torch.zeros(3, 2, dtype=torch.int64), torch.randn(3, 9, 4), padding_idx=9)


def bag(input: Tensor, **arguments: Any) -> Tensor:
    return enn.functional.embedding_bag(input, torch.randn(3, 9, 4), **arguments)


@refused(r"embedding_bag: the input has 2 samples; wanted 3, as the weight. Give both the same samples")
def bags_of_other_samples() -> None:
    bag(torch.zeros(2, 2, dtype=torch.int64))


@refused(
    r"embedding_bag: input has shape \(6,\), with no offsets; wanted \(B, N\) without offsets or \(N,\)", ValueError
)
def bags_without_offsets() -> None:
    bag(torch.zeros(6, dtype=torch.int64))


@refused(r"per_sample_weights has shape \(3, 1\); wanted that of input, \(3, 2\)", ValueError)
def weights_of_another_shape() -> None:
    bag(torch.zeros(3, 2, dtype=torch.int64), mode="sum", per_sample_weights=torch.ones(3, 1))


@refused(r"mode is 'median'; wanted \"sum\", \"mean\" or \"max\"", ValueError)
def a_mode_of_no_name() -> None:
    bag(torch.zeros(3, 2, dtype=torch.int64), mode="median")


@refused(r'mode="max" supports neither scale_grad_by_freq nor sparse', ValueError)
def a_sparse_maximum() -> None:
    bag(torch.zeros(3, 2, dtype=torch.int64), mode="max", sparse=True)


@refused(r"per_sample_weights with mode='mean'; wanted mode=\"sum\"", NotImplementedError)
def a_weighted_mean() -> None:
    bag(torch.zeros(3, 2, dtype=torch.int64), mode="mean", per_sample_weights=torch.ones(3, 2))


@refused(r"^batch_norm: it normalizes by the statistics of the batch")
def the_batch_norm_of_a_batch() -> None:
    enn.functional.batch_norm(torch.randn(3, 4), torch.zeros(4), torch.ones(4), training=True)


@refused(r"Embedding: max_norm is 1\.0 and the weight is computed from other parameters.*Remove the parametrization")
def a_parametrized_table_with_a_max_norm() -> None:
    layer = parametrizations.weight_norm(nn.Embedding(9, 4, max_norm=1.0))
    enn.convert(layer).per_sample()(torch.zeros(3, 2, dtype=torch.int64))


# --- the general rule -----------------------------------------------------------------------------------------


class Own(nn.Module):
    """A parameter, and a forward that the test writes."""

    def __init__(self, forward: Callable[..., Any], **children: nn.Module) -> None:
        super().__init__()
        self.scale, self.does = nn.Parameter(torch.ones(4)), forward
        self.register_buffer("seen", torch.zeros(4))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args: Any) -> Any:
        return self.does(self, *args)


def own(forward: Callable[..., Any], *args: Any, **children: nn.Module) -> None:
    model = enn.convert(nn.Sequential(Feed(Own(forward, **children), lambda layer, x: layer(x, *args))))
    model.per_sample(escalate=False)(torch.randn(SAMPLES, 4))


@refused(r"layer \(Own\): on the whole batch its forward runs, and it fails sample by sample \(.*; wanted samples that")
def a_forward_that_fails_sample_by_sample() -> None:
    own(lambda self, x: x.reshape(SAMPLES, 4) * self.scale)


@refused(r"0\.layer \(Own\): on the whole batch its forward gives another result than sample by sample.*shared_by_all")
def a_forward_that_mixes_samples() -> None:
    own(lambda self, x: (x - x.mean(0)) * self.scale)


class Clipped(torch.autograd.Function):
    """The identity; its backward clips the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g.clamp(-0.1, 0.1)


@refused(r"0\.layer \(Own\): its results are those of single samples.*derivatives are others.*clips the sum of")
def a_backward_that_clips_the_gradient_of_a_weight() -> None:
    own(lambda self, x: x * Clipped.apply(self.scale))


@refused(r"Feed: per_sample\(batch_size=4\) has said .* 4 samples, .* shapes \(1,\), \(1, 3\); .*batch_size=\.\.\.")
def a_batch_size_of_another_batch() -> None:
    model = enn.convert(Feed(nn.Linear(3, 3), lambda layer, x: layer(x[1]) + x[0])).per_sample(batch_size=4)
    model([torch.zeros(1), torch.randn(1, 3)])


@refused(r"^text \(Linear\): input of shape \(3, 4\) is shared_by_all and has 3 rows.*wanted one row.*unsqueeze\(0\)")
def a_layer_called_alone_with_what_all_samples_share() -> None:
    model = enn.convert(nn.ModuleDict({"image": nn.Linear(4, 2), "text": nn.Linear(4, 2)})).per_sample()
    with enn.one_pass(model, 3):
        model["image"](torch.randn(3, 4))
        model["text"](enn.shared_by_all(torch.randn(3, 4)))


@refused(r"^shared_by_all: x is 3; wanted a tensor, one that a model is called with", TypeError)
def no_tensor_that_all_samples_share() -> None:
    enn.shared_by_all(3)  # type: ignore[arg-type]


@refused(
    r"Feed: in a batch of 6 some of the samples give other results without the others; .*outside of the model\. "
    r"Call it with shared_by_all"
)
def a_model_that_mixes_samples() -> None:
    model = enn.convert(Feed(nn.Linear(4, 3), lambda layer, x: layer(x - x.mean(0)))).per_sample(escalate=False)
    model(torch.randn(6, 4))


@refused(
    r"Feed: its forward runs a backward, which has added to a \.grad; now and then .*; wanted a backward after the "
    r"forward\. Return that loss, .*compare=False\)\. Clear the gradients of this call\.$"
)
def a_backward_within_a_forward() -> None:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        layer(x).sum().backward()
        return x

    feed(nn.Linear(4, 3), call)


@refused(r"Feed: in a batch of 6 gradients of samples by layer.weight are in the rows of others; .*outside of the mo")
def a_table_that_is_taken_for_samples() -> None:
    table = torch.from_numpy(torch.randn(6, 4).cpu().numpy())
    model = enn.convert(Feed(nn.Linear(4, 3), lambda layer, x: layer(x) @ layer(table).T)).per_sample(escalate=False)
    model(torch.randn(6, 4))


@refused(
    r"0\.layer \(Own\): its forward changes the parameter 0.layer.scale in place, and more each .*optimizer's step"
)
def a_forward_that_scales_a_parameter() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.scale.data.mul_(0.9)
        return x * self.scale  # type: ignore[no-any-return]

    own(forward)


@refused(r"0\.layer \(Own\): its forward changes in place what all samples share, such as a param.*optimizer's step")
def a_forward_that_sets_a_parameter() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.fill_(0.5)
        return x * self.scale  # type: ignore[no-any-return]

    own(forward)


@refused(r"0\.layer \(Own\): an argument has shape \(3, 3\), one row per sample or a matrix that all share")
def a_square_argument() -> None:
    """With noise that cannot be fixed, so that the results are not comparable."""
    noise = np.random.default_rng(0)
    own(lambda self, x, m: (x + torch.from_numpy(noise.normal(size=x.shape))) * self.scale, torch.randn(3, 3))


class OnlyPositive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight if weight.sum() > 0 else -weight


@refused(r"^ParametrizedLinear: a parametrization cannot be mapped over the weights .*data-dependent.*remove_param")
def weights_of_their_own_behind_a_parametrization() -> None:
    layer = nn.Linear(4, 2)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", OnlyPositive())
    own = {name: weight.detach().expand(3, *weight.shape) for name, weight in layer.named_parameters()}
    functional_call(enn.convert(layer).per_sample(), own, (torch.randn(3, 4),))


@refused(r"^Own: for one sample its forward returns a tensor of shape \(1, 1\); wanted size 1 in dimension 1")
def a_result_of_one_step_that_is_not_compared() -> None:
    """No plain forward can tell where the weights come with a batch dimension of their own."""
    model = enn.convert(Own(lambda self, x: x.sum((0, 2)).unsqueeze(0) * self.scale.sum())).per_sample(
        batch_first=False
    )
    torch.func.functional_call(model, {"scale": torch.ones(3, 4)}, (torch.randn(5, 3, 4),))


@refused(r"^Own: its forward keeps tensors in attribute 'kept'")
def something_kept_that_is_not_compared() -> None:
    def keeps(self: Any, x: Tensor) -> Tensor:
        self.kept = x * self.scale
        return self.kept.sin()

    functional_call(enn.convert(Own(keeps)).per_sample(), {"scale": torch.ones(3, 4)}, (torch.randn(3, 4),))


@refused(
    r"^Own: for one sample its forward returns a tensor of shape \(3, 4\); .*Give a tensor in place of a list with an e"
)
def numbers_of_the_samples_in_a_list() -> None:
    model = enn.convert(Own(lambda self, x, n: x * self.scale * torch.tensor(n).unsqueeze(1))).per_sample()
    model(torch.randn(3, 4), [1.0, 2.0, 3.0])


@refused(r"^layer \(Own\): its forward returns a tensor of shape \(6, 1\) for arguments that all samples share.*unsqu")
def a_column_in_a_time_first_model() -> None:
    feed(Own(lambda self, x: x * self.scale.sum()), lambda layer, x: layer(torch.ones(6, 1)), batch_first=False)


@refused(r"0\.layer \(Own\): its forward returns a tensor of shape \(1,\) that all samples share.*expanded\(parameter")
def a_returned_parameter_that_broadcasts() -> None:
    """As the spread of a single action: with a copy for each sample, (B,), it would meet (B, 1) as (B, B)."""
    own(lambda self, x: (x * self.scale, self.scale.sum().view(1)))


@refused(
    r"^Own: .*vmap cannot follow .*gru.* inner has batch_first=False: .*say per_sample\(batch_first=False\); if they"
)
def a_time_first_layer_beside_a_parameter() -> None:
    model = enn.convert(Own(lambda self, x: self.inner(x * self.scale)[0], inner=nn.GRU(4, 3)))
    model.per_sample(escalate=False)(torch.randn(SAMPLES, 5, 4))


@refused(r"0\.layer \(Own\): its forward does what vmap cannot follow .*@expands")
def a_branch_on_a_value() -> None:
    own(lambda self, x: x * self.scale if x.sum() > 0 else x)


@refused(
    r"0\.layer \(Own\): .*vmap cannot follow \(changing `\.data` in place under vmap is not allowed\).*first forward"
)
def a_forward_that_bounds_a_parameter() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.scale.data.clamp_(-1, 1)
        return x * self.scale  # type: ignore[no-any-return]

    own(forward)


def in_a_loop(forward: Callable[..., Any], samples: int = SAMPLES) -> None:
    """A forward after one that `vmap` cannot follow, so that the samples go one after the other."""
    model = enn.convert(Own(lambda self, x: x * self.scale if x.sum() < 1e9 else x)).per_sample(batch_size=SAMPLES)
    with pytest.warns(enn.PerSampleWarning, match="in a loop.*vmap cannot follow"):
        model(torch.randn(SAMPLES, 4))
    model.does = forward
    model(torch.randn(samples, 4))


@refused(r"^Own: its forward returns numbers that differ from sample to sample; wanted tensors")
def numbers_of_one_sample() -> None:
    in_a_loop(lambda self, x: (x * self.scale, float(x.sum())))


@refused(
    r"^layer\.weight: the parameter is also used outside of its module.* holds it\. Use it through "
    r"expanded_nn\.expanded\(weight\), .* within one_pass\(model, batch_size\)\. "
    r"Or give the second use a layer .*embedding\.weight\)\.$"
)
def a_use_outside_in_a_forward_that_cannot_start_over() -> None:
    """It changes an argument that has a graph of its own."""
    module = Feed(nn.Linear(4, 4), lambda layer, x: nn.functional.linear(layer(x.mul_(2)), layer.weight))
    enn.convert(module).per_sample()(torch.randn(SAMPLES, 4, requires_grad=True) * 1)


@refused(r"^Own: its forward keeps tensors in an object that it returns")
def an_object_of_one_sample() -> None:
    in_a_loop(lambda self, x: SimpleNamespace(cache=x * self.scale))


@refused(
    r"^Own: its forward keeps tensors in an attribute, a buffer or an argument; wanted .* keeps nothing for the next"
)
def something_left_behind_by_one_sample() -> None:
    in_a_loop(lambda self, x: self.seen.add_(1) + x * self.scale.cumprod(0))


class Beside(nn.Module):
    """Calls a module with some of the arguments."""

    def __init__(self, layer: nn.Module, numbers: int) -> None:
        super().__init__()
        self.layer, self.numbers = layer, numbers

    def forward(self, *args: Tensor) -> Any:
        return self.layer(*args[-self.numbers :])


@refused(r"^layer \(Alone\): for one sample its forward returns .* \(2, 4\); wanted a result with one row per sample")
def results_that_are_all_folded() -> None:
    model = Beside(enn.alone(type("Alone", (Own,), {}))(lambda self, rows: rows * self.scale), 1)
    enn.convert(model).per_sample(escalate=False)(torch.arange(SAMPLES).view(-1, 1), torch.randn(2 * SAMPLES, 4))


@refused(r"^layer \(Alone\): an argument has shape \(6, 4\), several rows of each sample, and on an even part of them")
def rows_that_are_not_evenly_of_the_samples() -> None:
    """As told by a second forward; in the first one they were."""
    inner = enn.alone(type("Alone", (Own,), {}))(lambda self, ids, rows: rows.view(len(ids), 2, 4).sum(1) * self.scale)
    model = enn.convert(Beside(inner, 2)).per_sample()
    model(torch.arange(SAMPLES).view(-1, 1), torch.randn(2 * SAMPLES, 4))
    model.layer.does = lambda self, ids, rows: rows.view(2 * SAMPLES, 4)[: len(ids)] * self.scale.cumprod(0)
    model(torch.arange(SAMPLES).view(-1, 1), torch.randn(2 * SAMPLES, 4))


@refused(r"^Own: no argument has one row per sample; wanted 3 rows")
def no_samples_to_take_one_by_one() -> None:
    in_a_loop(lambda self, x: x * self.scale, SAMPLES + 2)


@refused(r"of the user's own", RuntimeError)
def an_error_of_the_users_own() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        raise RuntimeError("of the user's own")

    own(forward)


@refused(
    r"0\.layer \(Own\): for one sample its forward returns a tensor of shape \(\); wanted size 1 in dimension 0.*"
    r"parameter\.expand_as.*expanded_nn\.expanded\(parameter\) in the loss"
)
def a_reduction_over_the_batch() -> None:
    own(lambda self, x: (x * self.scale).sum())


@refused(
    r"for one sample its forward returns a tensor of shape \(2, 4\); .*If each sample has 2 rows .*"
    r"unflatten\(0, \(-1, 2\)\)"
)
def words_of_all_samples_in_one_dimension() -> None:
    """As BERT's head for masked words returns them."""

    def picked(self: Any, x: Tensor) -> Tensor:
        firsts = x.shape[1] * torch.arange(x.shape[0])[:, None]
        return x.flatten(0, 1).index_select(0, torch.cat([firsts, firsts + 1], 1).flatten()) * self.scale

    def unflattened(self: Any, x: Tensor) -> Tensor:
        return picked(self, x).unflatten(0, (-1, 2))

    model, x = enn.convert(Own(unflattened)).per_sample(loss_reduction="sum"), torch.randn(3, 5, 4)
    model(x).sum().backward()  # as the error says
    assert torch.allclose(model.scale.grad_sample, x[:, :2].sum(1))
    enn.convert(Own(picked)).per_sample()(x)


@refused(r"^Own: its forward returns a number that is neither the mean nor the sum .*; .*over the words of each sample")
def a_largest_number_of_the_batch() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).max()

    enn.convert(Own()).per_sample()(torch.randn(3, 4))


class Scaling(nn.Module):
    """Has a parameter of its own, for what it is called with last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, *given: Any) -> Tensor:
        x = getattr(given[-1], "x", given[-1])
        return x * self.scale


@refused(
    r"^Scaling: for one sample its forward returns a tensor of shape \(3, 4\).*Give it the tensors of the "
    r"SimpleNamespace alone, in a dict or in a dataclass\. For squeeze"
)
def an_object_for_all_samples() -> None:
    model = enn.convert(Scaling()).per_sample()
    with enn.one_pass(model, 3):
        model(SimpleNamespace(x=torch.randn(3, 4)))


@refused(r"^Scaling: for one sample .*The first tensor of the call has one row: .* how many there are, per_sample\(bat")
def a_time_before_the_samples() -> None:
    enn.convert(Scaling()).per_sample()(torch.tensor([0.3]), torch.randn(3, 4))


@refused(
    r"^Own: its forward returns a number that depends on parameters alone, and not on the samples; wanted one number "
    r"for each sample.*number\.view\(1, 1\)\.expand.*expanded_nn\.expanded\(parameter\) in the loss"
)
def a_number_of_parameters() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Any:
            return x * self.scale, self.scale.exp()

    enn.convert(Own()).per_sample()(torch.randn(3, 4))


@refused(r"0\.layer \(Own\): its child 'inner' has a full backward hook, which a vmap does not call.*Take the hook off")
def a_backward_hook_inside() -> None:
    inner = nn.Linear(4, 4)
    inner.register_full_backward_hook(lambda *_: None)
    own(lambda self, x: self.inner(x) * self.scale, inner=inner)


@refused(r"layer \(Own\): an argument, \(\), was computed from 3 rows, .*reduction=\"none\"")
def a_loss_of_all_samples() -> None:
    model = nn.ModuleDict({"net": nn.Linear(4, 2), "layer": Own(lambda self, x: x * self.scale)})
    model = enn.convert(model).per_sample()
    model["layer"](model["net"](torch.randn(SAMPLES, 4)).square().mean())


@refused(r"layer \(Own\): an argument, \(2,\), was computed from 3 rows")
def a_mean_beside_the_samples() -> None:
    model = nn.ModuleDict({"net": nn.Linear(4, 2), "layer": Own(lambda self, x, mean: (x - mean) * self.scale.sum())})
    model = enn.convert(model).per_sample()
    h = model["net"](torch.randn(SAMPLES, 4))
    model["layer"](h, h.mean(0))


class Recomputed(torch.autograd.Function):
    """Runs a part of the forward, for which torch has no `vmap`."""

    @staticmethod
    def forward(ctx: Any, part: Any, x: Tensor) -> Tensor:
        return part(x)  # type: ignore[no-any-return]


@refused(r"0\.layer \(Own\): .*vmap cannot follow .*a setup_context and generate_vmap_rule = True")
def a_function_that_runs_a_part_of_the_forward() -> None:
    own(lambda self, x: Recomputed.apply(torch.sin, x * self.scale))


class Counted(torch.autograd.Function):
    """Counts in a buffer how often it has run; written in the old way, for which torch has no `vmap`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        count += 1
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


@refused(
    r"torch\.autograd\.grad: it was asked for a derivative by a weight that is computed from parameters.*functional"
)
def an_inner_step_within_the_forward() -> None:
    class Learns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            weights = {name: p.clone() for name, p in self.layer.named_parameters()}
            loss = torch.func.functional_call(self.layer, weights, x).square().sum()
            torch.autograd.grad(loss, list(weights.values()), allow_unused=True)  # as the package `higher` does
            return self.layer(x)

    enn.convert(Learns()).per_sample()(torch.randn(1, 3))


@refused(r"Draws: its samples go through it one after the other, and it changes a buffer .*randn_like\(self\.noise\)")
def noise_that_is_drawn_into_a_buffer() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("noise", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.noise.data.normal_()
            self.penalty = self.scale.square().sum()
            return x * self.scale * self.noise

    enn.alone(Draws)
    model = enn.convert(Draws()).per_sample()
    model._loops = True  # else it is the cause of the error that names what `vmap` cannot follow
    model(torch.randn(2, 3))


@refused(r"Leaves: a loss uses what its forward has left in attribute 'left', of which no sample.*by detach\(\)")
def a_loss_of_what_all_samples_have_together() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.left = (x * self.scale).sum(0)
            return x * self.scale

    model = enn.convert(Leaves()).per_sample()
    (model(torch.randn(2, 3)).mean() + model.left.sum()).backward()


@refused(r"0\.layer \(Own\): .*autograd Function Counted changes in place what all samples share.*@expands")
def a_function_that_changes_a_buffer() -> None:
    count = torch.zeros(())
    own(lambda self, x: Counted.apply(x * self.scale, count))


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.div_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / 2


@refused(r"0\.layer \(Own\): .*autograd Function Halved changes its argument in place.*@expands")
def a_function_that_changes_its_argument() -> None:
    own(lambda self, x: Halved.apply(x * self.scale))


class WithItsSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 1, float(x.sum())

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Tensor:
        return g


@refused(r"0\.layer \(Own\): .*autograd Function WithItsSum returns numbers that differ from sample to sample")
def a_function_whose_numbers_differ() -> None:
    own(lambda self, x: WithItsSum.apply(x * self.scale)[0])


@refused(r"0\.layer \(Own\): its forward keeps tensors in attribute 'kept'.*use_cache=False")
def a_cache() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.kept = [x.sum(0)]
        return x * self.scale

    own(forward)


@refused(r"0\.layer \(Own\): its forward keeps tensors in an argument")
def a_list_that_is_filled() -> None:
    def forward(self: Any, x: Tensor, given: list[Tensor]) -> Tensor:
        given.append(x)
        return x * self.scale

    own(forward, [])


@refused(r"0\.layer \(Own\): its forward keeps tensors in an argument")
def a_cache_that_is_filled() -> None:
    def forward(self: Any, x: Tensor, given: Any) -> Tensor:
        given.kept = x
        return x * self.scale

    own(forward, SimpleNamespace())


@refused(r"0\.layer \(Own\): its forward keeps tensors in an argument")
def a_mapping_that_is_filled() -> None:
    def forward(self: Any, x: Tensor, given: Any) -> Tensor:
        given["kept"] = x
        return x * self.scale

    own(forward, UserDict(one=torch.ones(1)))


@refused(r"0\.layer \(Own\): its forward writes what is of one sample, or computed .*the buffer 'seen'.*Move the")
def a_buffer_that_is_written() -> None:
    own(lambda self, x: x * self.scale + self.seen.add_(x[0]))


@refused(r"Own: its forward registers a hook on a tensor.*Write it as a torch\.autograd\.Function, or move")
def a_hook_on_a_tensor_of_one_sample() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        y = x * module.scale
        y.register_hook(lambda gradient: -gradient)
        return y

    enn.convert(Own(forward)).per_sample(escalate=False)(torch.ones(2, 4))


@refused(r"Own: its forward registers a hook on a parameter; wanted one that is registered outside")
def a_hook_on_a_parameter_in_the_forward() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        module.scale.register_hook(lambda gradient: -gradient)
        return x * module.scale

    enn.convert(Own(forward)).per_sample(escalate=False)(torch.ones(2, 4))


@refused(r"0\.layer \(Own\): its forward looks up bags by offsets.*Give the bags to EmbeddingBag as a 2-D input")
def bags_by_offsets_inside() -> None:
    words = torch.randint(5, (SAMPLES, 4))
    inner = nn.EmbeddingBag(5, 4)
    own(lambda self, x: self.inner(words.flatten(), 4 * torch.arange(SAMPLES)) * self.scale, inner=inner)


# --- backward -------------------------------------------------------------------------------------------------


@refused(
    r"^0\.weight: the parameter is also used outside of its module.*holds it\. If the loss has a penalty on the "
    r"weights, take the optimizer's weight_decay in its place, or add the penalty's gradient after the clipping, .*"
    r"If a sample's own loss needs the parameter, use it through .* The backward stops at the first such parameter: "
    r"check\(model, x, y, loss=\.\.\.\) names them all\.$"
)
def a_use_outside() -> None:
    model = on(nn.Linear(4, 4))
    (model(torch.randn(SAMPLES, 4)).sum() + model[0].weight.sum()).backward()


@refused(
    r"^0\.(weight|bias): the parameter is also used.*holds it\. If per_sample\(True\) came after the forward, call the "
    r"model again; if the layer is new .* call model\.per_sample\(True\)\. If this backward "
    r"needs no .* before it\. If the forward .* again\. If the loss has a"
)
def the_mode_after_the_forward() -> None:
    model = enn.convert(nn.Sequential(nn.Linear(4, 4)))
    loss = model(torch.randn(SAMPLES, 4)).sum()
    model.per_sample()
    loss.backward()


@refused(
    r"^0\.scale: .* use it through expanded_nn\.expanded\(weight\)\.view\(-1, 1, \.\.\.\), with as many dimensions as"
)
def a_scalar_used_outside() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = on(Scaled())
    (model(torch.randn(SAMPLES, 4)) * model[0].scale).sum().backward()


@refused(r"^1\.(weight|bias): the parameter belongs to a plain Linear, which was not converted.*Convert the model")
def a_layer_replaced_by_a_plain_one() -> None:
    model = on(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1] = nn.Linear(4, 2)
    rows_held(model)


@refused(r"^1\.(weight|bias): the parameter belongs to the new layer Linear, on which per_sample.*Convert the model")
def a_layer_replaced_by_one_that_was_not_switched_on() -> None:
    model = on(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1] = enn.Linear(4, 2)
    rows_held(model)


@refused(
    r"^1\.(weight|bias): the parameter belongs to the new layer Linear, on which per_sample.*per_sample\(part, False\)"
)
def a_layer_replaced_by_one_that_was_only_converted() -> None:
    model = on(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1] = enn.convert(nn.Linear(4, 2))
    rows_held(model)


@refused(r"^torch\.export: the model is in per-sample mode.*the plain forward.*per_sample\(False\)")
def an_export_in_per_sample_mode() -> None:
    torch.export.export(on(nn.Linear(4, 4)), (torch.randn(SAMPLES, 4),))


@refused(r"^create_graph=True reached a weight .* outside of a parametrization.*torch\.nn\.utils\.parametrize")
def second_derivatives_of_a_computed_weight() -> None:
    model, factor = on(nn.Linear(4, 4)), torch.ones(4, 4, requires_grad=True)
    loss = torch.func.functional_call(model, {"0.weight": factor.tanh()}, (torch.randn(SAMPLES, 4),)).square().sum()
    torch.autograd.grad(loss, factor, create_graph=True)


class Restless(nn.Module):
    """A parametrization that gives another weight in each call."""

    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * self.calls


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(x, self.scale)


@refused(r"^0 \(Gaussian\): its forward returns tensors inside of a Normal; .* make the Normal of them outside")
def a_distribution_that_is_returned() -> None:
    on(Gaussian())(torch.randn(SAMPLES, 4))


class Field(Gaussian):
    def __init__(self, later: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.later = later

    def forward(self, x: Tensor) -> Any:
        return self.later(x * self.scale)


@refused(r"^0 \(Field\): its forward returns tensors inside of a function; .*Return the tensors")
def a_function_that_is_returned() -> None:
    on(Field(lambda h: lambda t: h * t))(torch.randn(SAMPLES, 4))


@refused(r"^0 \(Field\): its forward returns tensors inside of a partial; .*Return the tensors")
def a_partial_function_that_is_returned() -> None:
    on(Field(lambda h: partial(torch.mul, h)))(torch.randn(SAMPLES, 4))


@refused(r"^0 \(Field\): its forward returns tensors inside of a generator; .*Return the tensors")
def a_generator_that_is_returned() -> None:
    on(Field(lambda h: (h * t for t in range(3))))(torch.randn(SAMPLES, 4))


@refused(r"^create_graph=True reached a parametrization that gives another weight .*Remove what is random in it")
def second_derivatives_of_a_restless_weight() -> None:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Restless())
    model = on(layer)
    torch.autograd.grad(model(torch.randn(3, 4)).square().sum(), list(model.parameters()), create_graph=True)


@refused(r"^0\.weight: the weight was computed from the output of a model in per-sample mode.*per_sample\(False\)")
def a_weight_made_of_samples() -> None:
    model = on(nn.Linear(4, 4))
    weight = model(torch.randn(SAMPLES, 4)).mean(0).expand(4, 4)
    torch.func.functional_call(model, {"0.weight": weight}, (torch.randn(SAMPLES, 4),))


@refused(r"^0\.weight: .* or from a gradient of its loss, so it mixes the samples.*per_sample\(False\)")
def a_step_that_learns_to_reweight() -> None:
    model, x = on(nn.Linear(4, 4)), torch.randn(SAMPLES, 4)
    weights = torch.zeros(SAMPLES, requires_grad=True)
    loss = (weights * model(x).square().sum(1)).sum()
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    after = {name: each - 0.1 * grad for (name, each), grad in zip(named.items(), grads, strict=True)}
    torch.func.functional_call(model, after, (x,))


@refused(r"^expanded\(weight\): the weight was computed from the output of a model in per-sample mode")
def a_weight_made_of_samples_used_outside() -> None:
    model = on(nn.Linear(4, 4))
    enn.expanded(model(torch.randn(SAMPLES, 4)).mean(0))


@refused(r"A vmapped backward \(is_grads_batched=True.*per_sample\(False\)")
def a_vmapped_backward() -> None:
    model = on(nn.Linear(4, 4))
    out = model(torch.randn(SAMPLES, 4))
    torch.autograd.grad(out, model[0].weight, torch.randn(2, *out.shape), is_grads_batched=True)


@refused(r"A vmapped backward.* with create_graph=True reached a convolution.*for each gradient")
def a_vmapped_backward_through_a_convolution() -> None:
    x = torch.randn(SAMPLES, 1, 4, requires_grad=True)
    out = on(nn.Conv1d(1, 1, 3))(x)
    torch.autograd.grad(out, x, torch.randn(2, *out.shape), is_grads_batched=True, create_graph=True)


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.autograd.grad((x * self.weight).sin().sum(), x, create_graph=True)[0]


class ByHand(torch.autograd.Function):
    """A checkpoint: what a layer gives is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.layer(x.detach())
        return None, None, *torch.autograd.grad(y, weight, g, allow_unused=True)


class CheckpointedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return ByHand.apply(self.layer, x, self.layer.weight)


@refused(r"layer \(Linear\): an autograd Function computes it again in the backward.*use_reentrant=False")
def a_checkpoint_by_hand_whose_samples_went_in_a_loop() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", enn.PerSampleWarning)
        out = on(CheckpointedByHand(), escalate=True)(torch.randn(SAMPLES, 4))
    out.sum().backward()


@refused(r"Slope\): it takes derivatives by torch\.autograd in a checkpoint.*Leave the checkpoint out")
def a_derivative_in_a_checkpoint() -> None:
    checkpoint(on(Slope()), torch.randn(SAMPLES, 4, requires_grad=True), use_reentrant=False)


@refused(r"^Sequential: another thread is in the middle of a forward of this model.*copy\.deepcopy\(model\)")
def one_model_in_two_threads() -> None:
    model, raised = on(nn.Linear(4, 4)), []

    def second() -> None:
        try:
            rows_held(model)
        except enn.PerSampleError as error:
            raised.append(error)

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    model[0].register_forward_pre_hook(meanwhile)
    rows_held(model)
    raise raised[0]


@refused(r"weight: its \.grad was changed.*is zero, which may be a sum that cancels.*cleared together")
def clipping_where_some_gradients_were_cleared() -> None:
    rows_held(model := on(nn.Linear(4, 4), nn.Linear(4, 2)))
    enn.clip_grad_sample_norms_(model, 1.0)
    torch.optim.SGD(model[0].parameters()).zero_grad(set_to_none=False)
    enn.clip_grad_sample_norms_(model, 1.0)


# --- compiled steps ---------------------------------------------------------------------------------------------


def compiled_twice(change: Callable[[nn.Module, Tensor], Any], backend: str = "eager", **options: Any) -> None:
    """Runs a compiled step twice, so that it is traced."""
    model, x = on(nn.Linear(4, 4)), torch.randn(SAMPLES, 4)
    step = enn.compile(lambda x: change(model, x), backend=backend, **options)
    for _ in range(2):
        model.zero_grad()
        step(x)


@refused(
    r"^enn\.compile: the step reads a value of a tensor in line \d+ of .*: if loss > 0:.*torch\.where in place of an if"
)
def a_step_that_reads_values() -> None:
    def change(model: nn.Module, x: Tensor) -> None:
        loss = model(x).square().sum()
        if loss > 0:
            loss.backward()

    compiled_twice(change)


@refused(
    r"^enn\.compile: the step reads a value of a tensor in line \d+ of .*: scale = 2 if torch\.equal\(bound, one\)"
)
def a_step_that_compares_tensors_of_others() -> None:
    bound, one = torch.ones(3), torch.ones(3)

    def change(model: nn.Module, x: Tensor) -> None:
        scale = 2 if torch.equal(bound, one) else 1
        (scale * model(x)).square().sum().backward()

    compiled_twice(change)


@refused(r"^enn\.compile: the step reads a value of a tensor in line \d+ of .*losses\.append.*return the tensor")
def a_step_that_keeps_values() -> None:
    losses: list[float] = []

    def change(model: nn.Module, x: Tensor) -> None:
        loss = model(x).square().sum()
        loss.backward()
        losses.append(loss.item())

    compiled_twice(change)


@refused(
    r"^enn\.compile: the step reads a value of a tensor in line \d+ of .*: print\(loss\).*return the tensor and look"
)
def a_step_that_prints() -> None:
    def change(model: nn.Module, x: Tensor) -> None:
        loss = model(x).square().sum()
        loss.backward()
        print(loss)

    compiled_twice(change)


SHOWN: dict[str, Callable[[Tensor], object]] = {
    "print": print,
    "format": lambda loss: f"{loss:.3f}",
    "percent": lambda loss: "%.3f" % loss.detach(),  # noqa: UP031
    "float": float,
    "tolist": Tensor.tolist,
    "numpy": lambda loss: loss.detach().cpu().numpy(),
    "array": lambda loss: np.asarray(loss.detach()),
}


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_a_step_that_shows_a_tensor(show: Callable[[Tensor], object]) -> None:
    def change(model: nn.Module, x: Tensor) -> None:
        loss = model(x).square().sum()
        loss.backward()
        show(loss.detach())

    words = (
        r"^enn\.compile: the step reads a value of a tensor in line \d+ of .*test_errors.*return the tensor and look"
    )
    with pytest.raises(enn.PerSampleError, match=words):
        compiled_twice(change)


@pytest.mark.parametrize("read", [print, Tensor.tolist, Tensor.numpy], ids=lambda read: read.__name__)
def test_a_step_that_reads_a_tensor_of_its_own(read: Callable[[Tensor], object]) -> None:
    """It has values when the step is traced, which the graph would keep for ever."""
    table = torch.ones(())

    def change(model: nn.Module, x: Tensor) -> None:
        model(x).square().sum().backward()
        read(table)

    with pytest.raises(enn.PerSampleError, match=r"reads a value of a tensor in line \d+ of .*: read\(table\)"):
        compiled_twice(change)


@refused(r"^enn\.compile: the step reads a value of a tensor in line \d+ of .*: .*f\"\{loss\.detach\(\)\}\"")
def a_step_that_catches_the_error_of_a_reading() -> None:
    """A graph would go the way of the `except` at each call."""

    def change(model: nn.Module, x: Tensor) -> None:
        loss = model(x).square().sum()
        with contextlib.suppress(Exception):
            f"{loss.detach()}"
            loss = 2 * loss
        loss.backward()

    compiled_twice(change)


@refused(
    r"^Rule: its forward has changed an argument in place, and has to run once more.*x = x \+ y.*call the model ag"
)
def a_new_way_after_an_argument_was_changed() -> None:
    class Rule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            x += self.w
            return x * self.w - self.w if x.shape[1] > 6 else x * self.w

    model = on(Rule())[0]
    for length in (5, 5, 7):
        model(torch.randn(3, length, 4))


@refused(
    r"^enn\.compile: step is a Linear; wanted a function .* Write @enn\.compile above def step.*torch\.co", TypeError
)
def compiling_a_model() -> None:
    enn.compile(on(nn.Linear(4, 4))[0])


@refused(r"^enn\.compile: step is 3; wanted a function of a whole training step", TypeError)
def compiling_a_number() -> None:
    enn.compile(3)  # type: ignore[arg-type]


@refused(r"^enn\.compile: backend is 3; wanted a name, such as \"inductor\", or a function", TypeError)
def compiling_by_a_number() -> None:
    enn.compile(print, backend=3)  # type: ignore[arg-type]


@refused(r"^enn\.compile: inductor has no options \['max_autotun'\]; wanted those that .* Leave them out", TypeError)
def compiling_with_a_misspelled_option() -> None:
    compiled_twice(lambda model, x: model(x).sum().backward(), backend="inductor", max_autotun=True)


@refused(r"^enn\.compile: the options \['mode'\] are given; wanted options of inductor.*inductor's by name", TypeError)
def compiling_as_torch_does() -> None:
    enn.compile(print, mode="max-autotune")


@refused(
    r"^enn\.compile: the options \['max_autotune'\] are given with backend='eager'; wanted options for ", TypeError
)
def compiling_with_options_of_another_backend() -> None:
    enn.compile(print, backend="eager", max_autotune=True)


@refused(r"enn.compile: the step calls StepLR.step\(\).*after the compiled step, and after the optimizer")
def a_scheduler_in_a_compiled_step() -> None:
    model = on(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    optimizer.step()

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        scheduler.step()

    compiled = enn.compile(step, backend="eager")
    for _ in range(3):
        compiled(torch.randn(SAMPLES, 4))


@refused(r"^grad_sample: the \.data of factored rows is set anew; wanted other numbers.*rows\.copy_\(other\)")
def the_data_of_factored_rows() -> None:
    layer = on(nn.Linear(40, 30), keep_factors=True)
    layer(torch.randn(SAMPLES, 40)).sum().backward()
    layer[0].weight.grad_sample.data = torch.ones(SAMPLES, 30, 40)


@refused(r"grad_sample: a change of the shape of factored rows in place, by unsqueeze_.*rows.unsqueeze\(0\)")
def a_shape_of_factored_rows_in_place() -> None:
    layer = on(nn.Linear(4, 4), keep_factors=True)
    layer(torch.randn(SAMPLES, 4)).sum().backward()
    layer[0].weight.grad_sample.unsqueeze_(0)


@refused(r"^enn\.compile: the step calls SGD\.step\(\).*Call the optimizer after the compiled step")
def a_step_with_an_optimizer() -> None:
    def change(model: nn.Module, x: Tensor) -> None:
        model(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    compiled_twice(change)


@refused(
    r"^enn\.compile: the step returns a tensor that requires gradients, and has called no backward.*, return result\.d"
)
def a_step_without_a_backward() -> None:
    compiled_twice(lambda model, x: model(x))


@refused(
    r"^enn\.compile: the step keeps a tensor, made in line \d+ of .*kept\.put.*Return the tensor, .*make anew what"
)
def a_tensor_that_a_compiled_step_keeps_where_nothing_is_put_back() -> None:
    kept: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def change(model: nn.Module, x: Tensor) -> None:
        model(x).sum().backward()
        kept.put(x * 2)

    compiled_twice(change)


@refused(r"^enn\.compile: the step calls DistributedDataParallel.*all_reduce\(parameter\.grad\)")
def a_step_that_calls_ddp() -> None:
    class Wrapper(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    compiled_twice(lambda model, x: wrappers.setdefault(model, Wrapper(model))(x).sum().backward())


wrappers: dict[nn.Module, nn.Module] = {}


@refused(r"^enn\.compile: the model is sharded by FSDP.*Call the step without enn\.compile")
def a_step_of_shards() -> None:
    def change(model: nn.Module, x: Tensor) -> None:
        model(x).sum().backward()
        model._recorder.leaves.sharded = True

    compiled_twice(change)


def checkpointed(sizes: Sequence[int], change: Callable[[Tensor], Tensor]) -> None:
    class Hidden:
        """An output whose tensors nobody finds."""

        __slots__ = ("value",)

        def __init__(self, value: Tensor) -> None:
            self.value = value

    def call(layer: nn.Module, x: Tensor) -> Hidden:
        return Hidden(checkpoint(lambda x: layer(change(x)), x, use_reentrant=True))

    model = on(Feed(nn.Linear(4, 4), call))
    sum(model(torch.randn(size, 4, requires_grad=True)).value.sum() for size in sizes).backward()


@refused(r"^0.layer \(Linear\): a checkpoint .* 3 samples, and 2 earlier forwards had so many.*use_reentrant=False")
def a_checkpoint_of_two_passes() -> None:
    checkpointed((3, 2, 3), lambda x: x)


@refused(r"^0.layer \(Linear\): a checkpoint .* 6 samples, and no earlier forward had so many.*use_reentrant=False")
def a_checkpoint_of_other_samples() -> None:
    checkpointed((2, 3), lambda x: torch.cat([x, x]))


@refused(r"^0 \(Linear\): a transform of torch\.func runs the layer again .*Opacus.*grad_sample_mode=.no_op")
def hooks_of_another_library() -> None:
    model = on(nn.Linear(4, 4))

    def again(*_: Any) -> None:
        torch.func.grad(lambda x: model[0](x).sum())(torch.randn(1, 4))

    out = model(torch.randn(SAMPLES, 4))
    out.register_hook(again)
    out.sum().backward()


@refused(r"^0\.weight: its \.grad was changed since the last backward, .*optimizer\.zero_grad\(\)")
def a_gradient_of_another_origin() -> None:
    model = on(nn.Linear(4, 4))
    rows_held(model)
    model[0].weight.grad.copy_(torch.randn(4, 4))
    rows_held(model)


@refused(r"layer \(Embedding\): its input is shared by all 3 samples, .*\(by select\).*Leave out")
def the_first_of_a_shared_result() -> None:
    feed(nn.Embedding(9, 4), lambda layer, x: x + layer(torch.arange(6)[None])[0])


@refused(r"layer \(Embedding\): its input is shared by all 3 samples, .*\(by its size\).*the len that")
def the_length_of_a_shared_result() -> None:
    feed(nn.Embedding(9, 4), lambda layer, x: x + layer(torch.arange(6)) / len(layer(torch.arange(6))))


@refused(r"layer \(Embedding\): its input is shared by all 3 samples, .*\(by normalize\).*the mean over")
def a_shared_result_along_another_dimension_than_in_the_plain_model() -> None:
    feed(nn.Embedding(9, 4), lambda layer, x: x + nn.functional.normalize(layer(torch.arange(6)), dim=1))


@refused(r"layer \(Embedding\): its input is shared by all 3 samples, .*\(by unsqueeze_\)")
def a_shared_result_whose_dimensions_are_changed_in_place() -> None:
    feed(nn.Embedding(9, 4), lambda layer, x: x + (2 * layer(torch.arange(6))).unsqueeze_(0))


@refused(r"layer \(Embedding\): its input is shared by all 3 samples, .*\(by return\)")
def a_shared_result_with_as_many_rows_as_samples() -> None:
    feed(nn.Embedding(9, 4), lambda layer, x: layer(torch.arange(3)[None]))


class SharedFirst(nn.Module):
    """Its first argument is one for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.point = nn.Linear(1, 4), nn.Linear(3, 1)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.point(x) * self.time(t[:, None]).sum()


@refused(
    r"^SharedFirst: the first tensor .* has one row.* the others have 3, as its.*batch_size=3\), or .*batch_size=1"
)
def a_first_argument_of_one_row() -> None:
    enn.convert(SharedFirst()).per_sample()(torch.ones(1), torch.randn(3, 3))


@refused(
    r"^layer \(Linear\): in its input samples have taken each other's places \(roll, line \d+ of .*Leave the order"
)
def samples_in_another_order() -> None:
    feed(nn.Linear(4, 4), lambda layer, x: layer(layer(x).roll(1, 0)))


@refused(r"^Drawn: within a reentrant checkpoint it draws random numbers for each sample.*use_reentrant=False")
def other_numbers_in_a_reentrant_checkpoint() -> None:
    class Drawn(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return x * nn.functional.dropout(self.scale)

    model = enn.convert(Drawn(4)).per_sample()
    checkpoint(model, torch.randn(3, 4, requires_grad=True), use_reentrant=True).sum().backward()


@refused(
    r"^layer \(Linear\): its input, from transpose, line \d+ of .*, has the samples in dimension 1, and .*Transpose"
)
def samples_in_another_dimension() -> None:
    feed(nn.Linear(4, 4), lambda layer, x: layer(layer(x[:, : len(x)]).transpose(0, 1)))


@refused(
    r"^Feed: rows that a layer, or expanded.weight., gives, \(3, 4\), meet as many positions of each of the 3 samp.* "
    r"\(add, line \d+ of .*input.unsqueeze\(0\)"
)
def positions_in_the_samples_place() -> None:
    feed(nn.Linear(4, 4), lambda layer, x: x.new_zeros(3, 3, 4).add(layer(x.mean(1))))


@refused(r"^layer \(Linear\): it is called within a transform of torch\.func .*by torch\.autograd\.grad")
def a_layer_within_a_transform() -> None:
    feed(nn.Linear(4, 4), lambda layer, x: torch.vmap(layer)(x))


@refused(r"^layer \(Linear\): its input, \(3, 4\), comes from buffers, attributes or .*unsqueeze\(0\) for what all")
def a_table_with_as_many_rows_as_samples() -> None:
    feed(nn.Linear(4, 4), lambda layer, x: torch.maximum(x, layer(torch.linspace(0, 1, 12).view(3, 4))))


@refused(r"^layer \(Linear\): its input, \(3, 4\), comes from a part of the samples.*not with one after the other")
def a_layer_in_a_loop_over_as_many_samples_as_positions() -> None:
    feed(nn.Linear(4, 4), lambda layer, x: torch.stack([layer(row[:3]) for row in layer(x)]))


@refused(r"^grad_sample: a tensor that a factored .* was changed in place.*materialize=True")
def an_input_changed_after_the_backward() -> None:
    model, x = on(nn.Linear(40, 40)), torch.randn(SAMPLES, 40)
    model(x).sum().backward()
    x.zero_()
    model[0].weight.grad_sample.flatten(1).norm(dim=1)


@refused(r"^Per-sample gradients: the grad_sample of 0.weight is a list; wanted a tensor \(B, \*\(4, 4\)\).*torch.cat")
def rows_in_a_list() -> None:
    model = on(nn.Linear(4, 4))
    rows_held(model)
    model[0].weight.grad_sample = [model[0].weight.grad_sample]
    enn.clip_grad_sample_norms_(model, 1.0)


@refused(r"^Per-sample gradients: the grad_sample of 0.bias has shape \(3, 5\); wanted a tensor \(B, \*\(4,\)\)")
def rows_of_another_shape() -> None:
    model = on(nn.Linear(4, 4))
    rows_held(model)
    model[0].bias.grad_sample = torch.ones(SAMPLES, 5)
    enn.clip_grad_sample_norms_(model, 1.0)


class Branches(nn.Module):
    """Two heads behind a body, of which each was switched on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)


def branches(**settings: Any) -> Any:
    model = enn.convert(Branches())
    for part in (model.body, model.first, model.second):
        part.per_sample(**settings)
    return model


@refused(r"^clip_grad_sample_norms_: parts of the model .* each by itself.*different backwards.*per_sample\(model\)")
def rows_of_a_skipped_batch_in_a_part() -> None:
    """The second head's are of the batch before, which `zero_grad` has cleared."""
    model = branches(accumulate_grad=False)
    model.second(model.body(torch.randn(SAMPLES, 4))).sum().backward()
    torch.optim.SGD(model.parameters(), 1.0).zero_grad()
    model.first(model.body(torch.randn(SAMPLES, 4))).sum().backward()
    enn.clip_grad_sample_norms_(model, 1.0)


@refused(r"^per_sample_grads: parts of the model .* each by itself.*different backwards")
def parts_whose_batches_have_another_order() -> None:
    model = branches()
    few, many = (model.body(torch.randn(size, 4)) for size in (2, 5))
    (model.first(many).sum() + model.first(few).sum()).backward()
    enn.per_sample_grads(model)


@refused(r"^per_sample_grads: the parameters \['0.weight'\] are in two models .* both have rows.*ModuleList")
def one_parameter_in_two_models() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    models = [
        enn.convert(nn.Sequential(layer), inplace=True).per_sample(accumulate_grad=False) for layer in (first, second)
    ]
    sum(model(torch.randn(SAMPLES, 4)).sum() for model in models).backward()
    enn.per_sample_grads(models[0])


# --- using the rows -------------------------------------------------------------------------------------------


@refused(
    r"^Per-sample gradients: .* different numbers .*, \{'a': 3, 'b': 2\}; wanted equally many.*Clear the gradients"
)
def different_numbers_of_rows() -> None:
    enn.PerSampleGrads({"a": torch.ones(3, 2), "b": torch.ones(2, 2)})


@refused(r"PerSampleGrads\.sum: weights has shape \(2,\); wanted a tensor of shape \(3,\). Give one weight per sample")
def other_weights() -> None:
    enn.PerSampleGrads({"a": torch.ones(3, 2)}).sum(torch.ones(2))


@refused(r"PerSampleGrads\.sum: weights is a list; wanted a tensor of shape \(3,\)")
def weights_in_a_list() -> None:
    enn.PerSampleGrads({"a": torch.ones(3, 2)}).sum([1.0, 2.0, 3.0])  # type: ignore[arg-type]


@refused(r"PerSampleGrads\.sum: weights is .*; wanted a tensor of shape \(3,\)")
def weights_in_an_array() -> None:
    enn.PerSampleGrads({"a": torch.ones(3, 2)}).sum(np.ones(3))  # type: ignore[arg-type]


@refused(r"PerSampleGrads\.matvec: what it is given has not .* it lacks \['a'\] and has \['b'\] besides")
def other_names() -> None:
    enn.PerSampleGrads({"a": torch.ones(3, 2)}).matvec({"b": torch.ones(2)})


@refused(
    r"PerSampleGrads\.gram: per_position=True, .* of \['a'\] have no positions; wanted linear layers and embeddings"
)
def inner_products_by_position_of_dense_rows() -> None:
    enn.PerSampleGrads({"a": torch.ones(3, 2)}).gram(per_position=True)


@refused(r"PerSampleGrads\.kronecker: mask is torch\.bool \(3, 2\); wanted bools \(B, T\).*: \(3, 1\)\. Give it True")
def kronecker_factors_by_a_strange_mask() -> None:
    model = enn.convert(nn.Linear(2, 2)).per_sample(keep_factors=True)
    model(torch.ones(3, 2)).sum().backward()
    enn.per_sample_grads(model).kronecker(mask=torch.ones(3, 2).bool())


@refused(r"PerSampleGrads\.kronecker: .* of \['a'\] are dense, complex, of computed weights, or .*keep_factors=True")
def kronecker_factors_of_dense_rows() -> None:
    enn.PerSampleGrads({"a": torch.ones(3, 2, 2)}).kronecker()


@refused(
    r"per_sample: keep_factors and materialize are both True; wanted one of the two at most\.",
    ValueError,
)
def rows_that_are_dense_and_factored() -> None:
    enn.Linear(2, 2).per_sample(keep_factors=True, materialize=True)


def preconditioned(rows: Tensor, A: Tensor, count: int = 1, damping: float = 1.0, name: str = "a") -> None:
    factors = enn.KroneckerFactors(A, torch.eye(2), count)
    enn.PerSampleGrads({"a": rows}).precondition({name: factors}, damping)


@refused(r"PerSampleGrads\.precondition: damping has no number for 'a'; wanted one for each .*or give one for all\.")
def preconditioning_without_damping_of_a_parameter() -> None:
    preconditioned(torch.ones(3, 2, 2), torch.eye(2), damping={"b": 1.0})  # type: ignore[arg-type]


@refused(r"PerSampleGrads\.precondition: damping is 0\.0; wanted a number above 0\.", ValueError)
def preconditioning_without_damping() -> None:
    preconditioned(torch.ones(3, 2, 2), torch.eye(2), damping=0.0)


@refused(
    r"PerSampleGrads\.precondition: 'b' has no per-sample gradients; wanted factors of parameters .*, and of at least"
)
def preconditioning_what_has_no_rows() -> None:
    preconditioned(torch.ones(3, 2, 2), torch.eye(2), name="b")


@refused(
    r"PerSampleGrads\.precondition: the factors of 'a' are those of a matrix \(2, 3\); wanted \(2, 2\), as the param"
)
def preconditioning_by_factors_of_other_sizes() -> None:
    preconditioned(torch.ones(3, 2, 2), torch.eye(3))


@refused(r"PerSampleGrads\.precondition: the factors of 'a' with damping 1\.0 are not positive definite; wanted sums")
def preconditioning_by_what_is_no_sum_of_squares() -> None:
    preconditioned(torch.ones(3, 2, 2), -2 * torch.eye(2))


@refused(r"Projection: dim is 0; wanted a whole number, 1 or more\.", ValueError)
def a_projection_to_nothing() -> None:
    enn.Projection(0)


@refused(r"Projection: kind is 'sparse'; wanted one of 'sketch', 'kronecker', 'gaussian'\.", ValueError)
def an_unknown_projection() -> None:
    enn.Projection(2, kind="sparse")


@refused(r"Projection: seed is 0\.5; wanted a whole number\.", ValueError)
def a_seed_that_is_no_whole_number() -> None:
    enn.Projection(2, seed=0.5)  # type: ignore[arg-type]


@refused(r"Projection: the parameters hold \{'a': 3, 'b': 2\} rows; wanted equally many\. Project batch by batch")
def a_projection_of_different_numbers_of_rows() -> None:
    enn.Projection(2)({"a": torch.ones(3, 2), "b": torch.ones(2, 2)})


@refused(
    r"Projection: 'a' has rows of shape \(3,\); wanted \(2,\), as in the first call\. Make one Projection for each"
)
def a_projection_of_another_model() -> None:
    projection = enn.Projection(2)
    projection({"a": torch.ones(3, 2)})
    projection({"a": torch.ones(3, 3)})


@refused(r"PerSampleGrads\.gram: 'a' has the shapes \(2,\) and \(3,\); wanted the same parameters")
def products_with_another_models_rows() -> None:
    enn.PerSampleGrads({"a": torch.ones(3, 2)}).gram(enn.PerSampleGrads({"a": torch.ones(3, 3)}))


@refused(r"'a' with damping 1\.0 are not positive definite; wanted sums of a aᵀ and g gᵀ of finite numbers")
def preconditioning_by_ekfac_that_is_not_finite() -> None:
    factors = enn.EigenFactors(torch.eye(2), torch.eye(2), torch.full((2, 2), torch.nan), 1)
    enn.PerSampleGrads({"a": torch.ones(3, 2, 2)}).precondition({"a": factors}, 1.0)


@refused(r"torch\.load: the file holds factored rows in version 3 of the format; wanted 2 at most\. Update expanded_nn")
def rows_of_a_newer_version() -> None:
    rebuilt(3)


# --- stores of projections ------------------------------------------------------------------------------------


def store_of_two() -> tuple[enn.ProjectionStore, dict[str, Tensor]]:
    """A store with the samples 0 and 1, that can be written, and their rows."""
    model, rows = nn.Linear(2, 1, bias=False), {"weight": torch.ones(2, 1, 2)}
    nn.init.ones_(model.weight)
    store = enn.ProjectionStore(tempfile.mkdtemp(), enn.Projection(3), model)
    store.add([0, 1], rows)
    return store, rows


@refused(r"^ProjectionStore\('.*'\): it holds no projections; wanted those of an earlier run\. To write it, give")
def a_store_of_nothing() -> None:
    enn.ProjectionStore(tempfile.mkdtemp())


@refused(r"it holds projections with \{'dim': 3, 'seed': 0\}; wanted \{'dim': 4, 'seed': 1\}\. Take another folder, or")
def a_store_of_another_projection() -> None:
    enn.ProjectionStore(store_of_two()[0].folder, enn.Projection(4, seed=1))


@refused(
    r"with \{'weights': '\w+'\}; wanted \{'weights': '\w+'\}\. The model has other weights or buffers than "
    r"this folder was begun with: load its checkpoint, or seed the initialization .* For these weights take"
)
def a_store_of_other_weights() -> None:
    enn.ProjectionStore(store_of_two()[0].folder, model=nn.Linear(2, 1, bias=False))


@refused(
    r"^ProjectionStore.add: the projections of the rows \[1\] are inf or NaN; wanted finite per-sample gradients\."
)
def a_store_of_rows_that_are_not_finite() -> None:
    store, rows = store_of_two()
    rows["weight"][1, 0, 0] = torch.nan
    try:
        store.add([2, 3], rows)
    finally:
        store.add([2, 3], {"weight": torch.ones(2, 1, 2)})  # nothing was written


@refused(r"settings\.json' is damaged \(it names no version\); wanted settings as JSON")
def a_store_whose_settings_are_others() -> None:
    folder = store_of_two()[0].folder
    (folder / "rank-0/settings.json").write_text("{}")
    enn.ProjectionStore(folder)


@refused(r"its format is version 2; wanted 1\. Update expanded_nn")
def a_store_of_a_newer_version() -> None:
    folder = store_of_two()[0].folder
    settings = folder / "rank-0/settings.json"
    settings.write_text(settings.read_text().replace('"version": 1', '"version": 2'))
    enn.ProjectionStore(folder)


@refused(r"another process, or another store in this one, writes here; wanted one writer at a time\. In one process")
def a_store_that_is_written_already() -> None:
    store, _ = store_of_two()
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    enn.ProjectionStore(store.folder, model=model)


@refused(r"a sample is there twice; wanted each once\. Delete this part, which is damaged")
def a_store_with_a_sample_twice() -> None:
    (folder := Path(tempfile.mkdtemp(), "rank-0")).mkdir()
    (folder / "ids.int64").write_bytes(bytes(16))
    (folder / "projections.float32").write_bytes(bytes(24))
    enn.ProjectionStore(folder.parent, enn.Projection(3), nn.Linear(2, 1))


@refused(
    r"it was opened for reading; wanted one opened for writing\. Open it with the model: ProjectionStore\(folder, pro"
)
def adding_to_a_store_that_is_read() -> None:
    store, rows = store_of_two()
    enn.ProjectionStore(store.folder).add([2, 3], rows)


@refused(r"it is given 2 rows and the ids \[3\]; wanted as many ids as rows, and no id twice\. Give the ids")
def adding_without_ids() -> None:
    store, rows = store_of_two()
    store.add([3], rows)


@refused(r"the ids \[1\] are done already; wanted new ones\. Take the ids from batches\(\)")
def adding_a_sample_again() -> None:
    store, rows = store_of_two()
    store.add([1, 2], rows)


@refused(
    r"it was opened in another process, from which this one was forked; wanted a store of this process\. Open it in"
)
def adding_in_a_forked_process() -> None:
    store, rows = store_of_two()
    assert store._part is not None
    store._part._process += 1  # test_store.py forks
    store.add([2, 3], rows)


@refused(
    r"settings\.json' is damaged \(Expecting value: .*\); wanted settings as JSON\. Copy the file from another part"
)
def a_store_with_damaged_settings() -> None:
    folder = store_of_two()[0].folder
    (folder / "rank-0/settings.json").write_text("")  # cut off
    enn.ProjectionStore(folder)


@refused(r"^ProjectionStore\.add\(ids, grads\): grads is a Tensor; wanted .* per_sample_grads\(model\)", TypeError)
def adding_a_tensor() -> None:
    store_of_two()[0].add([2, 3], torch.ones(2, 2))  # type: ignore[arg-type]


@refused(r"^ProjectionStore: ids are \['a'\]; wanted whole numbers, 0 or more", ValueError)
def reading_names() -> None:
    store_of_two()[0].read(["a"])  # type: ignore[list-item]


@refused(r"^ProjectionStore\.batches: batch_size is 0; wanted a whole number, 1 or more", ValueError)
def batches_of_nothing() -> None:
    list(store_of_two()[0].batches(range(4), 0))


@refused(r"^ProjectionStore: projection is 64; wanted a Projection\. .*Projection\(512\), model\)", TypeError)
def a_store_of_a_number() -> None:
    enn.ProjectionStore(tempfile.mkdtemp(), 64)  # type: ignore[arg-type]


@refused(r"ids are tensor\(.*\); wanted whole numbers, 0 or more, as in range", ValueError)
def adding_by_negative_ids() -> None:
    store, rows = store_of_two()
    store.add([-1, 2], rows)


@refused(
    r"2 samples could not be written \(No space left on device\); wanted room for 40 bytes\. Make room and add them"
)
def adding_to_a_full_disk() -> None:
    (folder := Path(tempfile.mkdtemp(), "rank-0")).mkdir()
    (folder / "ids.int64").touch()
    (folder / "projections.float32").symlink_to("/dev/full")
    with patch.object(projection_store, "fcntl", None):  # a lock would be that of /dev/full, which others may hold
        store = enn.ProjectionStore(folder.parent, enn.Projection(3), nn.Linear(2, 1))
    store.add([0, 1], {"weight": torch.ones(2, 1, 2)})


@refused(
    r"projections\.float32' has 23 bytes; wanted 24, for 2 samples\. Copy the folder again, or delete this part of it"
)
def a_damaged_store() -> None:
    store, _ = store_of_two()
    path = store.folder / "rank-0/projections.float32"
    path.write_bytes(path.read_bytes()[:-1])
    store.read([0])


@refused(r"has 23 bytes; wanted 24, for 2 samples\. Copy the folder again, or delete this part of it")
def a_damaged_store_that_is_written_on() -> None:
    store, _ = store_of_two()
    folder, model = store.folder, store._model
    del store  # and with it the lock
    path = folder / "rank-0/projections.float32"
    path.write_bytes(path.read_bytes()[:-1])
    enn.ProjectionStore(folder, enn.Projection(3), model)


@refused(r"2 samples are not done: \[2, 7\]; wanted all of them\. Run the script to the end")
def reading_samples_that_are_not_done() -> None:
    store_of_two()[0].read([0, 2, 1, 7])


@refused(
    r"^clip_grad_sample_norms_: grad_sample has the rows of torch\.autograd\.grad.*Clip before that call\. If its rows"
)
def clipping_beside_a_derivative() -> None:
    model = on(nn.Linear(4, 4))
    model(torch.randn(SAMPLES, 4)).sum().backward()
    torch.autograd.grad(model(torch.randn(2, 4)).sum(), list(model.parameters()), create_graph=True)
    enn.clip_grad_sample_norms_(model, 1.0)


@refused(r"^clip_grad_sample_norms_: no trainable parameter has per-sample gradients; .*Clip after backward and before")
def clipping_twice() -> None:
    model = on(nn.Linear(4, 4)).per_sample(accumulate_grad=False)
    model(torch.randn(SAMPLES, 4)).sum().backward()
    for _ in range(2):
        enn.clip_grad_sample_norms_(model, 1.0)


@refused(
    r"max_norm has no entry for the parameters \['0\.bias'\], and the entries of max_norm for \['1'\] belong to no "
    r"parameter; wanted one entry for each parameter.*Correct these names.*Add an entry"
)
def clipping_by_other_names() -> None:
    model = on(nn.Linear(4, 4))
    model(torch.randn(SAMPLES, 4)).sum().backward()
    enn.clip_grad_sample_norms_(model, {"0.weight": 1.0, "1": 1.0})


@refused(r"the entries of max_norm for \['1'\] belong to no parameter; wanted .*Correct these names, or leave them out")
def clipping_by_a_name_too_many() -> None:
    model = on(nn.Linear(4, 4))
    model(torch.randn(SAMPLES, 4)).sum().backward()
    enn.clip_grad_sample_norms_(model, {"": 1.0, "1": 1.0})


def with_a_gradient_of_its_own() -> Any:
    model = on(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0](torch.randn(SAMPLES, 4)).sum().backward()
    model[1].weight.grad = torch.ones(4, 4)
    return model


@refused(r"^clip_grad_sample_norms_: the parameters \['1\.weight'\] have a gradient in \.grad that is not, .* the sum")
def clipping_a_gradient_without_rows() -> None:
    enn.clip_grad_sample_norms_(with_a_gradient_of_its_own(), 1.0)


@refused(
    r"^per_sample_grads: the parameters \['1\.weight'\] have a gradient .*zero_grad\(\).*expanded_nn\.expanded\(weight"
)
def a_gradient_without_rows() -> None:
    enn.per_sample_grads(with_a_gradient_of_its_own())


@refused(r"the function given as max_norm returned shape \(\); wanted a tensor of shape \(3,\).*Return one number per")
def clipping_all_rows_by_one_number() -> None:
    model = on(nn.Linear(4, 4))
    rows_held(model)
    enn.clip_grad_sample_norms_(model, lambda norms: 1 / norms.max())


@refused(r"max_norm has no entry for the parameters \['0\.bias'\]; wanted .* around it\. Add an entry: their names")
def clipping_by_too_few_names() -> None:
    rows_held(model := on(nn.Linear(4, 4)))
    enn.clip_grad_sample_norms_(model, {"0.weight": 1.0})


@refused(
    r"^clip_grad_sample_norms_: max_norm is a tensor of shape \(3,\); wanted a number above 0, a function of the "
    r"norms, or a mapping from names to these\. For a bound per sample give the factors: lambda norms: bounds / "
    r"norms\.clamp\(min=bounds\)\.$",
    ValueError,
)
def clipping_by_a_bound_per_sample() -> None:
    rows_held(model := on(nn.Linear(4, 4)))
    enn.clip_grad_sample_norms_(model, torch.ones(SAMPLES))


@refused(
    r"^clip_grad_sample_norms_: max_norm\[''\] is a tensor of -1\.0; wanted a number above 0, or .* norms\.$",
    ValueError,
)
def clipping_by_a_tensor_below_zero() -> None:
    rows_held(model := on(nn.Linear(4, 4)))
    enn.clip_grad_sample_norms_(model, {"": torch.tensor(-1.0)})


@refused(
    r"the function given as max_norm returned inf or NaN for the rows \[1\] of grad_sample, whose norms are \[0\.0\]; "
    r"wanted finite numbers, for a norm of 0 as well\. Add to the norm or clamp it, as in 1 / \(norms \+ 0\.01\) or"
)
def clipping_by_the_inverse_of_a_norm_of_zero() -> None:
    model = on(nn.Linear(4, 4))
    (model(torch.randn(SAMPLES, 4)).sum(1) * torch.tensor([1.0, 0.0, 1.0])).sum().backward()
    enn.clip_grad_sample_norms_(model, lambda norms: 1 / norms)


@refused(r"the function given as max_norm returned complex numbers; wanted a tensor of shape \(3,\)")
def clipping_by_complex_numbers() -> None:
    rows_held(model := on(nn.Linear(4, 4)))
    enn.clip_grad_sample_norms_(model, lambda norms: 1j * norms)


@refused(r"the function given as max_norm returned a float; wanted a tensor of shape \(3,\)")
def clipping_by_a_number_of_python() -> None:
    model = on(nn.Linear(4, 4))
    rows_held(model)
    enn.clip_grad_sample_norms_(model, lambda norms: 0.5)


@refused(r'reduction is \'max\'; wanted "sum" or "mean"', ValueError)
def clipping_to_a_maximum() -> None:
    enn.clip_grad_sample_norms_(on(nn.Linear(4, 4)), 1.0, reduction="max")


OF_EACH_SAMPLE: dict[str, Callable[[Tensor], Any]] = {  # of an input (3, 4, 2), with parameters (3, 4)
    "group_norm": lambda own: EF.group_norm(torch.randn(3, 4, 2), 2, own),
    "instance_norm": lambda own: EF.instance_norm(torch.randn(3, 4, 2), bias=own),
    "batch_norm": lambda own: EF.batch_norm(torch.randn(3, 4, 2), torch.zeros(4), torch.ones(4), own),
    "prelu": lambda own: EF.prelu(torch.randn(3, 4, 2), own),
    "conv1d": lambda own: EF.conv1d(torch.randn(3, 4, 2), torch.randn(3, 4, 4, 1), own),
    "conv_transpose1d": lambda own: EF.conv_transpose1d(torch.randn(3, 4, 2), torch.randn(3, 4, 2, 1), own, groups=2),
    "layer_norm": lambda own: EF.layer_norm(torch.randn(3, 2, 4), (4,), own),
    "rms_norm": lambda own: EF.rms_norm(torch.randn(3, 2, 4), (4,), own),
    "linear": lambda own: EF.linear(torch.randn(3, 2, 4), torch.randn(3, 4, 4), own),
}


@pytest.mark.parametrize("shape", [(4, 3), (2, 6), (3, 2, 2)])
@pytest.mark.parametrize("function", OF_EACH_SAMPLE)
def test_parameters_of_each_sample_of_other_shapes(function: str, shape: tuple[int, ...]) -> None:
    OF_EACH_SAMPLE[function](torch.randn(3, 4))
    with pytest.raises(
        enn.PerSampleError, match=rf"^functional\.{function}: .* wanted one for each sample, \(3, 4\)\."
    ):
        OF_EACH_SAMPLE[function](torch.randn(shape))


@pytest.mark.parametrize("max_norm", [float("nan"), -1.0, 0, None, "1.0", True, [1.0], torch.ones(2)])
def test_clipping_to_what_is_no_norm(max_norm: Any) -> None:
    words = r"^clip_grad_sample_norms_: max_norm is .*; wanted a number above 0, a function of the norms, or a map"
    with pytest.raises(ValueError, match=words):
        enn.clip_grad_sample_norms_(on(nn.Linear(4, 4)), max_norm)


@refused(r"^clip_grad_sample_norms_: max_norm\['0'\] is None; wanted a number above 0, or a function", ValueError)
def clipping_a_layer_to_none() -> None:
    enn.clip_grad_sample_norms_(on(nn.Linear(4, 4)), {"0": None})  # type: ignore[dict-item]


@refused(r"^Linear: the parameters \['weight', 'bias'\] are in no layer .*convert\(model, inplace=True\)\.per_sample")
def clipping_a_plain_model() -> None:
    enn.clip_grad_sample_norms_(nn.Linear(4, 4), 1.0)


@refused(r"the per-sample gradients of all parameters are inf or NaN in the rows \[1\] of grad_sample; .*Leave these")
def clipping_nan() -> None:
    model, x = on(nn.Linear(4, 4)), torch.randn(SAMPLES, 4)
    x[1] = torch.nan
    model(x).sum().backward()
    enn.clip_grad_sample_norms_(model, 1.0)


@refused(r"^Sequential: its parts were switched on with different .*'mean'.*'sum'.*Switch on the whole model at once")
def parts_with_other_settings() -> None:
    halves = [enn.convert(nn.Linear(4, 4)).per_sample(loss_reduction=each) for each in ("sum", "mean")]
    enn.per_sample_grads(nn.Sequential(*halves))


@refused(r"gradients of shape \(2,\), and a sharded parameter of \(3,\); wanted those of the whole parameter")
def rows_of_a_part() -> None:
    scattered(torch.ones(2), nn.Parameter(torch.ones(3)))


# --- check ----------------------------------------------------------------------------------------------------


@refused(r"check: the inputs hold 1 sample\(s\); wanted 2 or more. Give it a larger batch")
def checking_one_sample() -> None:
    enn.check(nn.Linear(4, 4), torch.randn(1, 4))


@refused(
    r"^check: no input is a tensor; wanted those of 2 samples or more, as in check\(model, x\)\. Give the batch to "
    r"check, not to the loss: check\(model, x, y, loss=\.\.\.\) calls loss\(model, x, y\)\.$"
)
def checking_without_inputs() -> None:
    x = torch.randn(SAMPLES, 4)
    enn.check(nn.Linear(4, 4), loss=lambda model: model(x).sum())


@refused(
    r"^check: the forward of Linear does not take the arguments \(too many positional arguments\); wanted what the "
    r"model is called with\. Give a target to the loss: check\(model, x, y, loss=lambda model, x, y: criterion",
    TypeError,
)
def checking_a_forward_with_its_target() -> None:
    enn.check(enn.convert(nn.Linear(4, 4)), torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 4))


def checking_by(loss: Any) -> None:
    enn.check(nn.Linear(4, 4), torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 4), loss=loss)


A_STEP = (
    r"; wanted a function of the model and the arguments, which calls the model itself: loss\(model, x, y\)\. Write it "
    r"as check\(model, x, y, loss=lambda model, x, y: criterion\(model\(x\), y\)\)\.$"
)


@refused(rf"^check: loss is a MSELoss{A_STEP}", TypeError)
def checking_a_criterion() -> None:
    checking_by(nn.MSELoss())


@refused(rf"^check: loss is the class MSELoss{A_STEP}", TypeError)
def checking_a_class_of_criteria() -> None:
    checking_by(nn.MSELoss)


@refused(rf"^check: loss is mse_loss{A_STEP}", TypeError)
def checking_a_loss_of_torch() -> None:
    checking_by(nn.functional.mse_loss)


@refused(rf"^check: loss is a partial{A_STEP}", TypeError)
def checking_a_loss_of_torch_with_arguments() -> None:
    checking_by(partial(nn.functional.mse_loss, reduction="sum"))


@refused(
    rf"^check: loss does not take the model and the arguments that check was given \(too many positional .*\){A_STEP}",
    TypeError,
)
def checking_a_loss_of_the_output() -> None:
    checking_by(lambda output, target: (output - target).square().mean())


@refused(r"^check: loss does not take .* given \(missing a required argument: 'weights'\); wanted", TypeError)
def checking_a_loss_of_more() -> None:
    class Weighted(nn.Module):
        def forward(self, model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            return (weights * (model(x) - y)).mean()

    checking_by(Weighted())


@refused(r"^of the user's own$", TypeError)
def checking_a_loss_that_fails() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        raise TypeError("of the user's own")

    checking_by(loss)


@refused(r"1\. the loss: it returns no floating-point tensor; wanted the losses, \(3,\), or their sum or mean")
def checking_a_loss_that_returns_nothing() -> None:
    enn.check(nn.Linear(4, 4), torch.randn(SAMPLES, 4), loss=lambda *_: None).raise_for_problems()


@refused(
    r"^the loss: it calls backward\(\), which check does itself; wanted .*Leave backward\(\), the clipping and the opt"
)
def a_step_to_check() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        losses = model(x).sum()
        losses.backward()
        return losses

    enn.check(nn.Linear(4, 4), torch.randn(SAMPLES, 4), loss=loss)


@refused(r"reason\(s\) not to trust(?s:.*)BatchNorm1d")
def a_report_with_problems() -> None:
    enn.check(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(5, 4)).raise_for_problems()


# --- the table ------------------------------------------------------------------------------------------------

# `lifted` returns before, where no argument is batched; an AttributeError of a property is said by `nn.Module` instead
# FirstEager, TraceError and LookFirst are for `enn.compile`, which runs the step eagerly then: test_compiled_step.py
# the last one is caught where it is raised
NEVER_SEEN = (
    "raise AssertionError(",
    "raise AttributeError(",
    "raise OnlyEager(",
    "raise CompilerError(",
    "raise NotInTable",
    "raise Unknown",
    "raise FirstEager(",
    "raise TraceError(",
    "raise LookFirst",
    "raise _Recomputed",
)
NEVER_SEEN += ("raise complaint(  # not seen",)


class Site(NamedTuple):
    """A `raise` in the package: its file, its lines, its text."""

    file: Path
    first: int
    last: int
    text: str


def sites() -> list[Site]:
    """All of them, but for a bare `raise`, which hands on what is not of the library."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        source = file.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Raise) and node.exc is not None:
                text = source.splitlines()[node.lineno - 1].strip()
                found.append(Site(file, node.lineno, node.end_lineno or node.lineno, text))
    return found


def raised_by(refusal: Refusal) -> BaseException:
    with pytest.raises(refusal.error, match=refusal.words) as info:
        refusal.run()
    return info.value


def places(error: BaseException | None) -> set[tuple[Path, int]]:
    """The lines that an error has gone through, and those of the errors behind it."""
    if error is None:
        return set()
    frames = traceback.extract_tb(error.__traceback__)
    traceback.clear_frames(error.__traceback__)  # one of torch 2.10's holds a checkpoint, whose hooks are on until then
    return {(Path(f.filename), f.lineno or 0) for f in frames} | places(error.__cause__) | places(error.__context__)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.run.__name__)
def test_words(refusal: Refusal) -> None:
    error = raised_by(refusal)
    if isinstance(error, enn.PerSampleError):
        assert str(error).rstrip().endswith((".", ")", "loop."))


def test_every_raise_has_an_entry() -> None:
    """Whoever adds an error adds what raises it, with its words."""
    reached = set().union(*(places(raised_by(each)) for each in REFUSALS))
    missed = [
        f"{site.file.relative_to(PACKAGE)}:{site.first}: {site.text}"
        for site in sites()
        if not any(file == site.file and site.first <= line <= site.last for file, line in reached)
        and not site.text.startswith(NEVER_SEEN)
    ]
    assert missed == [], "\n".join(missed)


# --- mistakes with batches --------------------------------------------------------------------------------------


class Mistaken(nn.Module):
    """A root of B samples that gives its model something else."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.change(x))


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda x: x[: len(x) // 2],
    "one_more": lambda x: torch.cat([x, x[:1]]),
    "twice": lambda x: torch.cat([x, x]),
    "one_of_them": lambda x: x[1:2],
    "without_its_dimension": lambda x: x[1],
    "chosen": lambda x: x[torch.tensor([0, 2])],
    "none": lambda x: x[:0],
    "unfolded": lambda x: x.unflatten(0, (2, 2)),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_mistake_with_the_batch_is_named(family: Family, mistake: Callable[[Tensor], Tensor]) -> None:
    """The error names a layer inside, unless torch's own plain layer refuses such an input as well."""
    if mistake is MISTAKES["one_more"] and family.name in ("embedding", "tied"):
        return  # any other number of rows is an index without a batch dimension, which all samples share
    module, call = family.module(), family.call(4)
    model = enn.convert(Mistaken(module, mistake)).per_sample()
    try:
        with torch.no_grad():
            module(mistake(*call.args))
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        expected: tuple[type[BaseException], ...] = (enn.PerSampleError, type(error))
        words = "."
    else:
        expected, words = (enn.PerSampleError,), r"^inner[\w.]* \(\w+\): .*wanted"
    with pytest.raises(expected, match=words):
        sample_losses(call.on(model)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*runs sample by sample")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_batch_that_the_model_folds(family: Family) -> None:
    """Its rows are right, as the samples of a view are known; or the error names a layer inside."""
    call = family.call(4)
    plain = Mistaken(family.module(), lambda x: x.flatten(0, 1) if x.dim() > 2 else x.flatten())
    model = enn.convert(plain).per_sample(loss_reduction="sum")

    def objective(model: nn.Module, call: Call, first: int = 0) -> Tensor:
        return call.on(model).sin().square().sum()

    try:
        with torch.no_grad():
            call.on(plain)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        with pytest.raises((enn.PerSampleError, type(error))):
            objective(model, call).backward()
        return
    try:
        objective(model, call).backward()
    except enn.PerSampleError as error:
        assert str(error).startswith("inner") and "wanted" in str(error)  # noqa: PT017, PT018
    else:
        assert_close_rows(rows_of(model), loop(plain, call, 4, objective=objective))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_input_of_a_sample_alone_is_refused_at_the_root(family: Family) -> None:
    """Without its batch dimension, the first dimension of a sample would be taken for the batch, or there is none."""
    (x,) = family.call(1).args
    model, plain_rows = enn.convert(family.module()).per_sample(), None
    with contextlib.suppress(RuntimeError, ValueError, IndexError, AssertionError):
        plain_rows = family.module()(x[0]).shape
    try:
        output = model(x[0])
    except enn.PerSampleError as error:
        assert "(" in str(error) and "wanted" in str(error)  # noqa: PT017, PT018
        return
    except (RuntimeError, ValueError, IndexError, AssertionError):
        assert plain_rows is None
        return
    # positions or features of one sample are as good as samples to such a layer: nothing in the shape tells
    assert output.shape == plain_rows
    assert len(output) == len(x[0])


def test_errors_of_torch_stay_torch_s_own() -> None:
    """Wrong features are torch's to refuse, in its own words."""
    for family in FAMILIES:
        if family.words:
            continue
        (x,) = family.call(SAMPLES).args
        channels = family.name in ("cnn", "conv_groups", "conv_transpose", "instance_norm", "batch_norm")
        wrong = torch.cat([x, x], 1 if channels else -1)
        module, model = family.module(), enn.convert(family.module()).per_sample()
        with pytest.raises((RuntimeError, ValueError, AssertionError)) as theirs:
            module(wrong)
        with pytest.raises((RuntimeError, ValueError, AssertionError)) as ours:
            model(wrong)
        assert type(ours.value) is type(theirs.value), family.name


def test_errors_from_another_thread_name_the_layer_too() -> None:
    """The backward of a CPU model runs where it is called."""
    model, seen = on(nn.Linear(4, 4)), []

    def run() -> None:
        try:
            (total_loss(model, family_call()) + model[0].weight.sum()).backward()
        except enn.PerSampleError as error:
            seen.append(str(error))

    def family_call() -> Any:
        return FAMILIES[0].call(SAMPLES).map(lambda t: t.to(model[0].weight.dtype))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen[0].startswith("0.weight: ")
