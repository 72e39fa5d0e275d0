r"""`Novelty`: whether an input is like the training data, as a p-value.

Statistics of an input `x` are taken from the features `z_ℓ` that go into the layers `ℓ` of the network
(`networks.layer_inputs`), means and root mean squares over positions:

- `q = (z − μ)ᵀ Σ⁻¹ (z − μ)`, the Mahalanobis distance, of the features of each layer beside those of the layer before,
  so that what one makes of the other counts. The covariance is shrunk as by Chen et al. (2010, oracle approximating
  shrinkage), with features divided by the root mean square of their length in the layer;
- `d`, the distance of the direction in the last layer to its `k`-th nearest neighbour among the training data (Sun et
  al. 2022).

`p(s) = (1 + #{s_i ≥ s})/(n + 1)` ranks a statistic among those of `n` reference data. Far from the training data all
layers together say most, by Fisher's sum `−Σ log p(q)`; near them, as for classes that were not there, neighbours in
the last layer alone, which a sum would dilute. So their harmonic mean is taken (Wilson 2019), with the weights `1 − w`
and `w`, `1/((1 − w)/p(d) + w/p(sum))`, in which the smaller one decides, and ranked again.

Neighbours tell unseen classes as well as the network keeps classes apart. This is seen by training data whose own class
is left out of their neighbours: with `a` the AUROC of their `d` against that of all, `1 − w = (2a − 1)²`.

The reference data are held-out data, or the training data with each one left out of its own statistics, in closed form.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laplace_sampling.data.batches import num_rows
from laplace_sampling.networks.layer_inputs import Features, LayerInput, watched
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER

# Data that are kept as neighbours, and by whose ranks p-values are told: these have steps of 1/5,000, and neighbours
# among so many found left-out digits as well as those among 8,000 (AUROCs within .003).
MOST_DATA = 5000
# The least `w`, and that of data without classes: with .05 and .1 digits that were left out lost .004 and .008 of the
# AUROC by neighbours alone, .957, and images of other things had .995 and .997 or more on a LeNet for MNIST.
_LEAST_WEIGHT = 0.1
# `k` is the root of the number of data by this, 10 of 5,000: from 5 to 20 made a difference of .003.
_ROOTS_PER_NEIGHBOUR = 7


@dataclass(frozen=True)
class Novelty:
    """What predictions tell novelty by.

    Attributes:
        layers: whose inputs are looked at.
        scale: the root mean square of the length of the features in each layer.
        mean: `μ` of the features in each layer and the one before.
        root: `R` with `Σ⁻¹ = RRᵀ`, up to a factor.
        neighbours: directions of training data in the last layer.
        distances: `q` of the reference data, from small to large.
        nearest: `−cos` of the angles to their neighbours, from small to large.
        sums: of the logarithms of ranks of `q`, from small to large.
        evidence: one over the harmonic mean of the two p-values, from small to large.
        weight: `w`.
        fingerprint: of the network, on the CPU.
    """

    layers: list[LayerInput]
    scale: Float[Tensor, "L 1 1"]
    mean: Float[Tensor, "L V"]
    root: Float[Tensor, "L V V"]
    neighbours: Float[Tensor, "M D"]
    distances: Float[Tensor, "L R"]
    nearest: Float[Tensor, " R"]
    sums: Float[Tensor, " R"]
    evidence: Float[Tensor, " R"]
    weight: Float[Tensor, ""]
    fingerprint: Tensor

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerInput],
        fingerprint: Tensor,
        trained: Features,
        held_out: Features | None = None,
        labels: Int[Tensor, " M"] | None = None,
    ) -> Self:
        """Takes the statistics of training data, and the ranks of held-out data if there are any.

        Labels are classes of the training data.
        """
        length = torch.linalg.vector_norm(trained.layers, dim=(1, 2), keepdim=True) / len(trained.last) ** 0.5
        scale = length.where(length > 0, 1.0)
        z = _with_the_layer_before(trained.layers / scale)
        mean, root, share = _gaussian(z)
        left_out = _nearest(trained.last, trained.last, 1)
        if held_out is None:
            q, nearest = _left_out(_mahalanobis(z, mean, root), share, len(trained.last)), left_out
        else:
            q = _mahalanobis(_with_the_layer_before(held_out.layers / scale), mean, root)
            nearest = _nearest(held_out.last, trained.last)
        weight = _weight(trained.last, left_out, labels)
        distances = q.sort().values
        sums = _sums(distances, q, 1)
        in_order, sums_in_order = nearest.sort().values, sums.sort().values
        evidence = _evidence(weight, in_order, nearest, sums_in_order, sums, 1).sort().values
        return cls(
            layers=list(layers),
            scale=scale,
            mean=mean,
            root=root,
            neighbours=trained.last,
            distances=distances,
            nearest=in_order,
            sums=sums_in_order,
            evidence=evidence,
            weight=weight,
            fingerprint=fingerprint,
        )

    def watching(self, network: Linearisation, x: Any) -> AbstractContextManager[list[Features]]:
        """The context of a run of the network, for `__call__`."""
        return watched(network, self.layers) if num_rows(x) else nullcontext([])

    def __call__(self, seen: Sequence[Features], num: int) -> Float[Tensor, " N"]:
        """`1 − p` of so many data, in [0, 1], whose features were seen last: larger is stranger."""
        if not num:
            return self.mean.new_zeros(0)
        found = Features.joined(seen).last_of(num)
        nearest = _nearest(found.last, self.neighbours)
        z = _with_the_layer_before(found.layers / self.scale)
        sums = _sums(self.distances, _mahalanobis(z, self.mean, self.root))
        return 1 - p_values(self.evidence, _evidence(self.weight, self.nearest, nearest, self.sums, sums))

    def state(self) -> dict[str, Any]:
        """All of it as plain values and tensors."""
        return vars(self) | {"layers": [vars(layer) for layer in self.layers]}

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device) -> Self:
        """From `state`."""
        tensors = {name: value.to(device) for name, value in state.items() if name not in ("layers", "fingerprint")}
        layers = [LayerInput(**layer) for layer in state["layers"]]
        return cls(layers=layers, fingerprint=state["fingerprint"].cpu(), **tensors)


def p_values(reference: Float[Tensor, "*L R"], values: Float[Tensor, "*L N"], own: int = 0) -> Float[Tensor, "*L N"]:
    """`(1 + #{s_i ≥ s})/(n + 1)`, where `own` of the sorted reference data, 0 or 1, is the datum itself."""
    num = reference.shape[-1]
    below = torch.searchsorted(reference, values.contiguous())
    return (1 + num - below - own).to(values) / (num + 1 - own)


def _sums(reference: Float[Tensor, "L R"], q: Float[Tensor, "L N"], own: int = 0) -> Float[Tensor, " N"]:
    return -p_values(reference, q, own).log().sum(0)


def _evidence(
    weight: Tensor, reference: Tensor, nearest: Tensor, of_sums: Tensor, sums: Tensor, own: int = 0
) -> Float[Tensor, " N"]:
    near, far = p_values(reference, nearest, own), p_values(of_sums, sums, own)
    return (1 - weight) / near + weight / far


def _weight(
    u: Float[Tensor, "M D"], nearest: Float[Tensor, " M"], labels: Int[Tensor, " M"] | None
) -> Float[Tensor, ""]:
    """`w` by neighbours of other classes, given those of all."""
    if labels is None:
        return u.new_tensor(_LEAST_WEIGHT)
    # The mean of p-values is `1 − a`.
    p = p_values(nearest.sort().values, _nearest(u, u, labels=labels)).mean()
    return (1 - (1 - 2 * p).clamp_min(0) ** 2).clamp_min(_LEAST_WEIGHT)


def _with_the_layer_before(z: Float[Tensor, "L N W"]) -> Float[Tensor, "L N V"]:
    return torch.cat([torch.cat([torch.zeros_like(z[:1]), z[:-1]]), z], -1)


def _gaussian(z: Float[Tensor, "L N W"]) -> tuple[Float[Tensor, "L W"], Float[Tensor, "L W W"], Float[Tensor, "L 1"]]:
    """Mean, a root of the inverse of the shrunk scatter, and by how much the scatter was multiplied."""
    mean, num = z.mean(1), z.shape[1]
    # Few small matrices, in float64 on the CPU.
    deviations = z - mean[:, None]
    scatter = (deviations.mT @ deviations).cpu().double()
    shrinkage = _shrinkage(scatter / num, num)[:, None, None]
    ridge = shrinkage * scatter.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    # Features that are the same for all data are so up to rounding.
    eps, tiny = torch.finfo(z.dtype).eps, torch.finfo(z.dtype).tiny
    ridge = ridge + num * (eps * mean.cpu().double().square().mean(1)[:, None, None].sqrt()) ** 2 + tiny
    shrunk = (1 - shrinkage) * scatter + ridge * torch.eye(z.shape[2], dtype=torch.float64)
    root = torch.linalg.inv(torch.linalg.cholesky(shrunk)).mT
    return mean, root.to(z), (1 - shrinkage[:, 0]).to(z)


def _mahalanobis(z: Float[Tensor, "L N W"], mean: Tensor, root: Tensor) -> Float[Tensor, "L N"]:
    return ((z - mean[:, None]) @ root).square().sum(-1)


def _left_out(q: Float[Tensor, "L N"], share: Float[Tensor, "L 1"], num: int) -> Float[Tensor, "L N"]:
    """`q` of training data, each without itself.

    Without datum `i` the mean is `f r_i` away from it, with `r_i = z_i − μ` and `f = n/(n − 1)`, and the scatter is
    less by `f r_i r_iᵀ`, so that by Sherman and Morrison `q_i` becomes `f² q_i/(1 − (1 − ρ) f q_i)`; the ridge stays.
    With one datum less all scatters are smaller by `f`.
    """
    f = num / (num - 1)
    return f * q / (1 - share * f * q).clamp_min(torch.finfo(q.dtype).eps)


def _nearest(
    u: Float[Tensor, "N D"], neighbours: Float[Tensor, "M D"], own: int = 0, labels: Int[Tensor, " N"] | None = None
) -> Float[Tensor, " N"]:
    """`−cos` of the angle to the `k`-th nearest neighbour, besides the datum itself or all of its class."""
    num = len(neighbours)
    k = max(1, round(num**0.5 / _ROOTS_PER_NEIGHBOUR)) + own
    found = list[Tensor]()
    for rows in torch.arange(len(u), device=u.device).split(max(1, NUMBERS_TOGETHER // num)):
        cosines = u[rows] @ neighbours.T
        if labels is not None:
            cosines = cosines.masked_fill(labels[rows, None] == labels, -torch.inf)
        found.append(-cosines.topk(k).values[:, -1])
    return torch.cat(found)


def _shrinkage(covariance: Float[Tensor, "L W W"], num: int) -> Float[Tensor, " L"]:
    """`ρ` of the oracle approximating shrinkage of Gaussian data (Chen et al. 2010, eq. 23)."""
    width = covariance.shape[-1]
    trace, squares = covariance.diagonal(dim1=1, dim2=2).sum(1), covariance.square().sum((1, 2))
    above = (1 - 2 / width) * squares + trace**2
    below = (num + 1 - 2 / width) * (squares - trace**2 / width)
    # A covariance of equal eigenvalues is what is shrunk to.
    return (above / below).nan_to_num(1.0).clamp(0, 1).where(below > 0, 1.0)
