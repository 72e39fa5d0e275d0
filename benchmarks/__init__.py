"""Commands that measure the library, in folders that mirror its rooms.

- `data`: the data sets.
- `networks`: time of Jacobian products, and which architectures work.
- `gpu`: what one GPU does, in one table.
- `solvers`: products that solvers and samplers need.
- `gp`: regression on UCI data, beside Gaussian processes.
- `methods`: ablations of the method, and its peak memory.
- `price`: what error bars cost beside an epoch of training, with bounds.
- `comparison`: error bars beside those of other libraries, which is what `python -m benchmarks` runs.

`time_limit` ends what takes too long.
"""
