"""Dense float64 references, from the formulas alone: they share no code with the library."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.from_loss import LossLikelihood
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson


def jacobian(model: nn.Module, x: Tensor | dict[str, Tensor]) -> Tensor:
    """`[N, C, P]` by one reverse pass an output, over the parameters that require a gradient."""
    weights = [p for p in model.parameters() if p.requires_grad]
    data = zip(*[part.split(1) for part in x.values()], strict=True) if isinstance(x, dict) else x.split(1)
    rows = []
    for datum in data:
        out = model(**dict(zip(x, datum, strict=True))) if isinstance(x, dict) else model(datum)
        out = torch.cat([part.reshape(-1) for part in (out.values() if isinstance(out, dict) else [out])])
        for c in range(len(out)):
            grads = torch.autograd.grad(out[c], weights, retain_graph=True, allow_unused=True)
            filled = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, weights, strict=True)]
            rows.append(torch.cat([g.reshape(-1) for g in filled]))
    return torch.stack(rows).unflatten(0, (-1, len(out)))


def loss(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of one datum with outputs `f`, `[C]`, from torch's own losses and distributions."""
    if isinstance(likelihood, MultiTask):
        outputs, targets = f.split(likelihood.layout.sizes), y.split(likelihood.widths)
        heads = zip(likelihood.heads.values(), outputs, targets, strict=True)
        return sum(loss(head, g, t if t.numel() > 1 else t[0]) for head, g, t in heads)
    if isinstance(likelihood, LossLikelihood):
        return likelihood.function(f, y)
    if isinstance(likelihood, Poisson):
        return -torch.distributions.Poisson(f.exp()).log_prob(y.reshape(-1).to(f)).sum()
    if isinstance(likelihood, HeteroscedasticGaussian):
        mean, log_variance = f.chunk(2)
        return -torch.distributions.Normal(mean, (log_variance / 2).exp()).log_prob(y.reshape(-1)).sum()
    if isinstance(likelihood, Gaussian):
        scale = torch.as_tensor(likelihood.noise_precision).expand(f.shape) ** -0.5
        return -torch.distributions.Normal(f, scale).log_prob(y.reshape(-1)).sum()
    if isinstance(likelihood, Categorical):
        f = f.reshape(likelihood.shape)
        f = f if likelihood.class_dim == 1 else f.mT  # torch wants the classes first
        return F.cross_entropy(f[None], y[None].long(), ignore_index=likelihood.ignore_index, reduction="sum")
    return F.binary_cross_entropy_with_logits(f, y.reshape(-1).to(f), reduction="sum")


def expected_loss(f: Tensor, at: Tensor) -> Tensor:
    """Mean over `y ~ N(m, eˢ)` at `at` of the loss of a Gaussian with means and log variances `f`."""
    (m, s), (mean, log_variance) = f.chunk(2), at.chunk(2)
    return 0.5 * (((m - mean) ** 2 + log_variance.exp()) * (-s).exp() + s).sum()


def curvature(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """`B_n`, `[N, C, C]`, the Hessian of each loss by autograd; of its mean where the loss itself is not convex."""

    def at(n: int) -> Callable[[Tensor], Tensor]:
        if isinstance(likelihood, HeteroscedasticGaussian):
            return lambda g: expected_loss(g, f[n].detach())
        return lambda g: loss(likelihood, g, y[n])

    return torch.stack([torch.autograd.functional.hessian(at(n), f[n].detach()) for n in range(len(f))])


def ggn(J: Tensor, B: Tensor) -> Tensor:
    """`Σ_n J_nᵀ B_n J_n`."""
    return torch.einsum("ncp,ncd,ndq->pq", J, B, J)


def mode(likelihood: Likelihood, J: Tensor, offset: Tensor, y: Tensor, A: Tensor, steps: int = 50) -> Tensor:
    """`argmin_θ Σ ℓ(y, o + Jθ) + ½‖θ‖²_A` by Newton's method with autograd on the objective itself."""

    def objective(theta: Tensor) -> Tensor:
        f = offset + J @ theta
        return sum(loss(likelihood, f[n], y[n]) for n in range(len(f))) + 0.5 * (A * theta**2).sum()

    theta = torch.zeros_like(A)
    for _ in range(steps):
        point = theta.clone().requires_grad_()
        gradient = torch.autograd.grad(objective(point), point)[0]
        H = ggn(J, curvature(likelihood, offset + J @ theta, y)) + torch.diag(A)
        direction = torch.linalg.solve(H, gradient)
        length = 1.0
        while objective(theta - length * direction) > objective(theta) and length > 1e-6:
            length /= 2
        theta = theta - length * direction
        if direction.norm() < 1e-12:
            break
    return theta


def effective_dimension(M: Tensor, A: Tensor) -> float:
    """`Tr(H⁻¹M)`."""
    return float(torch.linalg.solve(M + torch.diag(A), M).trace())


def normal(covariances: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Samples `[num, N, C]` of normal distributions with covariances `[N, C, C]` and mean zero."""
    values, vectors = torch.linalg.eigh(covariances)
    white = torch.randn(num, *values.shape, generator=generator, dtype=torch.float64)
    return torch.einsum("ncd,knd->knc", vectors * values.clamp_min(0).sqrt()[:, None], white)
