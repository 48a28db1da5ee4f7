"""Random sequences of what a training script may do: see sequences.py, and contract.py for what is due."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from contract import Contract, Pass, Sent, Wrong
from sequences import (
    Alone,
    Backward,
    Clear,
    Clip,
    Copy,
    Forward,
    Freeze,
    Grads,
    Load,
    Outside,
    PerSample,
    Piece,
    Replace,
    Scale,
    Story,
    Together,
    Update,
)


def play_random(first_seed: int, stories: int) -> Counter[str]:
    """Plays so many random stories; what has happened in them."""
    happened: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + stories):
        story = Story.random(seed)
        try:
            happened += story.play()
        except Exception as error:
            short = story.shrunk()
            text = f"{short.error()!r}\n\n{short!r}\n\nfrom Story.random({seed}): {error!r}"
            pytest.fail(text, pytrace=False)
    return happened


BOTH_FORMS = [pytest.param(False, id="factored"), pytest.param(True, id="small_rows", marks=pytest.mark.small_rows)]


@pytest.mark.parametrize("small", BOTH_FORMS)
def test_random_sequences(small: bool) -> None:
    """The same each time; and that what may happen does happen, and is seldom refused."""
    happened = play_random(15 * small, 15)
    assert happened["a backward"] > 50
    assert happened["clipped"] > 15
    assert sum(count for what, count in happened.items() if what.startswith("refused")) < happened["a backward"] / 10


@pytest.mark.fuzz
@pytest.mark.parametrize("small", BOTH_FORMS)
@pytest.mark.parametrize("chunk", range(20))
def test_many_random_sequences(chunk: int, small: bool) -> None:
    """Others each time: 2,000 of 40 steps."""
    play_random(random.SystemRandom().randrange(1 << 40), 50)


def opens_always(contract: Contract, samples: int) -> Pass:
    contract.last = None
    return OPEN(contract, samples)


def goes_on_after_a_backward(contract: Contract, samples: int) -> Pass:
    if contract.last is not None and contract.last.batch == samples:
        return contract.last
    return OPEN(contract, samples)


def keeps_stale_rows(contract: Contract, parts: Sequence[Any], trainable: set[int]) -> None:
    contract.cleared = set()
    DELIVER(contract, parts, trainable)


def reverses_passes(contract: Contract, *args: Any) -> dict[int, Tensor | None]:
    contract.passes.reverse()
    due = DUE(contract, *args)
    contract.passes.reverse()
    return due


def leaves_out_zero_rows(contract: Contract, shapes: dict[int, torch.Size], trainable: set[int]) -> dict[int, Any]:
    parts = {key: [held.rows[key] for held in contract.passes if key in held.rows] for key in trainable}
    return {key: torch.cat(rows) if rows else None for key, rows in parts.items()}


def counts_every_pass(contract: Contract, shapes: dict[int, torch.Size], trainable: set[int]) -> dict[int, Any]:
    everything = {key for held in contract.passes for key in held.rows} | trainable
    shapes = {**{key: torch.Size() for key in everything}, **shapes}
    return {key: rows for key, rows in DUE(contract, shapes, everything).items() if key in trainable}


def scales_by_the_last_batch(sent: Sent, kind: str) -> dict[int, Tensor]:
    return {key: rows / max(1, len(sent.x)) for key, rows in ROWS(sent, kind).items()}


OPEN, DELIVER, DUE, ROWS = Contract.open, Contract.deliver, Contract.due, Sent.rows
BROKEN: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "each_forward_is_a_pass": (Contract, "open", opens_always),
    "a_pass_goes_on_after_a_backward": (Contract, "open", goes_on_after_a_backward),
    "stale_rows_stay": (Contract, "deliver", keeps_stale_rows),
    "another_order": (Contract, "due", reverses_passes),
    "no_zero_rows": (Contract, "due", leaves_out_zero_rows),
    "rows_of_frozen_parameters_count": (Contract, "due", counts_every_pass),
    "another_scale": (Sent, "rows", scales_by_the_last_batch),
}


@cache
def is_right(seed: int) -> bool:
    """Whether a random sequence is, with no rule broken."""
    return Story.random(seed).error() is None


@pytest.mark.parametrize(("owner", "name", "broken"), BROKEN.values(), ids=BROKEN)
def test_a_broken_contract_is_noticed(
    owner: type, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is due matters: with one rule of it broken, a sequence that is right goes wrong, and soon."""
    for seed in filter(is_right, range(60)):
        story = Story.random(seed)
        with monkeypatch.context() as context:
            context.setattr(owner, name, broken)
            if isinstance(story.error(), Wrong):
                return
    pytest.fail("nothing went wrong")


# What was found once, each the shortest that shows it.
FOUND: dict[str, Story] = {
    "clearing_by_data_is_seen": Story([Forward(), Backward(), Clear("data_zero"), Forward(), Backward()]),
    "clearing_by_data_is_seen_within_a_pass": Story(
        [Forward(), Piece(), Backward(), Clear("data_zero"), Backward()],
    ),
    "gradient_that_cancels_is_not_cleared": Story(
        [Forward(), Backward(), Forward(), Backward(factor=-1.0), Scale(), Forward(), Backward()],
    ),
    # beside the norm of rows that cancel the rounding error of their sum was large
    "gradient_that_cancels_in_one_pass_is_not_cleared": Story(
        [
            *(Forward(samples=4), Alone(), Backward(), Clear()),
            *(Backward(factor=2.0, retain=True), Backward(factor=-1.0, retain=True), Backward(factor=-1.0)),
            *(Forward(), Backward()),
        ],
        "Own",
    ),
    "clearing_is_seen_where_rows_cancel_beside_a_gradient_from_before": Story(
        [
            *(Forward(), Backward(), Clear("rows")),
            *(Forward(3), Backward(), Forward(3), Backward(factor=-1.0), Clear("optimizer_to_zero")),
            *(Forward(), Backward()),
        ],
    ),
    "clearing_is_seen_where_rows_cancel_of_which_some_were_scaled_in_grad": Story(
        [
            *(Forward(3, seed=1), Backward(factor=-1.0), Scale(), Together(3, use="forward", seed=1)),
            *(Forward(), Clear("optimizer_to_zero"), Backward()),
        ],
    ),
    "clearing_is_seen_where_there_were_no_samples": Story(
        [Forward(), Backward(), PerSample(), Piece(0), Backward(), Clear("zero"), Together(use="weight")],
    ),
    "gradient_that_cancels_after_clipping": Story(
        [Piece(1, "general"), Backward(factor=-1.0, retain=True), Clip(5.0), Backward(), Forward(), Backward()],
    ),
    "clipped_sum_that_is_rounding_noise_is_cleared": Story(
        [
            Freeze("mix"),
            *(Forward(3), Backward(), Forward(3), Backward(factor=-1.0), Clip(), Clear("data_zero")),
            Forward(),
            Backward(),
        ],
    ),
    "empty_backward_that_fails_after_clearing": Story(
        [*(Forward(), Backward(), Clear("data_zero"), Forward(0), Backward(fault="accumulated")), Together()],
    ),
    # with what a backward that failed had left without rows, the next one's gradients made zero
    "gradient_that_cancels_after_a_backward_that_failed": Story(
        [
            *(Forward(seed=3), Backward(factor=-1.0, retain=True), Forward(use="checkpoint", seed=3)),
            *(Backward(fault="parameter"), Backward()),
        ],
    ),
    "a_backward_that_failed_left_zeros": Story(
        [
            *(Forward(), PerSample(), Forward(), Backward(), Clear("zero"), Forward(), Backward(of=(-1, -2))),
            *(Forward(), Backward(), Clip()),
        ],
    ),
    "clipping_after_a_checkpoint_that_failed": Story(
        [
            *(Forward(use="back"), Backward(), Clip(), Forward(use="reentrant"), Backward(fault="parameter")),
            *(Forward(), Backward(), Clip()),
        ],
        settings={"accumulate_grad": False},
    ),
    "clipping_gradients_that_cancel_beside_others_and_were_scaled": Story(
        [
            *(Forward(use="features"), Backward(), Forward(0), Backward(), Clip()),
            *(Forward(1), Backward(), Forward(1), Backward(factor=-1.0), Scale(), Clip()),
        ],
    ),
    # what was known of the clipped .grad outlived the rows, so that rows of no samples counted as stale
    "clearing_after_clipping_is_seen_once": Story(
        [
            *(Forward(), Backward(), Clip(), Clear("optimizer_to_zero"), Forward(0), Clip(), Backward()),
            *(Forward(use="back"), Backward()),
        ],
    ),
    # a frozen parameter's rows alone were clipped, those of all others having gone with their .grad
    "clipping_where_only_a_frozen_part_was_not_cleared": Story(
        [Forward(), Backward(), Freeze(), Clear(trainable=True), Clip()]
    ),
    # the same, as what was asked between the two freezes had let go of the other rows already
    "clipping_where_only_a_part_that_was_thawed_meanwhile_was_not_cleared": Story(
        [*(Forward(), Backward(), Freeze(), Clear(trainable=True), Freeze(on=False), Freeze(), Clip())]
    ),
    # of frozen parameters only those counted whose clipped sum was rounding noise, and not those where it was zero
    "frozen_parameters_whose_clipped_sum_cancels_all_count": Story(
        [
            *(Forward(), Backward(kind="slope"), Update(), Clear("rows"), Freeze()),
            *(Forward(), Backward(), Forward(), Backward(factor=-1.0), Freeze("mix"), Clip(), Clip()),
        ],
        "Own",
    ),
    # the model of the contract took the rows of a .grad that is None for clipped
    "clipping_where_a_thawed_part_was_cleared": Story(
        [Forward(), Backward(), Freeze(), Freeze(on=False, clears=True), Clip()]
    ),
    "empty_backward_that_fails_before_it_delivers": Story(
        [*(Forward(), Backward(), Forward(0), Update(), Clear("data_zero"), Backward())],
    ),
    "empty_backward_that_fails_after_clearing_by_the_model": Story(
        [
            *(Forward(), Backward(), Clear("model_to_zero"), Forward(use="back"), Forward(0)),
            Backward(fault="accumulated"),
            Backward(),
        ],
    ),
    "rows_of_no_samples_beside_a_parameter_that_was_frozen": Story(
        [
            *(Forward(), Backward(), Freeze("first"), Clear(trainable=True), Forward(), Backward()),
            *(Freeze("first", False), Clear(), Forward(0), Backward(), Forward(use="back"), Backward()),
        ],
    ),
    "settings_stay": Story([PerSample(), Forward(), Backward()], settings={"accumulate_grad": False}),
    "rows_without_gradient_after_a_fault": Story(
        [Forward(), Backward(retain=True), Backward(fault="parameter"), Clip()]
    ),
    "rows_without_gradient_after_an_outside_use": Story(
        [Forward(), Forward(), Outside(use="in_the_loss"), Backward((0,)), Backward()],
    ),
    "rows_without_gradient_after_a_weight_was_changed": Story(
        [Forward(), Forward(), Backward(), Update(), Forward(), Backward((0, 1))],
    ),
    "ghost_rows_after_a_fault": Story(
        [Forward(), Backward(fault="parameter"), Clear("zero"), Forward(), Backward()],
    ),
    "ghost_rows_after_an_outside_use": Story(
        [Outside(), Forward(), Backward((0, 1)), Clear("zero"), Forward(), Backward()],
    ),
    "rows_that_were_taken_away_after_a_fault_stay_away": Story(
        [Forward(), Backward(), Forward(), Backward(fault="accumulated"), Clear("rows"), Forward(), Backward()],
    ),
    "thawed_with_a_gradient_from_before": Story(
        [
            Forward(),
            Backward(),
            Freeze("mix"),
            Clear("none", True),
            Forward(),
            Backward(),
            Freeze("mix", False),
            Grads(),
        ],
    ),
    "ghost_rows_of_a_frozen_part": Story(
        [Forward(), Backward(), Freeze("words"), Freeze("first"), Clear("optimizer", True), Forward(), Backward()],
    ),
    "ghost_rows_of_a_replaced_weight": Story(
        [Forward(), Backward(), Replace(keeps=True), Clear(), Forward(), Backward()]
    ),
    "ghost_rows_of_a_state_that_was_assigned": Story([Forward(4), Load(), Piece(), Backward((0, 1))]),
    "frozen_between_forward_and_backward": Story([Piece(use="layer"), Freeze(), Forward(1), Backward((0, 1))]),
    "clipping_gives_a_frozen_weight_no_gradient": Story(
        [Forward(), Freeze(), Backward(), Clip()],
    ),
    "use_outside_of_layers_called_alone": Story([Outside(), Backward()]),
    "own_parameter_in_a_method": Story([Outside(use="own_parameter"), Backward()], "Own"),
    "expanded_of_a_new_weight": Story([Forward(), Backward(), Load(), Alone()]),
    "forward_without_the_mode": Story([PerSample(False), Forward(), PerSample(), Backward()]),
    "graph_from_before_the_switch": Story([Forward(), PerSample(), Backward(), Clip()]),
    # whether the old graph added to .grad went by whether the garbage collector had run
    "graph_from_before_the_switch_of_a_recorder_that_still_lives": Story(
        [
            *(Forward(then="fails"), Forward(), PerSample(said=(("accumulate_grad", True),)), Piece()),
            Backward(of=(0, 1, 2)),
        ],
        settings={"accumulate_grad": False, "materialize": True},
    ),
    "thawed_in_a_copy_and_used_by_expanded_alone": Story(
        [Freeze(), Copy(), Freeze(on=False), Together(use="weight")], settings={"accumulate_grad": False}
    ),
    # a parameter that had left the model, and got more gradient from an old graph, was refused as in doubt
    "gradient_of_a_parameter_that_has_left_is_no_concern": Story(
        [
            *(Forward(use="checkpoint"), Backward(), Outside(), PerSample(), Forward(), Clear(), Backward()),
            *(Load(), Backward(), Forward(), Backward()),
        ],
    ),
    # a parameter that had left the model told of all others that their .grad had been cleared
    "rows_of_no_samples_stay_where_a_parameter_that_was_clipped_has_left": Story(
        [
            *(Piece(), Forward(samples=0), Forward(use="back"), Backward(of=(0,)), Clip(), Clear(how="zero")),
            *(Forward(), Replace(module="mix.2"), Backward(of=(0,)), Backward(of=(0,))),
        ],
    ),
    # the parts of a .grad that come one by one under a reentrant checkpoint cancel but for rounding
    "rounding_noise_that_was_scaled_is_held": Story(
        [
            *(Forward(use="reentrant"), Backward(), Forward(use="reentrant"), Backward(factor=-1.0)),
            *(Scale(), Forward(), Backward()),
        ],
    ),
    # rows that a failed backward has left are refused where they are asked for, not in the next backward
    "gradient_that_was_scaled_after_a_backward_that_failed": Story(
        [
            *(Forward(), Forward(), Backward(), Update(), Forward(use="reentrant"), Piece(samples=4)),
            *(Backward(of=(0, 1, 2)), Scale(), Forward(), Backward()),
        ],
    ),
    # the model of the contract took rows of no samples for dropped
    "clipping_no_samples_beside_a_frozen_part": Story(
        [Forward(samples=0), Backward(), Clear(), Freeze(), Clip()], settings={"accumulate_grad": False}
    ),
    "expanded_of_a_weight_that_was_put_in_frozen_and_thawed": Story(
        [Freeze(), Replace(), Forward(), Backward(), Freeze(on=False), Alone()]
    ),
    # the forward has chosen no pass, as nothing in it has rows
    "expanded_after_a_forward_of_frozen_layers": Story(
        [*(Freeze(part=part) for part in ("words", "mix", "first", "gain")), Forward(use="expanded"), Backward()]
    ),
    "rows_of_a_frozen_part_whose_gradients_were_cleared_by_data": Story(
        [
            *(Forward(), Backward(), Freeze(), Forward(), Backward()),
            *(Clear(how="data_zero"), Clear(how="rows", trainable=True), Clip()),
        ]
    ),
    # what was in `.grad` before the rows was the rounding of a sum that cancels
    "clipping_beside_gradients_that_cancelled": Story(
        [
            *(Forward(samples=3), Backward(), Forward(samples=3), Backward(factor=-1.0)),
            *(Clip(), PerSample(), Forward(), Backward(), Clip()),
        ]
    ),
    # the model of the contract asked for rows of the rounding noise of a clipped sum that cancels
    "rows_taken_away_of_a_clipped_sum_that_cancels": Story(
        [
            *(Forward(samples=3), Backward(), Forward(samples=3), Backward(factor=-1.0)),
            *(Clip(), Clear(how="rows"), Grads()),
        ]
    ),
    # the model of the contract took all parameters for clipped where only one had rows
    "clipped_sums_of_an_earlier_step_beside_a_parameter_that_was_clipped_since": Story(
        [
            *(Forward(), Backward(), Clip(), Update(), Together(use="weight")),
            *(Forward(), Clip(), Backward(), Clip()),
        ],
        settings={"accumulate_grad": False},
    ),
    "reentrant_checkpoint_and_another_pass": Story([Forward(use="reentrant"), Forward(4), Backward((0, 1))]),
    "zero_after_a_backward_that_failed_is_no_clipped_gradient": Story(
        [
            *(Forward(), Backward(), Clip(), Forward(), Backward(fault="accumulated"), Clear("zero")),
            *(Forward(samples=0), Backward(), Grads()),
        ],
    ),
}


@pytest.mark.parametrize("story", FOUND.values(), ids=FOUND)
def test_what_was_found(story: Story) -> None:
    story.play()
