"""The policy of the RECAS paper: which tokens a budget keeps, and which of them are read."""
