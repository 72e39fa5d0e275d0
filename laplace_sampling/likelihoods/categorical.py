"""Labels of classes, one for each datum or for each of its positions (pixels, tokens)."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.arguments import check_whole
from laplace_sampling.data.batches import Layout
from laplace_sampling.likelihoods.labels import Labels, softmax


@dataclass(frozen=True)
class Categorical(Labels):
    r"""`y ~ softmax(f)` over `C` classes, at each position.

    `B = diag(p) − p pᵀ`, `L u = √p ⊙ (u − √p ⟨√p, u⟩)`.

    Targets are labels, integers; or probabilities of the classes, floating-point numbers in the shape of the outputs,
    as in `torch.nn.functional.cross_entropy`. A datum with the probabilities `y` has the loss `−Σ_c y_c log p_c`, and
    counts as one datum of each class with the weight `y_c`.

    Args:
        class_dim: the axis of the outputs that holds the classes: 1 for `[N, C]` and segmentation, `[N, C, H, W]`; -1
            for labels of tokens, `[N, T, C]`. Targets have the other axes.
        ignore_index: the label of positions without information, such as padding: they have neither loss nor curvature.
            Probabilities are NaN there.
        shape: shape of the outputs of a datum; `bind` sets it. By default there is one axis, the classes.
    """

    class_dim: int = 1
    ignore_index: int = -100
    shape: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    name: str = field(default="classification", init=False)

    def __post_init__(self) -> None:
        check_whole("`Categorical(class_dim=...)`", self.class_dim)
        check_whole("`Categorical(ignore_index=...)`", self.ignore_index)
        if self.class_dim == 0:
            raise ValueError(
                "`Categorical(class_dim=0)`: the first axis of the outputs is the data; classes are another."
            )

    @property
    def fill(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.ignore_index

    def bind(self, layout: Layout) -> Self:
        super().bind(layout)
        return self if self.shape == layout.shape else replace(self, shape=layout.shape)

    def rank(self, num_outputs: int) -> int:
        # Adding a constant to all logits of a position changes nothing: each position loses one direction.
        classes = num_outputs if self.shape is None else self.shape[self._axis]
        return num_outputs - num_outputs // classes

    @property
    def _axis(self) -> int:
        """The axis of the classes, counted from the end."""
        assert self.shape is not None
        return self.class_dim if self.class_dim < 0 else self.class_dim - 1 - len(self.shape)

    def positions(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K S c"]:
        if self.shape is None:
            return f[..., None, :]
        moved = f.reshape(*f.shape[:-1], *self.shape).movedim(self._axis, -1)
        classes = self.shape[self._axis]
        return moved.reshape(*f.shape[:-1], f.shape[-1] // classes, classes)

    def flat(self, g: Float[Tensor, "*K S c"]) -> Float[Tensor, "*K C"]:
        if self.shape is None:
            return g[..., 0, :]
        others = list(self.shape)
        classes = others.pop(self._axis)
        return g.reshape(*g.shape[:-2], *others, classes).movedim(-1, self._axis).flatten(-len(self.shape))

    def is_soft(self, y: Tensor) -> bool:
        width = y.shape[1:].numel()
        wide = width > 1 if self.shape is None else width == torch.Size(self.shape).numel()
        return wide and y.is_floating_point()  # columns of several heads are floating-point numbers, labels too

    def weights_of_classes(self, y: Tensor) -> Float[Tensor, "N S c"]:
        return self.positions(y.reshape(len(y), y.shape[1:].numel())).nan_to_num()

    def labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        labels = y.reshape(len(y), y.shape[1:].numel()).long()
        counts = labels != self.ignore_index
        # Indexing needs a valid label also where the result is then multiplied by zero.
        return labels.where(counts, 0), counts

    def _probabilities(self, f: Tensor, u: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """`p` and `u` by positions; `p` is zero where labels are ignored, and so is each product with it."""
        p = softmax(self.positions(f)).to(u)
        return p if y is None else p * self.given(y)[..., None], self.positions(u)

    def given(self, y: Tensor) -> Bool[Tensor, "N S"]:
        if self.is_soft(y):
            return ~self.positions(y.reshape(len(y), y.shape[1:].numel())).isnan().any(-1)
        return self.labels(y)[1]

    def observed(self, y: Tensor, num_outputs: int) -> Bool[Tensor, "N C"]:
        given = self.given(y)
        return self.flat(given[..., None].expand(*given.shape, num_outputs // given.shape[1]))

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        p = softmax(self.positions(f))
        if self.is_soft(y):
            return self.flat((p - self.weights_of_classes(y).to(p)) * self.given(y)[..., None])
        labels, counts = self.labels(y)
        index = labels.expand(p.shape[:-1])[..., None]
        # `p − onehot(y)`, without the memory of a one-hot tensor.
        return self.flat(p.scatter_add(-1, index, torch.full_like(p[..., :1], -1)) * counts[..., None])

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        p, u = self._probabilities(f, u, y)
        return self.flat(p * (u - (p * u).sum(-1, keepdim=True)))

    def diagonal_and_vector(self, f: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        p, _ = self._probabilities(f, f, y)
        return None if p.shape[1] > 1 else (p[:, 0], p[:, 0])

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        # `L = diag(q) − p qᵀ` with `q = √p`: `LLᵀ = diag(p) − ppᵀ` since `‖q‖ = 1`. No eigenvectors are needed.
        p, u = self._probabilities(f, u, y)
        q = p.sqrt()
        return self.flat(q * (u - q * (q * u).sum(-1, keepdim=True)))

    def root_transpose(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        p, u = self._probabilities(f, u, y)
        q = p.sqrt()
        return self.flat(q * u - q * (q * (q * u)).sum(-1, keepdim=True))

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        axis = self._check_class_axis(output_shape)
        if y.is_floating_point() and y.shape == output_shape:
            self._check_probabilities(axis, y)
            return
        if y.is_floating_point() or y.dtype == torch.bool:
            raise TypeError(
                f"Class labels must be integers, but have dtype {y.dtype}; call `y.long()`. Probabilities of the "
                f"classes must have the shape of the outputs, {list(output_shape)}, but these are {list(y.shape)}."
            )
        self._check_labels(output_shape, axis, y)

    def _check_class_axis(self, output_shape: torch.Size) -> int:
        """The axis of the classes, counted from the start, if the outputs have it."""
        axis = self.class_dim if self.class_dim > 0 else self.class_dim + len(output_shape)
        if not 0 < axis < len(output_shape) or output_shape[axis] < 2:
            raise ValueError(
                f"Classification needs outputs [N, C] with C of at least 2 classes, or those of several positions with "
                f"`Categorical(class_dim=...)`, but the model gives {list(output_shape)} and class_dim is "
                f'{self.class_dim}. For one logit a datum use likelihood="binary".'
            )
        return axis

    @staticmethod
    def _check_probabilities(axis: int, y: Tensor) -> None:
        missing = y.isnan().any(axis, keepdim=True)
        if bool((missing & ~y.isnan()).any()):
            raise ValueError(
                "Probabilities of classes are NaN for some classes of a datum or position, and not for others: give "
                "NaN for all of them where the label is missing."
            )
        # Half of the digits, of float32 at least, from which probabilities may have come.
        rounding = max(torch.finfo(y.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
        sums = y.double().sum(axis, keepdim=True)[~missing]
        if bool((y < 0).any()) or bool(((sums - 1).abs() > rounding).any()):
            low, high = (float(v) for v in (sums.min(), sums.max()))
            raise ValueError(
                f"Probabilities of classes must be at least 0 and sum to 1 over axis {axis}, but the smallest is "
                f"{float(y[~y.isnan()].min()):g} and sums range from {low:g} to {high:g}; logits become probabilities "
                f"by `y.softmax({axis})`."
            )

    def _check_labels(self, output_shape: torch.Size, axis: int, y: Tensor) -> None:
        shapes = {n: [*output_shape[:n], *output_shape[n + 1 :]] for n in range(1, len(output_shape))}
        if list(y.shape) != shapes[axis]:
            # A wrong `class_dim` is the usual reason: try the other axes.
            fitting = [n for n, shape in shapes.items() if shape == list(y.shape)]
            cure = f" They fit classes on axis {fitting[0]}: `Categorical(class_dim={fitting[0]})`." if fitting else ""
            if fitting and fitting[0] == len(output_shape) - 1 == 2:
                cure += (
                    " Labels of a causal language model are shifted by one besides: `data=Data(unpack=next_token)`, "
                    "from `laplace_sampling.integrations.transformers`."
                )
            raise ValueError(
                f"Class labels must have shape {shapes[axis]} for outputs {list(output_shape)} with the classes on "
                f"axis {axis}, but have {list(y.shape)}.{cure}"
            )
        labels, classes = y[y != self.ignore_index], output_shape[axis]
        if bool(((labels < 0) | (labels >= classes)).any()):
            raise ValueError(
                f"Class labels must lie between 0 and {classes - 1} for {classes} outputs, but range from "
                f"{int(labels.min())} to {int(labels.max())}; the label {self.ignore_index} is ignored."
            )
