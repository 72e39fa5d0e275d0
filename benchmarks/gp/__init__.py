"""Commands on UCI data: `uci` (regression beside Gaussian processes), `two_samples` (EM with two samples)."""
