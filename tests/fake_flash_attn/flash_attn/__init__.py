"""Stands in for FlashAttention 2 on a CPU: its functions on top of cpsim.real.run.attention's `math` kernel."""

from flash_attn.flash_attn_interface import flash_attn_func

__version__ = "2.8.3"
__all__ = ["flash_attn_func"]
