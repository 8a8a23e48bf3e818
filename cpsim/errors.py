"""What can go wrong, as one small tree of exceptions.

CpsimError (ValueError)     anything a user can cause; the message is one line: expected, got, how to mend it
├── ScenarioError           a scenario, cluster or document file that cannot be understood
├── InfeasibleError         a strategy that cannot run the case; the message is the reason
│   └── OutOfMemoryError    because it needs more memory than a GPU has
├── MachineError            the machine fails, not the case: a scheduler or process that died
├── ProfileError            a measurement or profile file that cannot be used
└── ScheduleError           a schedule that breaks its own rules
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class CpsimError(ValueError):
    """Base of every error that a user can cause."""


class ScenarioError(CpsimError):
    """A scenario, cluster or document file that cannot be understood."""


class InfeasibleError(CpsimError):
    """The strategy cannot run this case; the message says why."""


class OutOfMemoryError(InfeasibleError):
    """The case needs more memory than a GPU has."""


class MachineError(CpsimError):
    """The machine that predicts fails, not the case: a scheduler or process died. Asking again may succeed."""


class ProfileError(CpsimError):
    """A measurement or profile file that cannot be used."""


class ScheduleError(CpsimError):
    """A schedule that breaks its own rules; the message shows rank, stream and op."""


def check_name(field: str, name: object, names: Iterable[str]) -> None:
    """Whether a field names one of those.

    Raises:
        ScenarioError: it does not; lists them.
    """
    if name not in (known := list(names)):
        raise ScenarioError(unknown_name(field, name, known))


def unknown_name(field: str, name: object, known: Sequence[str]) -> str:
    """What is wrong with a field that names none of those that are known."""
    names = ", ".join(known)
    hint = nearest(name, known)
    return f"{field}: expected {names}; got {shown(name)}" + (f"; {hint}" if hint.startswith("did") else "")


def nearest(name: object, names: Iterable[str]) -> str:
    """``did you mean 'x'?``, or the whole list where nothing is near."""
    known = list(names)
    lower = {entry.lower(): entry for entry in known}
    found = get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)
    return f"did you mean {lower[found[0]]!r}?" if found else f"expected one of {', '.join(known)}"


def shown(value: object) -> str:
    """A value in an error message: its ``repr``, one line, 60 characters at most."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
