"""Published studies of others, predicted as they were measured: ``cpsim reproduce NAME``.

What was published lies in ``data``, with its source. A study is a module of its own.
"""
