"""Other people's code in windows, and the hosts that launch it."""
