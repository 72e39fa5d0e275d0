"""How the time of a fit falls with the number of processes: measured on two, and predicted for GPUs.

`processes` runs a function on the ranks of a process group, `measure` is that function, `fitted` fits a model of its
timings, `model` and `plans` are the same model with the figures of GPUs (`hardware`), and `report` writes the tables of
docs/scaling.md.
"""
