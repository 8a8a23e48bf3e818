"""Attention calls as current models make them: windows, values of another size than keys, batches.

    python -m studies.shapes calls          # writes calls.jsonl, to be measured
    python -m studies.shapes say            # writes predicted-h100.jsonl and predicted-h200.jsonl
    python -m studies.shapes compare FILE   # measured beside what was predicted before, and beside today's models
    python -m studies.shapes published      # NVIDIA's tables of windows and latent attention beside profiles

`python -m cpsim.real.measure.kernels --listed --shapes studies/shapes/calls.jsonl` measures the calls.
"""
