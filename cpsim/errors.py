"""What can go wrong, as one small tree of exceptions.

CpsimError (ValueError)     anything a user can cause; the message is one line: expected, got, how to mend it
├── ScenarioError           a scenario, cluster or document file that cannot be understood
├── InfeasibleError         a strategy that cannot run the case; the message is the reason
│   └── OutOfMemoryError    because it needs more memory than a GPU has
├── ProfileError            a measurement or profile file that cannot be used
└── ScheduleError           a schedule that breaks its own rules
"""


class CpsimError(ValueError):
    """Base of every error that a user can cause."""


class ScenarioError(CpsimError):
    """A scenario, cluster or document file that cannot be understood."""


class InfeasibleError(CpsimError):
    """The strategy cannot run this case; the message says why."""


class OutOfMemoryError(InfeasibleError):
    """The case needs more memory than a GPU has."""


class ProfileError(CpsimError):
    """A measurement or profile file that cannot be used."""


class ScheduleError(CpsimError):
    """A schedule that breaks its own rules; the message shows rank, stream and op."""
