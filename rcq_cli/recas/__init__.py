"""Which tokens a budget keeps and which of them are read: the policy of the RECAS paper, as pure functions."""
