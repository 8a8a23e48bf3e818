"""Published attention of other people's rings on A100 and H800 that nobody measured here."""
