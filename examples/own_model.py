"""Budgeted recovery in a model of your own, in plain eager mode: the model and its training loop know nothing of it.

python examples/own_model.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnmr_fx


class Block(nn.Module):
    """A residual block with two projections, so two recoverable units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., width]`` to the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main(steps: int = 200) -> float:
    """Learn to sort eight numbers; print the table and return the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), Block(64), Block(64), nn.Linear(64, 8))

    gnmr_fx.instrument(model, "saved-int4-int8", max_active=2)  # the only line that is not there without gnmr-fx

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x = torch.rand(256, 8)
        loss = F.mse_loss(model(x), x.sort(dim=-1).values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    print(f"loss after {steps} steps: {loss.item():.4f}\n")
    print(gnmr_fx.table(model))
    return loss.item()


if __name__ == "__main__":
    main()
