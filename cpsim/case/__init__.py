"""The question: a scenario file, and the tokens, documents, model, layout and cluster that it stands for.

A new GPU or cluster is an entry of ``cpsim/data/clusters.json``, a new model a row of ``model.MODELS``. Covered by
tests/test_scenario.py, tests/test_cluster.py and tests/test_bad_input.py.
"""
