"""Commands: `products`, `large_batches` (time of Jacobian products), `compatibility` (which networks work)."""
