"""The command ``cpsim``, and ``python -m cpsim``."""

from cpsim.runtime.interrupts import end_at_once


def run() -> None:
    """Entry point; an interrupt ends the imports, too, which take longest of a short command."""
    end_at_once()
    from cpsim.cli.app import main

    main()


if __name__ == "__main__":
    run()
