import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from laplace_sampling.data.training_data import TrainingData

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


def read(data: TrainingData) -> torch.Tensor:
    return torch.cat([data.inputs(batch) for batch in torch.arange(data.num_data).split(data.batch_size)])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(X, Y), batch_size=4),
        DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
        DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(X, Y), batch_sampler=[[3, 1, 2, 0], [7, 6, 5, 4], [8, 9]]),
        [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
    ],
    ids=["plain", "shuffled", "drop_last", "batch_sampler", "list"],
)
@pytest.mark.parametrize("cache_bytes", [2**20, 0])
def test_data_come_in_one_order_whatever_the_loader_does(loader, cache_bytes: int) -> None:
    data = TrainingData(loader, cache_bytes=cache_bytes)
    assert data.num_data == 10
    assert data.batch_size == 4
    assert torch.equal(read(data), X)
    assert torch.equal(data.targets, Y)
    assert torch.equal(data.inputs(torch.tensor([7, 2])), X[[7, 2]])


def test_a_sampler_says_which_data() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, sampler=SubsetRandomSampler([5, 2, 9]))
    with pytest.warns(UserWarning, match=r"\b3\b"):
        assert TrainingData(loader).targets.tolist() == [2, 5, 9]


def test_the_collate_function_of_the_loader_is_used() -> None:
    def collate(items):
        return torch.stack([x for x, _ in items]) * 2, torch.stack([y for _, y in items])

    loader = DataLoader(TensorDataset(X, Y), batch_size=3, collate_fn=collate)
    assert torch.equal(read(TrainingData(loader)), 2 * X)


class Augmented(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int):
        return X[i] + torch.rand(2), Y[i]


class SelfShuffling:
    def __iter__(self):
        order = torch.randperm(10)
        yield from zip(X[order].split(5), Y[order].split(5), strict=True)


@pytest.mark.parametrize("loader", [DataLoader(Augmented(), batch_size=3), SelfShuffling()])
def test_random_augmentation_is_detected(loader) -> None:
    with pytest.raises(ValueError, match="augmentation"):
        TrainingData(loader)


def test_one_shot_iterators_are_detected() -> None:
    with pytest.raises(TypeError, match="generator"):
        TrainingData((X, Y) for _ in range(3))
    with pytest.raises(TypeError, match="iterator"):
        TrainingData(iter(DataLoader(TensorDataset(X, Y))))


@pytest.mark.parametrize(
    "loader", [[], DataLoader(TensorDataset(X[:0], Y[:0])), DataLoader(TensorDataset(X[:0], Y[:0]), batch_size=4)]
)
def test_an_empty_loader_is_refused(loader) -> None:
    with pytest.raises(ValueError, match="empty"):
        TrainingData(loader)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_named_with_their_batch(value: float) -> None:
    x = X.clone()
    x[7, 1] = value
    with pytest.raises(ValueError, match=r"[Bb]atch 2"):
        TrainingData(DataLoader(TensorDataset(x, Y), batch_size=3))
    with pytest.raises(ValueError, match="targets"):
        TrainingData(DataLoader(TensorDataset(X, x[:, 1]), batch_size=4))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            (X, Y),
            r"\blist\b",
        ),
        ([(X, Y, Y)], "'Tensor'"),
        ([{"x": X}], r"\bdict\b"),
        (3, "DataLoader"),
    ],
)
def test_batches_that_are_not_pairs_are_refused(loader, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TrainingData(loader)


def test_inputs_and_targets_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="targets"):
        TrainingData([(X, Y[:4])])


def test_arrays_are_taken() -> None:
    data = TrainingData([(X[:4].numpy(), Y[:4].numpy()), (X[4:].numpy(), Y[4:].numpy())])
    assert torch.equal(read(data), X)
    assert torch.equal(data.targets, Y)
