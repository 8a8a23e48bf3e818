"""DCP: blocks of tokens and computation placed on ranks, computed in stages while later inputs arrive."""
