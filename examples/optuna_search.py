"""A search of settings by Optuna that ends bad trials early, by the evidence or the log loss of their error bars.

    pip install "laplace_sampling[optuna]"
    python examples/optuna_search.py

Each trial trains a network, fits error bars every few epochs (`PeriodicFits`), and reports what they say; the pruner
ends a trial whose log loss of held-out data, error bars included, is worse than those of others at the same epoch. A
log loss that knows error bars tells a network that is surely wrong from one that knows that it does not know. Two
trials run at a time, in threads.
"""

import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from laplace_sampling.integrations.periodic_fits import PeriodicFits

EPOCHS, EVERY = 12, 4


def generated() -> TensorDataset:
    """A regression of three inputs, of which one does not matter."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = torch.sin(2 * x[:, :1]) * x[:, 1:2] + 0.1 * torch.randn(400, 1, generator=generator)
    return TensorDataset(x, y)


DATA = generated()
HELD_OUT = DataLoader(Subset(DATA, range(300, 400)), batch_size=100)


# --8<-- [start:objective]
def objective(trial: optuna.Trial) -> float:
    """The held-out log loss of a network with error bars, in nats for each datum."""
    # Threads share the global random state: the order of the data comes from one of the trial's own.
    generator = torch.Generator().manual_seed(trial.number)
    width = trial.suggest_int("width", 8, 32, log=True)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 0.1, log=True))
    loader = DataLoader(Subset(DATA, range(300)), batch_size=50, shuffle=True, generator=generator)
    fits = PeriodicFits("regression", every_n_epochs=EVERY, val_loader=HELD_OUT, budget=None)
    found = {}
    for epoch in range(1, EPOCHS + 1):
        for x, y in loader:
            optimiser.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimiser.step()
        if fits.due(epoch, last=epoch == EPOCHS):
            found = fits.fit(model, loader, epoch=epoch)
            trial.report(found["val_log_loss"], epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
    trial.set_user_attr("score", found["score"])
    return found["val_log_loss"]


# --8<-- [end:objective]


def new_study() -> optuna.Study:
    """Trials drawn at random; one that is worse than the median of those that are complete ends early."""
    return optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.MedianPruner(n_startup_trials=4)
    )


def search(study: optuna.Study, trials: int = 12, threads: int = 2) -> None:
    """A search of the width and the learning rate."""
    study.optimize(objective, n_trials=trials, n_jobs=threads)


def main() -> None:
    """Search, and print what was found."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = new_study()
    search(study)
    for trial in study.trials:
        values = ", ".join(f"{value:6.2f}" for value in trial.intermediate_values.values())
        print(f"trial {trial.number:2d}  {trial.state.name:8s}  lr {trial.params['lr']:.1e}  log loss {values}")
    best = study.best_trial
    print(f"best: {best.params}, log loss {best.value:.2f}, evidence {best.user_attrs['score']:.2f} nats a datum")


if __name__ == "__main__":
    main()
