"""What tests/test_real_implementations_cpu.py runs: attention that is compiled with one backend, then with another."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from cpsim.real.run.compiling import compile_anew


def ran_flash(backend, q):
    """Whether compiled attention ran the flash kernel."""
    compile_anew()
    attend = torch.compile(lambda x: scaled_dot_product_attention(x, x, x, is_causal=True).sin())
    with sdpa_kernel([backend]):
        attend(q)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            attend(q)
    return any("flash" in event.key for event in seen.key_averages())


if __name__ == "__main__":
    queries = torch.randn(1, 2, 64, 16)
    asked = {SDPBackend.MATH: False, SDPBackend.FLASH_ATTENTION: True}
    print(sum(ran_flash(backend, queries) == flash for backend, flash in asked.items()))
