"""``cpsim explore``: a local web page in which a person changes a case and sees what that does."""
