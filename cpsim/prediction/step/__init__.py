"""Whole training steps: layers on pipeline stages of replicas, their time and their peak memory.

A new part of a step (recomputation, sharding, an optimizer) belongs here. Covered by tests/test_training_step.py,
tests/test_frameworks.py, tests/test_step_answers.py, tests/test_training_layers.py and tests/test_pipeline.py.
"""
