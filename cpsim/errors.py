"""What can go wrong, as one small tree of exceptions.

CpsimError (ValueError)     anything a user can cause; the message is one line: expected, got, how to mend it
├── ScenarioError           a scenario, cluster or document file that cannot be understood
├── InfeasibleError         a strategy that cannot run the case; the message is the reason
│   ├── OutOfMemoryError    because it needs more memory than a GPU has
│   └── UnmeasuredError     nobody has measured what its kernel takes for such a case, which it can run
├── MachineError            the machine fails, not the case: a scheduler or process that died, a port in use
├── ProfileError            a measurement or profile file that cannot be used
│   └── NotMeasuredError    because it lacks what the case needs
└── ScheduleError           a schedule that breaks its own rules
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

QUOTED: Final = 60
"""Characters of an input that a message quotes."""
LONGEST: Final = 2000
"""Characters of a message."""


class CpsimError(ValueError):
    """Base of every error that a user can cause; its message is one line that any terminal shows as it is."""

    def __init__(self, message: str = "") -> None:
        super().__init__(cut(plain(message), LONGEST))


class ScenarioError(CpsimError):
    """A scenario, cluster or document file that cannot be understood."""


class InfeasibleError(CpsimError):
    """The strategy cannot run this case; the message says why."""


class OutOfMemoryError(InfeasibleError):
    """The case needs more memory than a GPU has."""


class UnmeasuredError(InfeasibleError):
    """Nobody has measured what the kernel takes for such a case, which it can run."""


class MachineError(CpsimError):
    """The machine that predicts fails, not the case: a scheduler or process died, a port is in use. Asking again may
    succeed."""


class ProfileError(CpsimError):
    """A measurement or profile file that cannot be used."""


class NotMeasuredError(ProfileError):
    """The profile lacks what the case needs: nobody has measured it. The case itself may well run."""


class ScheduleError(CpsimError):
    """A schedule that breaks its own rules; the message shows rank, stream and op, and ops beside it on more lines."""

    def __init__(self, message: str = "") -> None:
        ValueError.__init__(self, message)


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


LISTED: Final = 16
"""Names that a message lists."""


def nearest(name: object, names: Iterable[str]) -> str:
    """``did you mean 'x'?``, or the list where nothing is near."""
    known = list(names)
    lower = {entry.lower(): entry for entry in known}
    asked = name[:QUOTED] if isinstance(name, str) else shown(name)
    found = get_close_matches(asked.lower(), lower, n=1, cutoff=0.5)
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return f"did you mean {lower[found[0]]!r}?" if found else f"expected one of {', '.join(known[:LISTED])}{more}"


def shown(value: object) -> str:
    """A value in an error message: the beginning of its ``repr``, however large it is, on one line."""
    if value is None:
        return "nothing"
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > QUOTED:
            break
    return cut(plain(text), QUOTED)


def _pieces(value: object) -> Iterator[str]:
    """A value's ``repr`` piece by piece; of long texts the beginning, of endless numbers how long they are."""
    match value:
        case str():
            yield repr(value[: QUOTED + 1])
        case int() if value.bit_length() > 4 * QUOTED:  # Python refuses to write out thousands of digits
            yield f"a number of {int(value.bit_length() * 0.30103) + 1} digits"
        case list() | tuple() | Mapping():
            opened, closed = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
            for i, entry in enumerate(value):
                yield ", " if i else opened
                yield from _pieces(entry)
                if isinstance(value, Mapping):
                    yield ": "
                    yield from _pieces(value[entry])
            yield closed if value else opened + closed
        case _:
            yield repr(value)


def described(error: Exception) -> str:
    """An error that nobody expected: its type, the beginning of its words, and where it was raised, on one line."""
    place = error.__traceback__
    while place and place.tb_next:
        place = place.tb_next
    where = f" ({place.tb_frame.f_code.co_filename}:{place.tb_lineno})" if place else ""
    return f"{type(error).__name__}: {plain(str(error))[:200]}{where}"


def cut(text: str, length: int) -> str:
    """The text, or its beginning and an ellipsis where it is longer."""
    return text if len(text) <= length else text[: length - 3] + "..."


def plain(text: str) -> str:
    """The text on one line; characters that control a terminal or cannot be encoded become escapes like ``\\x1b``."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
