"""The report that `check` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from expanded_nn._errors import PerSampleError, complaint


@dataclass(frozen=True)
class Problem:
    """One reason not to trust the rows.

    Attributes:
        kind: `"conversion"`, `"run"` (it does not), `"layer"` (a layer's own complaint, as of rows that are not
            samples), `"mixing"` of samples, `"random"`, `"outside"` use of a parameter, a `"loss"` reduced in another
            way than the settings say, or `"rows"` that differ.
        where: The qualified name of the module, with its class, or of the parameter.
        text: Where it is, what was found, what was wanted, and what to do.
    """

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, kind: str, error: PerSampleError) -> Problem:
        """The problem that an error of the library tells of."""
        return cls(kind, str(error).partition(": ")[0], str(error))


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        problems: The reasons not to trust the rows, none if they can be trusted on such inputs.
        notes: What is no reason for distrust, but worth knowing: parameters never used, what was not compared.
        errors: Parameter name -> error of its rows, relative to those of the sample-by-sample loop, or to 10
            tolerances of the whole gradient where they are smaller than that; empty if the loop was not run.
        samples: B.
        dtype: The coarsest dtype that the model computed in.
        tolerance: The relative error that counts as rounding in that dtype.

    Example:
        >>> import torch, expanded_nn as enn
        >>> report = enn.check(torch.nn.BatchNorm1d(4), torch.randn(5, 4))
        >>> report.ok, report.problems[0].kind, report.problems[0].where
        (False, 'layer', 'BatchNorm1d')
    """

    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    dtype: torch.dtype = torch.float64
    tolerance: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raises the report as an error.

        Raises:
            PerSampleError: If not `ok`.
        """
        if self.problems:
            raise PerSampleError(str(self))

    def __str__(self) -> str:
        if self.problems:
            lines = [f"check: {len(self.problems)} reason(s) not to trust the per-sample gradients:"]
        else:
            compared = "There were no rows to compare."
            if self.errors:
                compared = (
                    f"The rows of {len(self.errors)} parameter(s) agree with the sample-by-sample loop, to "
                    f"{max(self.errors.values()):.1e} (tolerance {self.tolerance:.1e}, {self.dtype})."
                )
            lines = [f"check: no problem found for {self.samples} samples. {compared}"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass
class Findings:
    """What a check has found so far; the attributes are those of `Report`, which it becomes at the end."""

    samples: int
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    tolerance: float = 0.0

    def complain(self, kind: str, where: str, problem: str, wanted: str, remedy: str) -> None:
        """Adds a problem, in the form of the library's errors."""
        self.problems.append(Problem(kind, where, str(complaint(where, problem, wanted, remedy))))

    def report(self, *, is_ambiguous: bool) -> Report:
        """The findings, each once; `is_ambiguous` says that B is the size of another dimension, too."""
        problems = tuple({problem.text: problem for problem in self.problems}.values())
        if problems and not self.errors:
            self.notes.append("the rows were not compared with the sample-by-sample loop.")
        if problems and is_ambiguous:
            self.notes.append(
                f"B = {self.samples} is also the size of another dimension. If the check passes with another B, a "
                f"tensor that all samples share is taken for samples: batches of {self.samples} are wrong in training, "
                "too."
            )
        return Report(problems, tuple(dict.fromkeys(self.notes)), self.errors, self.samples, self.dtype, self.tolerance)
