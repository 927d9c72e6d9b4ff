"""DTensor: sharded operands give eager's results, on one process and a fake group of two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from epigemm import pytorch as ep


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def pair():
    """Two ranks of which this is the first; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_values_and_gradients(mesh, each, placement):
    tensors = each.tensors()
    placed = [distribute_tensor(t.detach(), mesh, [placement]).requires_grad_() for t in tensors]
    y = each.ours(*placed)
    z = each.eager(*tensors)
    torch.testing.assert_close(y.full_tensor(), z)
    y.sum().backward()
    z.sum().backward()
    for got, want in zip(placed, tensors, strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


def test_a_column_parallel_layer_on_one_of_two_ranks(pair):
    layer = ep.Linear(6, 8, activation="relu", dtype=torch.float64)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    x = torch.randn(3, 6, dtype=torch.float64)
    w, b = (distribute_tensor(t, pair, [Shard(0)], src_data_rank=None) for t in (weight, bias))
    y = ep.linear(distribute_tensor(x, pair, [Replicate()], src_data_rank=None), w, b, activation="relu")
    assert y.placements == (Shard(1),)
    torch.testing.assert_close(y.to_local(), torch.relu(x @ weight.T + bias)[:, :4])


def test_parallelize_module_takes_a_linear(mesh):
    model = torch.nn.Sequential(ep.Linear(6, 8, activation="gelu"), ep.Linear(8, 6)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    expected = model(x)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    torch.testing.assert_close(model(x), expected)
