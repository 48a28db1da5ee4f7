"""The small parts of a recording, without a model and without autograd: passes, a backward, rows, what is stale.

What they do together is tested in test_mechanism.py, test_sequences.py and test_outside_use.py.
"""

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from expanded_nn import FactoredTensor, PerSampleError
from expanded_nn.core.terms import Outer
from expanded_nn.recording.backward import Backward, BackwardStage
from expanded_nn.recording.leaf import ExpectedGradient, Leaf
from expanded_nn.recording.passes import Pass, Passes, PassStage
from expanded_nn.recording.stale import stale
from expanded_nn.recording.store import Store

OPEN, REACHED, DONE = PassStage.OPEN, PassStage.REACHED, PassStage.DONE
IDLE, RECOMPUTING, DELIVERING = BackwardStage.IDLE, BackwardStage.RECOMPUTING, BackwardStage.DELIVERING


# Passes: which forwards' rows belong together.


class Script:
    """The events of a pass's life, by the words of the table in the docstring of `Pass`."""

    def __init__(self) -> None:
        self.passes = Passes()
        self.first = self.passes.joined_or_new(3)

    def same_batch(self) -> None:
        self.passes.joined_or_new(3)

    def other_batch(self) -> None:
        self.passes.joined_or_new(4)

    def delivers(self) -> None:
        """As the recorder does it when rows arrive."""
        if self.first.stage is OPEN:
            self.first.stage = REACHED

    def over(self) -> None:
        self.passes.backward_is_over()


@pytest.mark.parametrize(
    ("events", "stage", "is_joined"),
    [
        ([], OPEN, True),
        (["same_batch"], OPEN, True),
        (["other_batch"], OPEN, False),
        (["over"], OPEN, True),  # a backward that did not reach it
        (["delivers"], REACHED, False),
        (["delivers", "delivers"], REACHED, False),
        (["delivers", "over"], DONE, False),
        (["delivers", "over", "delivers"], DONE, False),  # a second backward on the same graph
        (["delivers", "over", "delivers", "over"], DONE, False),
    ],
)
def test_the_stages_of_a_pass(events: list[str], stage: PassStage, is_joined: bool) -> None:
    script = Script()
    for event in events:
        getattr(script, event)()
    assert script.first.stage is stage
    assert (script.passes.joined_or_new(3) is script.first) == is_joined


def test_passes_are_numbered_in_the_order_of_their_forwards() -> None:
    passes = Passes()
    opened = [passes.joined_or_new(3), passes.joined_or_new(3), passes.new(3), passes.joined_or_new(4)]
    assert [pass_.number for pass_ in opened] == [0, 0, 1, 2]
    assert repr(opened[2]) == "Pass(batch=3, number=1, stage=OPEN)"


def test_a_new_pass_is_joined_by_none() -> None:
    passes = Passes()
    before = passes.joined_or_new(3)
    passes.new(3)
    assert passes.joined_or_new(3) is before


def test_a_pass_that_is_done_is_joined_no_more() -> None:
    passes = Passes()
    passes.joined_or_new(3).stage = REACHED
    passes.backward_is_over()
    assert passes.last is None


def test_passes_live_as_long_as_a_graph_keeps_them() -> None:
    passes = Passes()
    kept, dropped = passes.new(3), passes.new(3)
    seen = weakref.ref(dropped)
    del dropped
    assert seen() is None
    assert set(passes.alive) == {kept}


def test_kept_passes_are_let_go_once_they_are_done() -> None:
    passes = Passes()
    done, kept = passes.new(3), passes.new(4)
    passes.kept = {done, kept}
    done.stage = REACHED
    passes.backward_is_over()
    assert passes.kept == {kept}


@pytest.mark.parametrize(
    ("stages", "batches", "behind", "batch", "fitting"),
    [
        ([OPEN], [3], [], 3, [0]),
        ([OPEN], [3], [], 5, [0]),  # the only one there is: the layer complains of the number of samples
        ([OPEN], [3], [], None, [0]),
        ([OPEN, OPEN], [3, 4], [], 4, [1]),
        ([OPEN, OPEN], [3, 4], [], 1, [0, 1]),  # one row may be shared by all samples
        ([OPEN, OPEN], [3, 3], [], 3, [0, 1]),
        ([OPEN, OPEN], [3, 3], [1], 3, [1]),  # the graph tells
        ([OPEN, OPEN], [3, 4], [], 5, []),
        ([OPEN, OPEN], [3, 4], [], None, []),
        ([DONE, OPEN], [3, 3], [], 3, [1]),
        ([DONE, REACHED], [3, 3], [], 3, [1]),
        ([DONE, DONE], [3, 4], [], 3, [0]),  # a second backward on a retained graph
        ([DONE, OPEN], [3, 3], [0], 3, [0]),
        ([], [], [], 3, []),
    ],
)
def test_the_pass_of_a_recomputation(
    stages: list[PassStage], batches: list[int], behind: list[int], batch: int | None, fitting: list[int]
) -> None:
    passes = Passes()
    all_passes = [passes.new(size) for size in batches]
    for pass_, stage in zip(all_passes, stages, strict=True):
        pass_.stage = stage
    candidates = passes.recomputed(batch, [all_passes[number] for number in behind])
    assert sorted(pass_.number for pass_ in candidates) == fitting


# A backward: when it begins to deliver, when it is over, whether it failed.


class Engine:
    """Keeps callbacks as torch's does: until the backward ends, or lets go of them if it fails."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def end(self) -> None:
        while self.callbacks:
            self.callbacks.pop(0)()

    def fail(self) -> None:
        self.callbacks.clear()


class Model:
    """What a backward tells that it has ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[bool, bool]] = []
        self.backward = Backward(self.on_end)

    def on_end(self, delivered: bool, failed: bool) -> None:
        self.ends.append((delivered, failed))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
    return engine


@pytest.mark.parametrize(
    ("events", "stage", "begins", "ends"),
    [
        # what happens, the stage after it, which deliveries were the first, what `on_end` was told
        ([], IDLE, [], []),
        (["end_unfinished"], IDLE, [], []),
        (["forward"], RECOMPUTING, [False], []),
        (["forward", "forward"], RECOMPUTING, [False, False], []),
        (["rows"], DELIVERING, [True], []),
        (["rows", "rows"], DELIVERING, [True, False], []),
        (["forward", "rows"], DELIVERING, [False, True], []),
        (["rows", "forward"], DELIVERING, [True, False], []),
        (["rows", "forward", "rows"], DELIVERING, [True, False, False], []),
        (["forward", "end"], IDLE, [False], [(False, False)]),
        (["rows", "end"], IDLE, [True], [(True, False)]),
        (["rows", "end", "end_unfinished"], IDLE, [True], [(True, False)]),
        (["rows", "end", "rows", "end"], IDLE, [True, True], [(True, False), (True, False)]),
        (["forward", "fail"], IDLE, [False], [(False, True)]),
        (["rows", "fail"], IDLE, [True], [(True, True)]),
        (["rows", "fail", "end_unfinished"], IDLE, [True], [(True, True)]),
        (["rows", "fail", "rows"], DELIVERING, [True, True], [(True, True)]),
        (["rows", "fail", "rows", "end"], IDLE, [True, True], [(True, True), (True, False)]),
        (["rows", "end_unfinished"], IDLE, [True], [(True, True)]),  # the engine keeps the callback, but nothing runs
        (["rows", "end_unfinished", "end"], IDLE, [True], [(True, True)]),  # it is called late, and too late
        (["rows", "end_unfinished", "rows", "end"], IDLE, [True, True], [(True, True), (True, False)]),
    ],
)
def test_the_stages_of_a_backward(
    engine: Engine, events: list[str], stage: BackwardStage, begins: list[bool], ends: list[tuple[bool, bool]]
) -> None:
    model = Model()
    began = []
    for event in events:
        if event in ("forward", "rows"):
            began.append(model.backward.enter(delivers=event == "rows"))
        elif event == "end_unfinished":
            model.backward.end_unfinished()
        else:
            getattr(engine, event)()
    assert (model.backward.stage, began, model.ends) == (stage, begins, ends)


def test_a_backward_inside_of_another_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has callbacks of its own; those of the outermost that has met the model count."""
    outer, inner, model = Engine(), Engine(), Model()
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", outer)
    assert not model.backward.enter(delivers=False)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", inner)
    assert model.backward.enter(delivers=True)
    assert not inner.callbacks
    inner.end()
    assert model.backward.stage is DELIVERING
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", outer)
    assert not model.backward.enter(delivers=True)
    outer.end()
    assert model.ends == [(True, False)]


def test_a_backward_ends_behind_the_callbacks_of_others(engine: Engine) -> None:
    model, order = Model(), []
    model.backward.enter(delivers=True)
    engine.queue_callback(lambda: order.append(len(model.ends)))  # as DistributedDataParallel's, queued later
    engine.end()
    assert order == [0]
    assert model.ends == [(True, False)]


def test_two_models_in_one_backward(engine: Engine) -> None:
    models = [Model(), Model()]
    for model in models:
        model.backward.enter(delivers=True)
    engine.end()
    assert [model.ends for model in models] == [[(True, False)], [(True, False)]]


@pytest.mark.parametrize("event", ["end", "fail"])
def test_a_model_that_is_gone_is_told_nothing(engine: Engine, event: str) -> None:
    model = Model()
    model.backward.enter(delivers=True)
    ends, gone = model.ends, weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    getattr(engine, event)()
    assert ends == []


# What expansions have sent, and what arrives.


def test_what_one_expansion_sent_is_the_very_tensor() -> None:
    gradient = torch.ones(2)
    expected = ExpectedGradient(gradient)
    assert expected.matches(gradient)
    assert not expected.matches(gradient.clone())
    gradient += 1  # autograd adds in place what comes from elsewhere
    assert not expected.matches(gradient)


@pytest.mark.parametrize("count", [2, 3])
def test_what_several_passes_sent_is_compared_with_their_sum(count: int) -> None:
    gradients = list(torch.randn(count, 4))
    gradients[0][0] = torch.nan  # of a sample that is NaN
    expected = ExpectedGradient(gradients[0])
    arrived = gradients[0].clone()
    for gradient in gradients[1:]:
        expected.add(gradient)
        arrived += gradient
    assert expected.matches(arrived)
    assert not expected.matches(arrived + 1)


def test_what_was_added_to_the_first_before_the_second_came_is_seen() -> None:
    first, second = torch.ones(2), torch.ones(2)
    expected = ExpectedGradient(first)
    first += 1
    expected.add(second)
    assert not expected.matches(first + second)


def test_what_took_the_place_of_the_first_is_seen() -> None:
    expected, second = (
        ExpectedGradient(torch.ones(2)),
        torch.ones(2),
    )  # the engine holds another sum, and the first is no more
    expected.add(second)
    assert not expected.matches(torch.full((2,), 3.0))


def test_sparse_gradients_are_compared_by_their_numbers() -> None:
    first, second = torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()
    expected = ExpectedGradient(first)
    expected.add(second)
    assert expected.matches(first + second)
    assert expected.matches((first + second).to_dense())


# Which rows are stale.


def leaf_of(parameter: Tensor) -> Leaf:
    parameter.grad_sample = None
    return Leaf(weakref.ref(parameter))


class Held:
    """A parameter whose `.grad` is the sum of the rows that it holds, as after a backward."""

    def __init__(self, rows: Tensor) -> None:
        self.parameter = nn.Parameter(torch.zeros(rows.shape[1:], dtype=rows.dtype))
        self.leaf = leaf_of(self.parameter)
        self.leaf.publish(rows, [Pass(len(rows), 0)])
        self.parameter.grad = rows.sum(0)
        self.leaf.note_grad()

    def set_grad(self, grad: Tensor | None) -> None:
        self.parameter.grad = grad

    @property
    def grad(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad


def reset(held: Held) -> None:
    held.parameter.grad_sample = None


# what the user does between two backwards -> whether rows that add up to something, and rows that cancel, are stale
EDITS: dict[str, tuple[Callable[[Held], Any], bool, bool]] = {
    "nothing": (lambda held: None, False, False),
    "grad = None": (lambda held: held.set_grad(None), True, True),
    "grad_sample = None": (reset, True, True),
    "grad.zero_()": (lambda held: held.grad.zero_(), True, False),
    "grad.data.zero_()": (lambda held: held.grad.data.zero_(), True, False),  # which raises no version
    "grad = zeros": (lambda held: held.set_grad(torch.zeros_like(held.grad)), True, False),
    "grad.mul_(2)": (lambda held: held.grad.mul_(2), False, False),
    "grad = 2 * grad": (lambda held: held.set_grad(2 * held.grad), False, False),
    "grad = clone": (lambda held: held.set_grad(held.grad.clone()), False, False),
    "grad = another": (lambda held: held.set_grad(torch.arange(1.0, 6.0)), True, True),
}


def name_of(parameter: Tensor) -> str:
    return "the parameter"


@pytest.mark.parametrize("edit", EDITS)
def test_which_rows_are_stale(edit: str) -> None:
    change, of_rows, of_cancelling = EDITS[edit]
    row = torch.randn(5)
    for rows, wanted in (torch.stack([row, 2 * row, row + 1]), of_rows), (torch.stack([row, -row]), of_cancelling):
        held = Held(rows)
        change(held)
        assert (stale([held.leaf], name_of) == [held.leaf]) == wanted


@pytest.mark.parametrize("rows", [[[1.0, 2.0, 0.5, 0.1, 3.0]], [[1.0] * 5, [-1.0] * 5]])
def test_a_grad_that_was_changed_to_something_else_is_refused(rows: list[list[float]]) -> None:
    held = Held(torch.tensor(rows))
    held.grad.add_(torch.arange(1.0, 6.0))
    with pytest.raises(PerSampleError, match=r"the parameter: its \.grad was changed since"):
        stale([held.leaf], name_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_whose_factors_cancel_but_for_rounding_are_held(dtype: torch.dtype) -> None:
    """What is left of them is small beside the factors, not beside itself."""
    g, a = torch.randn(4, 1, 5, dtype=dtype), torch.randn(4, 1, 6, dtype=dtype)
    rows = FactoredTensor.of(Outer.of(torch.cat([g * 0.1, g * 0.2, g * -0.3], 1), torch.cat([a, a, a], 1), dtype))
    held = Held(rows)
    assert held.grad.any()
    held.grad.zero_()
    assert stale([held.leaf], name_of) == []


def test_parameters_that_are_no_more_are_stale() -> None:
    held = Held(torch.randn(2, 5))
    del held.parameter
    assert stale([held.leaf], name_of) == [held.leaf]


def test_a_zero_gradient_among_zero_gradients_is_a_cleared_one() -> None:
    """Rows that cancel go with the others, if all gradients are zero: they were cleared together."""
    row = torch.randn(5)
    cancelling, other = Held(torch.stack([row, -row])), Held(torch.stack([row, row]))
    leaves = [cancelling.leaf, other.leaf]
    assert stale(leaves, name_of) == []
    other.grad.zero_()
    assert set(map(id, stale(leaves, name_of))) == set(map(id, leaves))
    third = Held(torch.stack([row, row]))  # a gradient that was not cleared
    assert stale([*leaves, third.leaf], name_of) == [other.leaf]


def test_what_is_known_of_a_grad() -> None:
    held = Held(torch.randn(2, 5))
    leaf = held.leaf
    assert (leaf.grad_is_as_noted(), leaf.grad_is_another()) == (True, False)
    held.grad.mul_(2)
    assert (leaf.grad_is_as_noted(), leaf.grad_is_another()) == (False, False)
    held.set_grad(held.grad.clone())
    assert (leaf.grad_is_as_noted(), leaf.grad_is_another()) == (False, True)
    held.set_grad(None)
    leaf.note_grad()
    assert (leaf.grad_is_as_noted(), leaf.grad_is_another()) == (True, False)
    held.set_grad(torch.ones(5))
    assert (leaf.grad_is_as_noted(), leaf.grad_is_another()) == (False, False)  # there was none to be another than


def test_a_leaf_sets_grad_sample_and_sees_that_the_user_did() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    leaf, rows = leaf_of(parameter), torch.ones(3, 2)
    assert not leaf.was_reset()
    leaf.publish(rows)
    assert parameter.grad_sample is rows
    before = leaf.published
    leaf.publish(None)
    leaf.publish_again(before)
    assert parameter.grad_sample is rows
    assert leaf.published is before
    parameter.grad_sample = rows.clone()
    assert leaf.was_reset()


def test_the_mark_of_opacus_goes_over_to_the_next_rows() -> None:
    leaf = leaf_of(parameter := nn.Parameter(torch.zeros(2)))
    rows = torch.ones(3, 2)
    rows._processed = True
    leaf.publish(rows)
    leaf.publish(torch.ones(6, 2))
    assert parameter.grad_sample._processed


def test_a_leaf_adds_up_what_is_sent_in_one_backward() -> None:
    leaf = leaf_of(nn.Parameter(torch.zeros(2)))
    first, second = torch.randn(2), torch.randn(2)
    leaf.expect(first)
    leaf.expect(second)
    (expected,) = leaf.expected.values()
    assert expected.matches(first + second)


# The rows held.

SHAPE = (4, 3)


def dense(batch: int) -> Tensor:
    return torch.randn(batch, *SHAPE)


def factored(batch: int) -> Tensor:
    return FactoredTensor.of(Outer.of(torch.randn(batch, 1, 4), torch.randn(batch, 1, 3), torch.float64))


class Rows:
    """A store, its parameters and passes, and the rows as they should be, in plain tensors."""

    def __init__(self, make: Callable[[int], Tensor], *, leaves: int = 2, materialize: bool = False) -> None:
        self.make, self.store, self.passes = make, Store(materialize), Passes()
        self.parameters = [nn.Parameter(torch.zeros(SHAPE)) for _ in range(leaves)]
        self.leaves = [leaf_of(parameter) for parameter in self.parameters]
        self.wanted: dict[int, dict[int, Tensor]] = {}
        self.batches: dict[int, int] = {}

    def opened(self, batch: int) -> Pass:
        return self.passes.new(batch)

    def add(self, pass_: Pass, number: int) -> None:
        rows = self.make(pass_.batch)
        twin = rows.clone() if not isinstance(rows, FactoredTensor) else rows.clone().dense()
        self.batches[pass_.number] = pass_.batch
        pass_rows = self.wanted.setdefault(pass_.number, {})
        pass_rows[number] = pass_rows[number] + twin if number in pass_rows else twin
        self.store.add(pass_, self.leaves[number], rows)

    def backward(self, batch: int, *numbers: int) -> Pass:
        """One forward and its backward, which reaches some of the parameters."""
        pass_ = self.opened(batch)
        self.store.begin()
        for number in numbers:
            self.add(pass_, number)
        self.store.complete(self.leaves)
        return pass_

    def published(self, number: int) -> Tensor | None:
        rows: Tensor | None = self.parameters[number].grad_sample
        return rows

    def numbers(self, number: int) -> Tensor:
        """What is shown, as plain numbers of its own, without making the rows dense."""
        rows = self.published(number)
        assert rows is not None
        return rows.clone().dense() if isinstance(rows, FactoredTensor) else rows.clone()

    def check(self) -> None:
        """Every parameter shows what it should: one row per sample of each pass, zero rows where it was not used."""
        for number, leaf in enumerate(self.leaves):
            assert self.published(number) is leaf.published.rows
            if not any(number in pass_rows for pass_rows in self.wanted.values()):
                assert self.published(number) is None
                continue
            zeros = {key: torch.zeros(batch, *SHAPE) for key, batch in self.batches.items()}
            parts = [self.wanted[key].get(number, zeros[key]) for key in sorted(self.wanted)]
            assert torch.allclose(self.numbers(number), torch.cat(parts))

    def forget(self, pass_: Pass) -> None:
        del self.wanted[pass_.number]


KINDS = pytest.mark.parametrize("make", [dense, factored])


@KINDS
@pytest.mark.parametrize("materialize", [False, True])
def test_rows_of_one_pass_add_and_of_several_are_appended(make: Callable[[int], Tensor], materialize: bool) -> None:
    rows = Rows(make, materialize=materialize)
    pass_ = rows.backward(2, 0, 0, 1)
    rows.check()
    rows.backward(3, 0, 1)
    rows.check()
    rows.add(pass_, 0)  # a second backward on the first graph
    rows.check()
    for batch in 1, 4, 0, 2:
        rows.backward(batch, 1, 0)
        rows.check()
    assert (type(rows.published(0)) is Tensor) == (materialize or make is dense)


@KINDS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_rows_stand_in_the_order_of_the_forwards(make: Callable[[int], Tensor], order: tuple[int, ...]) -> None:
    """However the backward comes by: the last forward's rows arrive first."""
    rows = Rows(make)
    all_passes = [rows.opened(batch) for batch in (2, 3, 1)]
    rows.store.begin()
    for number in 0, 1:
        for place in order:
            rows.add(all_passes[place], number)
    rows.store.complete(rows.leaves)
    rows.check()
    assert [pass_.number for pass_ in rows.store.held] == [0, 1, 2]


@KINDS
@pytest.mark.parametrize("materialize", [False, True])
def test_a_parameter_has_zero_rows_in_passes_that_did_not_use_it(
    make: Callable[[int], Tensor], materialize: bool
) -> None:
    rows = Rows(make, leaves=3, materialize=materialize)
    rows.backward(2, 0)
    rows.backward(3, 1)
    rows.backward(1, 0)
    rows.check()  # and the third, which nothing has used, has none
    rows.backward(2, 2)
    rows.check()
    assert [len(rows.numbers(number)) for number in range(3)] == [8, 8, 8]


@KINDS
@pytest.mark.parametrize("materialize", [False, True])
@pytest.mark.parametrize("arrived", [False, True], ids=["no gradient", "gradients"])
def test_all_rows_go_after_a_failure(make: Callable[[int], Tensor], materialize: bool, arrived: bool) -> None:
    """Those from before, too; what is in `.grad` is refused until it is cleared."""
    rows = Rows(make, materialize=materialize)
    pass_ = rows.backward(2, 0)
    if arrived:
        rows.parameters[0].grad = torch.ones(SHAPE)
    rows.store.begin()
    rows.add(pass_, 0)
    rows.add(rows.opened(3), 1)
    rows.store.give_up(rows.leaves)
    rows.wanted.clear()
    rows.batches.clear()
    rows.store.complete(rows.leaves)
    rows.check()
    assert rows.store.held == {}
    assert [leaf.lacks_rows() for leaf in rows.leaves] == [arrived, False]
    rows.backward(1, 0, 1)
    rows.check()
    rows.parameters[0].grad = None
    assert not rows.leaves[0].lacks_rows()


@KINDS
def test_rows_that_stand_alone_give_way_to_those_from_before(make: Callable[[int], Tensor]) -> None:
    """As those of a `torch.autograd.grad`."""
    rows = Rows(make)
    rows.backward(2, 0)
    rows.backward(3, 0, 1)
    before = [rows.numbers(0), rows.numbers(1)]
    wanted, rows.wanted = rows.wanted, {}
    rows.store.suspend(rows.leaves)
    rows.check()
    rows.backward(5, 1)
    rows.check()
    rows.store.resume(rows.leaves)
    rows.wanted = wanted
    rows.check()
    assert all(torch.equal(rows.numbers(number), before[number]) for number in range(2))
    rows.backward(1, 0, 1)
    rows.check()


@KINDS
def test_rows_that_the_user_took_away_meanwhile_do_not_come_back(make: Callable[[int], Tensor]) -> None:
    rows = Rows(make)
    rows.backward(2, 0, 1)
    rows.store.suspend(rows.leaves)
    rows.store.add(rows.opened(4), rows.leaves[0], make(4))
    rows.parameters[0].grad_sample = None
    rows.store.resume(rows.leaves)
    del rows.wanted[0][0]
    rows.check()


def test_to_take_back_where_nothing_was_set_aside_changes_nothing() -> None:
    rows = Rows(dense)
    rows.backward(2, 0, 1)
    rows.parameters[0].grad_sample = "the user's"
    rows.store.resume(rows.leaves)
    assert rows.parameters[0].grad_sample == "the user's"


@KINDS
def test_dropping_a_parameters_rows_leaves_the_others(make: Callable[[int], Tensor]) -> None:
    rows = Rows(make)
    only_first = rows.backward(2, 0)
    rows.backward(3, 0, 1)
    rows.store.drop([rows.leaves[0]])
    rows.leaves[0].publish(None)
    rows.forget(only_first)  # a pass that nothing has rows in is none
    del rows.wanted[1][0]
    rows.store.complete(rows.leaves)
    rows.check()


@KINDS
def test_dropping_reaches_what_was_set_aside(make: Callable[[int], Tensor]) -> None:
    rows = Rows(make)
    rows.backward(2, 0, 1)
    rows.store.suspend(rows.leaves)
    rows.store.drop([rows.leaves[0]])
    assert rows.store.suspended is not None
    assert [list(pass_rows) for pass_rows in rows.store.suspended[0].values()] == [[rows.leaves[1]]]
    rows.store.resume(rows.leaves)
    del rows.wanted[0][0]
    rows.check()


@KINDS
def test_passes_that_only_some_parameters_hold_rows_of_are_dropped(make: Callable[[int], Tensor]) -> None:
    rows = Rows(make)
    only_first = rows.backward(2, 0)
    rows.backward(3, 0, 1)
    rows.store.drop_passes_of([rows.leaves[0]])
    rows.forget(only_first)
    rows.store.complete(rows.leaves)
    rows.check()
    rows.store.drop_passes_of(rows.leaves)
    rows.wanted.clear()
    rows.check()
    assert rows.store.held == {}


@KINDS
@pytest.mark.parametrize("materialize", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_changed_in_place_is_kept(make: Callable[[int], Tensor], materialize: bool, count: int) -> None:
    rows = Rows(make, leaves=1, materialize=materialize)
    for _ in range(count):
        rows.backward(2, 0)
    published = rows.published(0)
    assert published is not None
    published.mul_(0.5)
    for pass_rows in rows.wanted.values():
        pass_rows[0] = pass_rows[0] / 2
    for _ in range(3):
        rows.backward(2, 0)
        rows.check()


@KINDS
def test_what_is_changed_in_place_by_making_it_dense_is_kept(make: Callable[[int], Tensor]) -> None:
    rows = Rows(make, leaves=1)
    rows.backward(2, 0)
    rows.backward(3, 0)
    published = rows.published(0)
    assert published is not None
    published[1] = 7.0
    rows.wanted[0][0][1] = 7.0
    rows.backward(1, 0)
    rows.check()


@KINDS
@pytest.mark.parametrize("reached", [(0, 1), (1, 0), (0,), (1,)])
def test_what_is_changed_in_place_is_kept_for_each_parameter(
    make: Callable[[int], Tensor], reached: tuple[int, ...]
) -> None:
    """For those whose rows come second in the next backward, or not at all, too."""
    rows = Rows(make)
    rows.backward(2, 0, 1)
    rows.backward(3, 0, 1)
    for number in 0, 1:
        published = rows.published(number)
        assert published is not None
        published.mul_(0.5)
        for pass_rows in rows.wanted.values():
            pass_rows[number] = pass_rows[number] / 2
    rows.backward(1, *reached)
    rows.check()


def test_memory_grows_without_moving_what_is_there() -> None:
    """Room for as many rows again: 20 passes move the rows a few times, not 20 times."""
    rows = Rows(dense, leaves=1)
    places = []
    for _ in range(20):
        rows.backward(2, 0)
        rows.check()
        published = rows.published(0)
        assert published is not None
        places.append(published.data_ptr())
    assert len(set(places)) <= 6
    moves = [place for place, (before, after) in enumerate(pairwise(places)) if before != after]
    assert all(later - earlier >= earlier for earlier, later in pairwise(moves[1:]))  # as long until the next one


def test_rows_that_somebody_keeps_stay_as_they_are_when_more_come() -> None:
    rows = Rows(dense, leaves=1)
    kept = []
    for _ in range(6):
        rows.backward(2, 0)
        published = rows.published(0)
        assert published is not None
        kept.append((published, published.clone(), published._version))
    for published, numbers, version in kept:
        assert torch.equal(published, numbers)
        assert published._version == version  # autograd takes the rows for unchanged


def test_rows_after_a_failure_are_not_written_into_those_that_somebody_keeps() -> None:
    """Rows are written behind those shown; after a failed backward they get other memory."""
    rows = Rows(dense, leaves=1)
    for _ in range(3):
        rows.backward(2, 0)
    rows.store.begin()
    rows.add(rows.opened(1), 0)
    kept = rows.published(0)
    assert kept is not None
    numbers = kept.clone()
    rows.store.give_up(rows.leaves)
    rows.wanted.clear()
    rows.batches.clear()
    rows.backward(1, 0)
    rows.check()
    assert torch.equal(kept, numbers)


def test_rows_with_a_graph_are_appended_with_their_graph() -> None:
    """As with create_graph=True."""
    rows = Rows(lambda batch: dense(batch).requires_grad_(), leaves=1)
    rows.backward(2, 0)
    rows.backward(3, 0)
    published = rows.published(0)
    assert published is not None
    assert published.requires_grad
    assert len(published) == 5


@KINDS
def test_clear_lets_go_of_all_rows(make: Callable[[int], Tensor]) -> None:
    rows = Rows(make)
    rows.backward(2, 0, 1)
    rows.store.suspend(rows.leaves)
    rows.backward(2, 0)
    rows.store.drop_every_pass()
    assert (rows.store.held, rows.store.suspended) == ({}, None)


def test_rows_of_a_parameter_that_is_no_more_are_held_without_being_shown() -> None:
    rows = Rows(dense)
    rows.backward(2, 0, 1)
    del rows.parameters[0]
    rows.store.add(rows.opened(3), rows.leaves[0], dense(3))
    rows.store.drop([rows.leaves[0]])
    rows.store.complete(rows.leaves)
    assert torch.allclose(rows.numbers(0), rows.wanted[0][1])
