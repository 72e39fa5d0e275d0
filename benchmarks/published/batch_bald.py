"""BatchBALD (Kirsch et al. 2019): a batch of inputs whose labels together tell most about the function.

The mutual information of the labels of a batch and the function is

    I(y_1 … y_b; f) = H(y_1 … y_b) − Σ_i E_f H(y_i | f),

greedily: each step adds the input that raises it most. The joint entropy is an expectation over labels `y^m` that were
drawn for the batch so far, and a sum over the classes of the next input,

    H ≈ −(1/M) Σ_m Σ_c p(y^m, c)/p(y^m) · log p(y^m, c),    p(y^m, c) = (1/K) Σ_k p(y^m | f_k) p(c | f_k).
"""

import torch
from torch import Tensor

__all__ = ["batch_bald", "joint_entropies"]


def joint_entropies(log_joint: Tensor, probs: Tensor) -> Tensor:
    """`H(y_1 … y_b, y)` for each candidate `y`, `[N]`.

    Args:
        log_joint: `log p(y^m | f_k)` of labels drawn for the batch, `[K, M]`.
        probs: of candidates under the same functions, `[K, N, C]`.
    """
    weights = log_joint.exp() / len(log_joint)
    joint = torch.einsum("km,knc->mnc", weights, probs)
    return (torch.special.entr(joint) / weights.sum(0)[:, None, None]).sum(-1).mean(0)


def batch_bald(probs: Tensor, size: int, seed: int = 0, draws: int = 200) -> list[int]:
    """Indices of a batch.

    Args:
        probs: of candidates under joint draws of the function, `[K, N, C]`.
        size: of the batch.
        seed: of the labels that are drawn.
        draws: `M`.
    """
    probs = probs.double().clamp_min(1e-12)
    generator = torch.Generator().manual_seed(seed)
    given_function = torch.special.entr(probs).sum(-1).mean(0)
    log_joint, chosen = torch.zeros(len(probs), 1, dtype=torch.float64), []
    # Labels of one function for all of the batch, so that they are drawn from their joint distribution.
    functions = torch.randint(len(probs), (draws,), generator=generator)
    for _ in range(size):
        gain = joint_entropies(log_joint, probs) - given_function
        gain[chosen] = -torch.inf
        chosen.append(int(gain.argmax()))
        p = probs[:, chosen[-1]]
        labels = torch.multinomial(p[functions], 1, generator=generator)[:, 0]
        log_joint = log_joint + p[:, labels].log()
    return chosen
