"""What a user can put right, and how.

    FinetuneError            the work failed                                  exit 1
    |-- InputError           something the user gave us is wrong              exit 2
    |   |-- RecipeError      the YAML file, with the line of every fault
    |   |-- ModelError       no such model, no weights, no access
    |   |-- DataError        rows that cannot be trained as they stand
    |   `-- RunError         a run folder that is missing, in use or incomplete
    |-- DoesNotFit           the plan is larger than the device               exit 3
    `-- Interrupted          stopped by the user, resumable                   exit 130

Every error is two sentences: what is so, with names and numbers; and what to do about it.
"""

from __future__ import annotations


class FinetuneError(Exception):
    """The work failed. `what` says what is so, `hint` says what to do."""

    exit_code = 1

    def __init__(self, what: str, hint: str = "") -> None:
        self.what = what
        self.hint = hint
        super().__init__(f"{what} {hint}".strip())

    def __reduce__(self) -> tuple[type[FinetuneError], tuple[str, str]]:
        """Both sentences survive the way from another process."""
        return type(self), (self.what, self.hint)


class InputError(FinetuneError):
    """Something the user gave is wrong; nothing was started."""

    exit_code = 2


class RecipeError(InputError):
    """The recipe cannot be read; `what` lists every fault with file and line."""


class ModelError(InputError):
    """The model named by the recipe is not there, has no weights, or may not be read."""


class DataError(InputError):
    """Rows or files that cannot be trained as they stand."""


class RunError(InputError):
    """A run or output folder that is missing, in use, or incomplete."""


class DoesNotFit(FinetuneError):
    """The planned memory is larger than the device has."""

    exit_code = 3


class Interrupted(FinetuneError):
    """The user stopped the work; the run folder can be resumed."""

    exit_code = 130


def first_line(error: Exception) -> str:
    """What another library's error says first, to stand inside a sentence; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
