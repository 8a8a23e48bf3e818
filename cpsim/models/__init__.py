"""What ops cost: seconds, bytes on links, memory and power, from a profile of one GPU and a cluster.

``price`` turns a schedule into the engines' input; every kind of cost has its own module, with a function and its
parameters, and no strategy is named here. Covered by tests/test_price.py and tests/test_gemm_model.py.
"""
