"""Commands: `products` (time of Jacobian products), `compatibility` (which networks work)."""
