"""``python -m cpsim``."""

from cpsim.cli import main

main()
