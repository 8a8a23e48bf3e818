"""The command line: one short function for each command of ``cpsim``.

A new command belongs in ``ask``, ``measure`` or ``look``: it reads its options, makes one call and prints. Covered by
tests/test_cli.py."""
