import torch

from laplace_sampling.data.batches import digest


def test_names_dtypes_shapes_and_numbers_all_count() -> None:
    a = torch.arange(6.0)
    others = [("b", a), ("a", a.double()), ("a", a.view(2, 3)), ("a", a + 1e-6), ("a", -a)]
    assert len({digest([("a", a)]), *(digest([other]) for other in others)}) == 6
    assert digest([("a", a), ("b", a)]) != digest([("b", a), ("a", a)])


def test_the_layout_in_memory_does_not_count() -> None:
    whole = torch.arange(130.0).reshape(2, 65)
    single = whole[:, :1][:1].as_strided((1,), (65,))  # one number, whose stride torch does not normalise
    for a in (whole.T, single, whole[:, 3], torch.zeros(0), whole.bfloat16(), whole[0, 0]):
        assert digest([("a", a)]) == digest([("a", a.clone(memory_format=torch.contiguous_format))])
    sparse = whole.to_sparse()
    assert digest([("a", sparse)]) == digest([("a", sparse.clone())]) != digest([("a", (whole + 1).to_sparse())])
