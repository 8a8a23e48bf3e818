"""What another tool's file says, and what it says wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpsim.errors import ScenarioError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A file of another tool in fields of a scenario."""

    what: str
    """Whose file it is, e.g. ``torchtitan's TOML``."""
    fields: Mapping[str, Any]
    """Of a scenario; ``sequences`` are those of a step, which need not have the cluster's GPUs yet."""
    said: tuple[str, ...] = ()
    """What was read: every setting with its value, in the file's words."""
    caveats: tuple[str, ...] = ()
    """What it says that a prediction does not, in words."""


@dataclass(slots=True)
class Settings:
    """The settings of a file by name, each with the place where it stands; remembers what was asked for."""

    path: str
    values: Mapping[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)
    """``line 7`` of settings, where that is known."""
    said: list[str] = field(default_factory=list)

    def place(self, name: str) -> str:
        """The file, and the line of a setting where that is known."""
        where = self.places.get(name)
        return f"{self.path} {where}" if where else self.path

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) not in (None, "")

    def get(self, *names: str) -> Any:
        """The first of these settings that is there, as it is."""
        for name in names:
            if name in self:
                value = self.values[name]
                said = name if value is True else f"{name} {value}"
                if said not in self.said:
                    self.said.append(said)
                return value
        return None

    def number(self, *names: str, least: int = 1) -> int | None:
        """The same as a whole number.

        Raises:
            ScenarioError: it is none; names the line.
        """
        value = self.get(*names)
        if value is None:
            return None
        name = next(one for one in names if one in self)
        try:
            found = int(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError):
            found = None
        if found is None or (isinstance(value, float) and found != value) or found < least:
            raise ScenarioError(f"{self.place(name)}: {name}: expected a whole number from {least}, got {shown(value)}")
        return found

    def flag(self, *names: str) -> bool:
        """Whether a setting is there and on.

        Raises:
            ScenarioError: it is neither on nor off.
        """
        value = self.get(*names)
        if isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no"):
            return value.lower() in ("true", "1", "yes")
        if value is None or isinstance(value, bool | int):
            return bool(value)
        name = next(one for one in names if one in self)
        raise ScenarioError(f"{self.place(name)}: {name}: expected true or false, got {shown(value)}")

    def one_of(self, name: str, known: Mapping[str, Any]) -> Any:
        """What a word of a setting stands for; None where it is not there.

        Raises:
            ScenarioError: it is another word.
        """
        value = self.get(name)
        if value is None:
            return None
        if str(value) not in known:
            raise ScenarioError(f"{self.place(name)}: {name}: expected {', '.join(known)}, got {shown(value)}")
        return known[str(value)]

    def needed(self, *names: str) -> int:
        """A whole number that must be there.

        Raises:
            ScenarioError: it is not.
        """
        found = self.number(*names)
        if found is None:
            raise ScenarioError(f"{self.path}: expected {' or '.join(names)}, which says the shape of the model")
        return found

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Settings that a step cannot say, where they are on.

        Raises:
            ScenarioError: one of them is; names its line.
        """
        for name in names:
            if name in self and self.values[name] not in (False, 0, "false", "False"):
                raise ScenarioError(f"{self.place(name)}: {name}: {why}")


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that say something."""
    return {name: value for name, value in fields.items() if value is not None}
