"""Documents of a global batch on context-parallel groups of many sizes: prices, plans, and what data loaders take.

Entry: ``cpsim.prediction.batches.plan.plan_batch``. Covered by tests/test_plan_batch.py.
"""
