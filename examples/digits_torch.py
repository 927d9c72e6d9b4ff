"""The demo's network in PyTorch: handwritten digits, trained through fused layers and through PyTorch's own from the same start.

    python examples/digits_torch.py [epochs]

Both see the same minibatches; their loss curves agree to float32's last digits at first and stay together.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from epigemm import pytorch as ep
from epigemm.demo import digits
from epigemm.demo.network import SIZES
from epigemm.demo.training import BATCH, MOMENTUM, RATE


def fused_network(seed: int) -> nn.Sequential:
    """64-256-128-10: bias and ReLU run inside each product, and so do their gradients."""
    torch.manual_seed(seed)
    activations = ["relu"] * (len(SIZES) - 2) + [None]
    return nn.Sequential(*[ep.Linear(k, n, activation=a) for (k, n), a in zip(pairwise(SIZES), activations, strict=True)])


def plain_network(fused: nn.Sequential) -> nn.Sequential:
    """The same network, with the same weights, of PyTorch's own layers."""
    layers: list[nn.Module] = []
    for layer in fused:
        linear = nn.Linear(layer.in_features, layer.out_features)
        linear.load_state_dict(layer.state_dict())
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, order: torch.Tensor) -> float:
    """One pass over the images in this order; the mean loss."""
    losses = []
    for chosen in order.split(BATCH):
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def train(epochs: int, seed: int = 0) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The mean loss of each epoch, and the share of held-out digits that are told right, of both networks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = digits.load(seed)
    images, labels, new_images, new_labels = (
        torch.from_numpy(x).to(device) for x in (data.images, data.labels, data.held_out_images, data.held_out_labels)
    )
    fused = fused_network(seed).to(device)
    models = {"fused": fused, "PyTorch": plain_network(fused).to(device)}
    optimizers = {name: torch.optim.SGD(model.parameters(), RATE, MOMENTUM) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator).to(device)
        for name, model in models.items():
            losses[name].append(epoch(model, optimizers[name], images, labels, order))
    with torch.no_grad():
        accuracy = {name: (model(new_images).argmax(1) == new_labels).float().mean().item() for name, model in models.items()}
    return losses, accuracy


def main(epochs: int) -> None:
    losses, accuracy = train(epochs)
    print("epoch      fused    PyTorch")
    for number, (ours, theirs) in enumerate(zip(*losses.values(), strict=True), 1):
        print(f"{number:5} {ours:10.6f} {theirs:10.6f}")
    apart = max(abs(a - b) / b for a, b in zip(*losses.values(), strict=True))
    told = ", ".join(f"{name} {share:.1%}" for name, share in accuracy.items())
    print(f"largest relative difference of the losses {apart:.1e}; held-out digits told right: {told}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
