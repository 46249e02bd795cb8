"""Small modules that the tests of the passes share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OwnParameters(nn.Module):
    """Every covered operator against parameters of its own, in straight-line code."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(width, width))
        self.b = nn.Parameter(torch.randn(width, width))
        self.c = nn.Parameter(torch.randn(width, width))
        self.d = nn.Parameter(torch.randn(width, width))
        self.e = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.a, self.bias)
        x = torch.tanh(torch.matmul(x, self.b))
        x = torch.tanh(x @ self.c.t())
        x = torch.einsum("bi,ij->bj", x, self.d)
        return torch.addmm(self.bias, x, self.e)


class Ellipsis_(nn.Module):
    """An einsum whose equation is complete only with its operands' ranks: straight-line, and yet not to be traced."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,ij->...j", x, self.w)


class Branching(nn.Module):
    """A forward that may take another way: not to be traced."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        y = F.linear(x, self.weight)
        return y * 2 if double else y


class ReadsTraining(nn.Module):
    """Reads ``self.training`` without a visible branch."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.dropout(x, 0.5, self.training), self.weight)


class ChildWeight(nn.Module):
    """Multiplies with the weight of a child whose forward is never called."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            x = x.unsqueeze(0)
        return (self.inner.weight @ x.transpose(-1, -2)).transpose(-1, -2) * self.scale


class ParameterContainers(nn.Module):
    """Weights in a list and in a mapping of parameters, one of them multiplied with on request only."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) for _ in range(2))
        self.named = nn.ParameterDict({"up-proj": torch.randn(width, width), "scale": torch.ones(width)})

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        return F.linear(x, self.named["up-proj"]) * self.named["scale"] if again else x


class NumberedChildren(nn.Module):
    """Reads the weights of children in a list, and never calls them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor, bias: bool = True) -> Tensor:
        for expert in self.experts:
            x = torch.tanh(F.linear(x, expert.weight, expert.bias if bias else None))
        return x


class StaticHelper(nn.Module):
    """A child's weight goes to a static method, which multiplies."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(width, width)
        self.conv = nn.Conv1d(width, width, 1)

    @staticmethod
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.float()

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv1d(x.unsqueeze(-1), self.conv.weight, self.conv.bias).squeeze(-1) if x.dim() == 2 else x
        return self.product(x, self.table.weight.reshape(x.shape[-1], -1))


class Expert(nn.Module):
    """Holds weights, and multiplies with those that it is handed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2 * width, width))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return x.matmul(w.t())


class Experts(nn.Module):
    """Hands slices of a child's weight to that child."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mlp = Expert(width)

    def forward(self, x: Tensor, count: int = 2) -> Tensor:
        w = self.mlp.w.view(2, -1, x.shape[-1])
        for i in range(count):
            x = torch.tanh(self.mlp(x, w[i]))
        return x


class Block(nn.Module):
    """Two readers of one tensor, then a third."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    """Blocks and an output head."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(self.norm(x))


class FirstToken(nn.Module):
    """A classifier of the first of many tokens, [N, T, width]: autograd keeps a small piece of a large tensor."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body, self.classes = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.body(x)[:, 0])


class RMSNorm(nn.Module):
    """Statistics in fp32, as language models have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class DecoderBlock(nn.Module):
    """Attention whose query and key are changed after their projections (as by a rotary embedding), and a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (p(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        position = torch.arange(x.size(1), device=x.device).cos().unsqueeze(-1).to(x.dtype)
        out = F.scaled_dot_product_attention(q * position, k * position, v, is_causal=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """A small language model in straight-line code, which compiles faster than one from a library; returns the loss."""

    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 1, vocabulary: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(blocks))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class WithAdapter(nn.Module):
    """A frozen projection and its adapter in one module."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) / inner.in_features)
        self.b = nn.Parameter(torch.randn(inner.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.a.t() @ self.b.t()
