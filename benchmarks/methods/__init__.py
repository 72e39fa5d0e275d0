"""Commands: `ablations` (what each choice of the method does), `memory` (peak memory of fits and predictions)."""
