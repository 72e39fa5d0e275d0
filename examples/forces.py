"""Energies and forces of atoms on a ring, with error bars: `python examples/forces.py`.

Six atoms sit on a ring, and neighbours attract and repel each other by a Morse potential of their distance. A small
network learns the energy from 300 configurations that were drawn near equilibrium. It is then asked for the forces,
`-dE/dx`, on configurations with one atom pushed further and further out of its place. The error bars of the forces are
one line. They grow where the training data end, and the errors of the forces grow with them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from laplace_sampling import LinearisedLaplace

ATOMS = 6
REST = 2 * math.pi / ATOMS


def gaps(angles: Tensor) -> Tensor:
    """The angles from each atom to the next, `[N, ATOMS]`, for angles `[N, ATOMS]` in order."""
    around = torch.cat([angles[:, 1:], angles[:, :1] + 2 * math.pi], 1)
    return around - angles


def true_energy(angles: Tensor) -> Tensor:
    """A Morse potential for each pair of neighbours, `[N, 1]`."""
    return (1 - (-2 * (gaps(angles) - REST)).exp()).square().sum(1, keepdim=True)


class Potential(nn.Module):
    """A sum over pairs of neighbours, so that it does not change if all atoms turn or are numbered from another one."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, angles: Tensor) -> Tensor:
        return self.pair(4 * (gaps(angles)[..., None] - REST)).sum(1)


def configurations(num: int, seed: int) -> Tensor:
    noise = 0.15 * torch.randn(num, ATOMS, generator=torch.Generator().manual_seed(seed))
    return REST * torch.arange(ATOMS) + noise


def trained(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = Potential()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
        schedule.step()
    return model


def forces_at(angles: Tensor) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
    """The program that computes forces from an energy, that of the network as well as the true one."""

    def forces(energy: Callable[[Tensor], Tensor]) -> Tensor:
        x = angles.clone().requires_grad_()
        return -torch.autograd.grad(energy(x).sum(), x)[0]

    return forces


def main(steps: int = 1000) -> tuple[Tensor, Tensor]:
    """The errors of the forces, and their standard deviations, `[4, ATOMS]`."""
    x = configurations(300, seed=0)
    y = true_energy(x) + 0.05 * torch.randn(300, 1, generator=torch.Generator().manual_seed(1))
    la = LinearisedLaplace(trained(x, y, steps), "regression", method="exact").fit_hyperparameters([(x, y)])

    pushed = (REST * torch.arange(ATOMS)).repeat(4, 1)
    pushed[:, 2] += torch.tensor([0.1, 0.3, 0.5, 0.7])
    forces = la.propagate(forces_at(pushed))  # the error bars of the forces
    energy = la.propagate(lambda f: f(pushed)[:, 0])
    errors = (forces.mean - forces_at(pushed)(true_energy)).abs()
    print(" out of place      energy       force on the atom   error")
    for n in range(4):
        place = float(pushed[n, 2] - 2 * REST)
        e, f = (f"{float(p.mean.view(4, -1)[n, c]):6.2f} ± {float(p.stddev.view(4, -1)[n, c]):.2f}"
                for p, c in ((energy, 0), (forces, 2)))  # fmt: skip
        print(f"{place:13.2f} {e:>16} {f:>18} {float(errors[n, 2]):10.2f}")
    return errors, forces.stddev


if __name__ == "__main__":
    main()
