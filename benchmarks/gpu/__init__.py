"""One run on a GPU: the tests that need one, fits of three image networks, products of Jacobians, and nccl."""
