"""Training by the evidence: weight decay and noise that are found while a network is trained."""
