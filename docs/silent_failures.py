"""Runs the known traps through every library, compares with a loop over the samples, and writes silent_failures.md.

The traps are those of tests/test_silent_failures.py: the module and the input are taken from the tests themselves.
Peers that are not installed are left out. Usage: PYTHONPATH=tests python docs/silent_failures.py [words of a title]
"""

import contextlib
import importlib.metadata
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

import expanded_nn as enn
import oracle
import test_check
import test_silent_failures
from oracle import Call, Objective, gradient_penalty, loop, relative_error, rows_of, total_loss

try:
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator
except ImportError:
    GradSampleModule = None
try:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad
except ImportError:
    backpack = None

Rows = dict[str, Tensor | None]
SAMPLES, TOLERANCE = 3, 1e-9
LSTM_TEST = "tests/test_layers.py::test_rows_equal_the_loop"
MIXING_TEST = "tests/recording/test_independence.py::test_samples_that_meet_are_refused"


@dataclass
class Trap:
    """A module and an input on which rows have been seen to be wrong.

    Attributes:
        title: What the trap is, as the page says it.
        test: The test that proves what expanded_nn does.
        module: The plain module.
        call: Its arguments, 3 samples.
        objective: The loss, a sum over the samples.
        oracle: The plain module that the loop runs, where it is another one.
    """

    title: str
    test: str
    module: nn.Module
    call: Call
    objective: Objective = total_loss
    oracle: nn.Module | None = None


class Captured(BaseException):
    """The test has called the model, and what it called it with is known."""


class Recorder:
    """Stands in for the library in a test: takes the module and the call, and stops the test there."""

    PerSampleError = enn.PerSampleError

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def convert(self, module: nn.Module) -> "Recorder":
        self.found["module"] = module
        return self

    def per_sample(self, **settings: Any) -> "Recorder":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.found["call"] = Call(args, kwargs)
        raise Captured

    def right(self, module: nn.Module, call: Call, **settings: Any) -> None:
        self.found.update(module=module, call=call, **settings)
        raise Captured


def from_test(title: str, name: str, *arguments: Any) -> Trap:
    """The trap that a test of test_silent_failures.py is about."""
    test, recorder = getattr(test_silent_failures, name), Recorder()
    globals_ = {**test.__globals__, "enn": recorder, "right": recorder.right}
    torch.manual_seed(0)
    with contextlib.suppress(Captured):
        types.FunctionType(test.__code__, globals_, closure=test.__closure__)(*arguments)
    return Trap(title, f"tests/test_silent_failures.py::{name}", **recorder.found)


class Sequences(nn.Module):
    """An LSTM on sequences of different lengths, packed inside of the model in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def traps() -> Iterator[Trap]:
    yield from_test("Convolution of a permuted view", "test_convolution_whose_input_is_a_permuted_view")
    yield from_test("Convolution with groups", "test_convolution_with_groups")
    yield from_test(
        'Convolution, padding_mode="reflect"', "test_convolution_with_padding_mode_other_than_zeros", "reflect"
    )
    yield from_test(
        'Convolution, padding_mode="circular"', "test_convolution_with_padding_mode_other_than_zeros", "circular"
    )
    yield from_test('Convolution, padding="same", even kernel', "test_convolution_with_padding_same", 4)
    yield from_test("Embedding, padding_idx", "test_embedding_with_padding_idx")
    yield from_test("Embedding, scale_grad_by_freq", "test_embedding_with_scale_grad_by_freq")
    yield from_test("EmbeddingBag, repeated indices", "test_embedding_bag_with_repeated_indices")
    yield from_test('EmbeddingBag, mode="max"', "test_embedding_bag_with_mode_max")
    torch.manual_seed(0)
    lengths = torch.tensor([2, 5, 3])
    yield Trap("LSTM, unsorted PackedSequence", LSTM_TEST, Sequences(), Call((torch.randn(3, 5, 4), lengths)))
    yield from_test("Complex weights", "test_complex_weights")
    yield from_test("Weight used outside its module", "test_weight_used_outside_its_module")
    yield from_test("Loss with an input derivative", "test_input_derivative_losses")
    yield from_test("Loss with a Laplacian", "test_laplacian")
    yield from_test("Tied weights", "test_tied_weights")
    yield from_test("Batch folded into the rows", "test_batch_folded_into_rows")
    yield from_test("Position ids, one row for all", "test_broadcast_position_ids")
    yield from_test("Positions unsqueezed after the look-up", "test_positions_unsqueezed_after_the_look_up")
    yield from_test("Layers called by keyword", "test_layer_called_by_keyword")
    yield from_test("ReLU in place after a layer", "test_in_place_relu_after_a_layer", nn.Conv2d(4, 4, 3, padding=1))
    yield from_test("Residual added in place", "test_in_place_residual")
    yield from_test("LayerNorm(bias=False)", "test_layer_norm_without_bias")
    yield from_test("Empty batch", "test_empty_batch")
    yield from_test("Eval mode, with BatchNorm", "test_model_in_eval_mode")
    yield from_test("Checkpoint, reentrant", "test_checkpointing", True)
    yield from_test("Checkpoint, not reentrant", "test_checkpointing", False)
    yield from_test("LoRA on an embedding", "test_lora_on_an_embedding")
    yield from_test("LoRA on an embedding, padding_idx", "test_lora_on_an_embedding_with_padding_idx")
    yield from_test("Buffer that a forward changes", "test_cache_that_a_layer_mutates")
    yield from_test("BatchNorm in train mode", "test_batch_norm_in_train_mode", nn.BatchNorm2d(4))
    torch.manual_seed(0)
    mixing = test_check.between(test_check.MIXING["centred"])
    yield Trap("Mean over the batch taken off", MIXING_TEST, mixing, Call((torch.randn(3, 4),)))


# The libraries: each gives the rows of a trap, its loss being a sum over the samples.


def ours(trap: Trap) -> Rows:
    model = enn.convert(trap.module).per_sample(loss_reduction="sum")
    trap.objective(model, trap.call, 0).backward()
    return rows_of(model)


def opacus(trap: Trap) -> Rows:
    recurrent = any(isinstance(each, nn.RNNBase) for each in trap.module.modules())
    module = ModuleValidator.fix(trap.module) if recurrent else deepcopy(trap.module)
    trap.objective(GradSampleModule(module, loss_reduction="sum"), trap.call, 0).backward()
    return {name: each.grad_sample for name, each in module.named_parameters() if each.requires_grad}


def by_backpack(trap: Trap) -> Rows:
    module = extend(deepcopy(trap.module))
    loss = trap.objective(module, trap.call, 0)
    with backpack(BatchGrad()):  # around this backward alone, not those that the loss is made of
        loss.backward()
    return {name: getattr(each, "grad_batch", None) for name, each in module.named_parameters() if each.requires_grad}


def torch_func(trap: Trap) -> Rows:
    """`vmap(grad(loss))` over the samples, derivatives by the input written by `grad` as well."""
    module = deepcopy(trap.module)
    named = {name: each.detach() for name, each in module.named_parameters() if each.requires_grad}
    others = {name: each.detach() for name, each in module.named_parameters() if not each.requires_grad}
    others |= dict(module.named_buffers())
    with torch.no_grad():
        output = trap.call.on(deepcopy(module))
    factors = oracle.coefficients(output, 0)

    def sample_loss(parameters: dict[str, Tensor], arguments: Any, factor: Tensor) -> Tensor:
        def forward(x: Any) -> Tensor:
            args, kwargs = tree_map_only(Tensor, lambda t: t.unsqueeze(0), x)
            return functional_call(module, (parameters, others), args, kwargs)

        def loss(x: Any) -> Tensor:
            return (factor * forward(x)[0].sin()).sum()

        if trap.objective is gradient_penalty:
            return loss(arguments) + sum(each.square().sum() for each in tree_leaves(grad(loss)(arguments)))
        if trap.objective is total_loss:
            return loss(arguments)
        hessian = torch.func.hessian(lambda x: forward(((x,), {})).sum())
        return hessian(arguments[0][0]).trace().square()

    arguments = (trap.call.args, dict(trap.call.kwargs))
    per_sample = vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="different")
    return per_sample(named, arguments, factors)


def expanded_weights(trap: Trap) -> Rows:
    module = deepcopy(trap.module)
    named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    trap.objective(call_for_per_sample_grads(module, loss_reduction="sum"), trap.call, 0).backward()
    return {name: getattr(each, "grad_sample", None) for name, each in named}


def libraries() -> dict[str, Callable[[Trap], Rows]]:
    """Title -> what gives the rows; of the peers only those installed."""
    found: dict[str, Callable[[Trap], Rows]] = {"expanded_nn": ours}
    if GradSampleModule is not None:
        found[f"Opacus {importlib.metadata.version('opacus')}"] = opacus
    if backpack is not None:
        found[f"BackPACK {importlib.metadata.version('backpack-for-pytorch')}"] = by_backpack
    version = torch.__version__.partition("+")[0]
    return found | {f"torch.func {version}": torch_func, f"ExpandedWeights {version}": expanded_weights}


@dataclass
class Outcome:
    """What came of it: a word for the table, and what to add in the details."""

    word: str
    detail: str = ""

    @property
    def cell(self) -> str:
        return f"**{self.word}**" if self.word == "wrong" else self.word


def outcome(trap: Trap, library: Callable[[Trap], Rows], expected: dict[str, Tensor]) -> Outcome:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rows = library(trap)
    except Exception as error:
        text = " ".join(str(error).split())
        return Outcome("error", f"{type(error).__name__}: {text[:400]}{'…' if len(text) > 400 else ''}")
    said = sorted({str(each.message).split(". ")[0] for each in told if "Full backward hook" not in str(each.message)})
    warned = f"; it warns: “{plain_words(said[0])}”" if said else ", without a word"
    missing = sorted(name for name in expected if rows.get(name) is None)
    if missing:
        return Outcome("no rows", f"for {', '.join(f'`{name}`' for name in missing)}{warned}")
    shapes = {name: tuple(rows[name].shape) for name in expected if rows[name].shape != expected[name].shape}
    if shapes:
        name, shape = next(iter(shapes.items()))
        return Outcome("wrong", f"`{name}` has rows of shape {shape}, not {tuple(expected[name].shape)}{warned}")
    errors = {name: relative_error(rows[name], each) for name, each in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] <= TOLERANCE:
        return Outcome("right")
    size = f"{errors[worst]:.0%}" if errors[worst] < 10 else "more than ten times their size"
    return Outcome("wrong", f"the rows of `{worst}` are off by {size}{warned}")


def plain_words(text: str) -> str:
    """A warning without what Markdown would take for markup."""
    return re.sub(r"<class '(?:\S*\.)?(\w+)'>", r"\1", text).replace("_", "\\_")


def run(trap: Trap) -> dict[str, Outcome]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if trap.call.args and isinstance(trap.call.args[0], Tensor) and len(trap.call.args[0]) == 0:
            expected = {name: each.new_zeros(0, *each.shape) for name, each in trap.module.named_parameters()}
        else:
            expected = loop(trap.oracle or trap.module, trap.call, SAMPLES, objective=trap.objective)
    return {title: outcome(trap, library, expected) for title, library in libraries().items()}


TRUST = "tests/recording/test_trust.py::"
INDEPENDENCE = "tests/recording/test_independence.py::"
# What a training script may do around the forward, what comes of it, and the test that proves it.
STEPS = [
    (
        "A method other than `forward` uses a parameter of its module, as a VAE's `encode` does",
        "error, by name",
        f"{TRUST}test_use_without_rows_is_refused_whatever_is_called",
    ),
    (
        "`F.linear(model.body(x), model.head.weight)` in the training loop, outside of any `forward`",
        "error, by name",
        f"{TRUST}test_use_without_rows_is_refused_whatever_is_called",
    ),
    (
        "Both of these by `expanded(weight)` within `one_pass(model, batch_size)`",
        "right",
        f"{TRUST}test_one_pass_makes_methods_submodules_and_weights_one",
    ),
    (
        "A block with a position `(1, T)` of its own is called alone",
        "right",
        f"{TRUST}test_submodule_with_children_that_is_called_alone_is_one_pass",
    ),
    (
        "A layer is frozen at first and trained later; a weight is replaced, or loaded with `assign=True`",
        "right",
        f"{TRUST}test_rows_are_right_whatever_was_before",
    ),
    (
        "A layer is replaced by a plain one",
        "error, by name",
        "tests/test_silent_failures.py::test_layer_replaced_after_conversion",
    ),
    (
        "A backward fails midway, and the script goes on with `zero_grad(set_to_none=False)`",
        "right",
        f"{TRUST}test_failed_backward_leaves_no_ghost_rows",
    ),
    (
        "A stage is frozen, or its head swapped, and the rest is trained by a new optimizer",
        "right",
        f"{TRUST}test_no_zero_rows_of_frozen_or_removed_parameters",
    ),
    (
        "A module takes the mean over the batch, beside a dropout",
        "error, by name",
        f"{TRUST}test_mixing_beside_chance_is_refused",
    ),
    ("A module changes its input in place", "right", f"{TRUST}test_input_changed_in_place_by_a_module"),
    (
        "`.grad` is cleared by `p.grad.data.zero_()`, or set anew",
        "right",
        f"{TRUST}test_clearing_is_seen",
    ),
    (
        "`.grad` is scaled between two backwards that accumulate",
        "right",
        f"{TRUST}test_rows_stay_where_an_accumulated_gradient_is_scaled",
    ),
    (
        "`.grad` is changed in place to something else between the two",
        "error, by name",
        "tests/test_errors.py::a_gradient_of_another_origin",
    ),
    (
        "The first of what all samples share is taken: `self.positions(ids)[0]` with `ids` `(1, T)`",
        "error, by name",
        f"{TRUST}test_first_of_a_shared_result",
    ),
    (
        "What all samples share is expanded to as many heads as there are samples",
        "right, sample by sample",
        "tests/test_escalation.py::test_rows_that_are_as_many_as_samples",
    ),
    (
        "The model computes with `len` of what all samples share",
        "right, sample by sample",
        "tests/recording/test_independence.py::test_the_size_of_what_all_samples_share",
    ),
    (
        "Experts have room for so many rows of the whole batch, and drop the others",
        "error, by name",
        "tests/test_folded.py::test_a_capacity_of_the_whole_batch_is_refused",
    ),
    (
        "A module folds its samples, and puts them into each other's places",
        "right",
        "tests/test_folded.py::test_other_folds",
    ),
    (
        "A reentrant checkpoint calls another model that has rows as well",
        "right",
        "tests/recording/test_mechanism.py::test_a_checkpoint_that_calls_another_model",
    ),
    (
        "A copied model still computes with a weight of the original, in a closure",
        "error, by name",
        f"{TRUST}test_closure_over_the_original_model",
    ),
    (
        "Images of all samples come in one argument, and `masked_scatter` puts two of them into one text",
        "error, by name",
        "tests/test_folded_arguments.py::test_one_image_of_each_is_not_two_of_one",
    ),
    (
        "A model sorts its samples between two layers, as by length before `pack_padded_sequence`, and goes back",
        "right",
        f"{TRUST}test_sequences_sorted_by_hand",
    ),
    (
        "Samples are shuffled or folded between two submodules that the training loop calls",
        "error, by name",
        f"{TRUST}test_samples_in_another_order_between_two_calls",
    ),
    (
        "Each of several heads has a backward of its own, with `retain_graph=True`",
        "right",
        f"{TRUST}test_heads_with_a_backward_each",
    ),
    (
        "A forward mixes its samples between layers, as by a mean over the batch or similarities of all pairs",
        "error, by name",
        f"{INDEPENDENCE}test_samples_that_meet_are_refused",
    ),
    (
        "It begins to do so in a later step",
        "error, by name, after some calls",
        f"{INDEPENDENCE}test_mixing_that_begins_later_is_refused_soon_after",
    ),
    (
        "A table of B rows goes through a layer, made by `hann_window`, `from_numpy` or a function with a cache",
        "right",
        f"{INDEPENDENCE}test_tables_with_as_many_rows_as_there_are_samples",
    ),
    (
        "The texts of all classes are an argument, and there are B of them",
        "error, by name; the rows are right if a batch before was of another size",
        f"{INDEPENDENCE}test_an_argument_that_all_samples_share_has_as_many_rows",
    ),
    (
        "A module with parameters of its own begins to join its samples in a later step, by other operations",
        "error, by name",
        "tests/test_whole.py::test_samples_that_are_joined_later",
    ),
    (
        "A module with parameters of its own joins its samples where values are large",
        "error, by name, after some calls",
        "tests/test_whole.py::test_samples_that_meet_by_their_values_later",
    ),
    (
        "`no_grad` around the model, and `enable_grad` in it",
        "right",
        f"{TRUST}test_gradients_enabled_inside_of_no_grad_have_rows",
    ),
    (
        "Rows are edited in place before the next backward accumulates",
        "right",
        f"{TRUST}test_edits_of_rows_stay_at_the_next_backward",
    ),
    (
        "Clipping, and a trainable parameter has a gradient that is in no row, whatever the way it came by it",
        "error, by name",
        f"{TRUST}test_gradient_without_rows_is_refused_by_name",
    ),
    (
        "A forward asks `isinstance(self.gate, nn.Parameter)`, and the gate is zero at first",
        "right",
        "tests/recording/test_independence.py::test_what_stands_in_for_a_parameter_is_one",
    ),
    (
        "A forward asks `type(self.layer) is nn.Linear`, and leaves out a parameter that is zero at first",
        "error, by name, at the first or second call",
        "tests/recording/test_independence.py::test_a_forward_that_asks_for_a_class",
    ),
    (
        "Nodes of a graph are the samples, joined by a matrix that the model is called with, dense or sparse",
        "error",
        "tests/recording/test_independence.py::test_samples_that_a_matrix_of_pairs_joins",
    ),
    (
        "A compiled step changes windows of one series in place, which lie elsewhere at each call",
        "right, eagerly",
        "tests/test_compiled_memory.py::test_windows_of_one_tensor_that_the_step_changes",
    ),
    (
        "A compiled step returns `.grad`, to which the script adds noise",
        "right",
        "tests/test_compiled_memory.py::test_the_gradient_that_is_returned_is_the_one_that_is_set",
    ),
]

HEAD = """\
# Silent failures

A wrong gradient of the right shape trains, and nobody notices. These are cases in which libraries for per-sample
gradients have been seen to go wrong, each run through all of them in float64 and compared with a loop over the samples
in plain PyTorch.

- **right**: all rows agree with the loop, to a relative error of 1e-9.
- **wrong**: rows came out, but their values, or their number, differ from the loop's.
- **no rows**: a parameter got none. Asking for them gives `None` or an AttributeError.
- **error**: the library refused, or failed in the attempt. No rows, no harm.

{counts}

The table is written by a script that takes each module and input from the very test that proves our column:

```sh
PYTHONPATH=tests python docs/silent_failures.py            # all of it, and this page
PYTHONPATH=tests python docs/silent_failures.py "groups"   # one line, on the screen
```

Peers that are not installed are left out (`pip install opacus`, `pip install --no-deps backpack-for-pytorch unfoldNd`).
The tests run it again, and compare with this page for the libraries that are there.

How each library was asked: `GradSampleModule(model)` with Opacus' own `DPLSTM` for the LSTM; BackPACK's `BatchGrad`;
`vmap(grad(loss))` over `functional_call`; and `call_for_per_sample_grads(model)`, PyTorch's own ExpandedWeights. The
loss is a sum over the samples of each one's own. An error is no reproach: it is what we do ourselves where rows cannot
be right.

"""


STEPS_HEAD = """
## In a training script

Rows may also go wrong between the forwards: a parameter gets a gradient that no row is a part of, which clipping would
leave as large as it is, or rows of an earlier step stay. These cases are about how a library holds rows from step to
step, so they are not compared with others. *Right* means that all rows agree with the loop; an *error* says what to
write instead. The tests are in `tests/recording/test_trust.py` and `test_independence.py`, and in `tests/`:
`test_silent_failures.py`, `test_whole.py`, `test_folded.py`, `test_escalation.py`, `test_errors.py` and
`test_compiled_memory.py`.
"""


def page(found: list[tuple[Trap, dict[str, Outcome]]]) -> str:
    titles = list(libraries())
    counts = []
    for title in titles:
        words = [outcomes[title].word for _, outcomes in found]
        said = [f"{words.count(word)} {word}" for word in ("right", "wrong", "no rows", "error") if word in words]
        counts.append(f"| {title} | {', '.join(said)} |")
    lines = [HEAD.format(counts="\n".join(["| Library | Cases |", "|---|---|", *counts])), "## The cases\n"]
    lines += ["| Case | " + " | ".join(titles) + " |", "|---|" + "---|" * len(titles)]
    for trap, outcomes in found:
        cells = (outcomes[title].cell for title in titles)
        lines.append(f"| [{trap.title}](#{anchor(trap.title)}) | " + " | ".join(cells) + " |")
    lines.append(steps())
    lines.append("\n## In detail\n")
    for trap, outcomes in found:
        lines += [f"({anchor(trap.title)})=", f"### {trap.title}\n"]
        for title, each in outcomes.items():
            detail = f": {as_text(each)}" if each.detail else ""
            lines.append(f"- {title}: {each.cell}{detail}")
        again = f"PYTHONPATH=tests python docs/silent_failures.py '{trap.title}'"
        lines.append(f'\n```sh\npytest "{trap.test}"\n{again}\n```\n')
    return "\n".join(lines)


def steps() -> str:
    """The part on what a training script does around the forward."""
    lines = [f"| {what} | {comes} | `{test.partition('::')[2]}` |" for what, comes, test in STEPS]
    return "\n".join([STEPS_HEAD, "| A script does | Result | Test |", "|---|---|---|", *lines])


def as_text(found: Outcome) -> str:
    """Error texts as code, so that nothing in them is taken for markup."""
    if found.word == "error":
        return "`" + found.detail.replace("`", "'") + "`"
    return found.detail


def anchor(title: str) -> str:
    return "trap-" + "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    words = [each.lower() for each in sys.argv[1:]]
    found = []
    for trap in traps():
        if all(word in trap.title.lower() for word in words):
            found.append((trap, run(trap)))
            print(trap.title)
            for title, each in found[-1][1].items():
                print(f"    {title:24} {each.word:8} {each.detail}")
    if not words:
        Path(__file__).with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
