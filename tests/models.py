"""Tiny models of many kinds, for tests that every one of them has to pass. No dropout, fp32, a few thousand parameters.

Inner sizes are 32 and 64 throughout, so that few kernels are built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, INNER, VOCAB, BATCH, LENGTH = 32, 64, 64, 2, 8


class Built(NamedTuple):
    """A model in train mode, the arguments of its forward, and the loss of what that returns."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]


@dataclass(frozen=True)
class Case:
    """One model to test.

    Attributes:
        build: makes it, from the random state it finds.
        options: what to pass to ``instrument`` besides the recipe; ``"inputs"`` as ``example_inputs`` stands for the
            arguments that ``build`` returned.
        fullgraph: whether Dynamo captures the stock model as one graph.
        units: how many units are expected.
    """

    build: Callable[[], Built]
    units: int
    options: Mapping[str, Any] = field(default_factory=dict)
    fullgraph: bool = True


def instrument_options(case: Case, built: Built) -> dict[str, Any]:
    """``case.options`` with the example inputs filled in."""
    options = dict(case.options)
    if options.get("example_inputs") == "inputs":
        options["example_inputs"] = built.args or built.kwargs
    return options


def cast(built: Built, dtype: torch.dtype) -> Built:
    """``built`` with model and inputs in ``dtype``."""

    def to(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    model = built.model.to(dtype)
    return Built(model, tuple(map(to, built.args)), {k: to(v) for k, v in built.kwargs.items()}, built.loss)


# Hugging Face ---------------------------------------------------------------------------------------------------------


def _own_loss(out: Any) -> Tensor:
    return out.loss


def _tokens(model: nn.Module) -> Built:
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    return Built(model.train(), (), {"input_ids": ids, "labels": ids.clone()}, _own_loss)


def _decoder_options(layers: int) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4 * LENGTH,
        "use_cache": False,
    }


def llama(layers: int = 2, **options: Any) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {**_decoder_options(layers), "num_key_value_heads": 1, **options}
    return _tokens(LlamaForCausalLM(LlamaConfig(**options)))


def qwen3() -> Built:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _tokens(Qwen3ForCausalLM(Qwen3Config(**_decoder_options(1), num_key_value_heads=1, head_dim=16)))


def mixtral(experts: str) -> Built:
    """``experts``: how they are computed: ``"eager"`` (a loop over those hit), ``"grouped_mm"``, ``"batched_mm"``."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_decoder_options(1), num_key_value_heads=1, num_local_experts=4, experts_implementation=experts
    )
    return _tokens(MixtralForCausalLM(config))


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=HIDDEN,
        n_inner=INNER,
        n_layer=1,
        n_head=2,
        vocab_size=VOCAB,
        n_positions=4 * LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return _tokens(GPT2LMHeadModel(config))


def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    options = {**_decoder_options(1), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _tokens(BertForMaskedLM(BertConfig(**options)))


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=HIDDEN,
        d_ff=INNER,
        d_kv=16,
        num_heads=2,
        num_layers=1,
        vocab_size=VOCAB,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return _tokens(T5ForConditionalGeneration(config))


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        num_labels=4,
        problem_type="single_label_classification",  # set by the first forward otherwise
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ViTForImageClassification(config).train()
    inputs = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 4, (BATCH,))}
    return Built(model, (), inputs, _own_loss)


def mamba() -> Built:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        hidden_size=HIDDEN, state_size=8, num_hidden_layers=1, vocab_size=VOCAB, time_step_rank=32, use_cache=False
    )
    return _tokens(MambaForCausalLM(config))


def lora() -> Built:
    """A PEFT LoRA model: frozen base, adapters on the query and value projections."""
    from peft import LoraConfig, get_peft_model

    built = llama(layers=1)
    config = LoraConfig(r=32, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(built.model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which makes the gradient of lora_A zero
            nn.init.normal_(parameter, std=0.1)
    return built._replace(model=model.train())


# torch.nn -------------------------------------------------------------------------------------------------------------


def _distance(out: Any) -> Tensor:
    """A loss whose gradient differs in every element, and does not vanish behind a normalization."""
    target = torch.arange(out.numel(), dtype=torch.float32).sin()
    return (out.float() - target.view_as(out)).square().mean()


def _activations(*lead: int) -> Tensor:
    return torch.randn(*lead, HIDDEN)


def transformer_encoder(batch_first: bool) -> Built:
    layer = nn.TransformerEncoderLayer(HIDDEN, 2, INNER, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train()
    return Built(model, (_activations(*((BATCH, LENGTH) if batch_first else (LENGTH, BATCH))),), {}, _distance)


def transformer_decoder_layer() -> Built:
    """Its second attention reads keys and values from another tensor than its queries."""
    model = nn.TransformerDecoderLayer(HIDDEN, 2, INNER, dropout=0.0, batch_first=True).train()
    return Built(model, (_activations(BATCH, LENGTH), _activations(BATCH, LENGTH + 2)), {}, _distance)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * shape[-1] ** -0.5)


class Functional(nn.Module):
    """Every way to multiply an activation with a parameter of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.linear_weight = _parameter(INNER, HIDDEN)
        self.linear_bias = nn.Parameter(torch.randn(INNER))
        self.right_weight = _parameter(INNER, HIDDEN)
        self.left_weight = _parameter(LENGTH, LENGTH)
        self.einsum_weight = _parameter(2, HIDDEN, 16)
        self.addmm_weight = _parameter(HIDDEN, INNER)
        self.addmm_bias = nn.Parameter(torch.randn(INNER))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        x = torch.tanh(F.linear(x, self.linear_weight, self.linear_bias))
        x = torch.tanh(torch.matmul(x, self.right_weight))
        x = torch.tanh(self.left_weight @ x)
        x = torch.tanh(torch.einsum("bld,hde->blhe", x, self.einsum_weight)).flatten(-2)
        return torch.addmm(self.addmm_bias, x.flatten(0, 1), self.addmm_weight)


def functional() -> Built:
    return Built(Functional().train(), (_activations(BATCH, LENGTH),), {}, _distance)


class SharedModule(nn.Module):
    """One Linear, two call sites."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(self.norm(x))))


class SharedParameter(nn.Module):
    """Two Linears, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.norm(x))))


class Branching(nn.Module):
    """Its own projection lies behind an optional argument, a branch on ``self.training`` and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _parameter(HIDDEN, HIDDEN)
        self.repeats = 2

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        for _ in range(self.repeats):
            x = torch.tanh(F.linear(x, self.weight))
        if self.training:
            x = x * 2.0
        return x if skip is None else x + skip


class BranchingModel(nn.Module):
    """Calls :class:`Branching` with and without its optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.block = Branching()
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.out(self.block(self.block(x), skip=x))


class Reaching(nn.Module):
    """The parent's code multiplies with its child's weight, and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.child = nn.Linear(HIDDEN, INNER)
        self.out = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(x) @ self.child.weight.t() + self.child.bias))


def _of(kind: type[nn.Module]) -> Callable[[], Built]:
    return lambda: Built(kind().train(), (_activations(BATCH, LENGTH),), {}, _distance)


# All of them ----------------------------------------------------------------------------------------------------------

GIVEN = {"example_inputs": "inputs"}

CASES: Mapping[str, Case] = {
    "llama": Case(lambda: llama(1), 7),
    "gpt2": Case(gpt2, 4, fullgraph=False),  # its loss logs a message
    "bert": Case(bert, 7),
    "t5": Case(t5, 16),
    "qwen3": Case(qwen3, 7),
    "mixtral-loop": Case(lambda: mixtral("eager"), 7, fullgraph=False),
    "mixtral-grouped": Case(lambda: mixtral("grouped_mm"), 7),
    "mixtral-batched": Case(lambda: mixtral("batched_mm"), 7),
    "vit": Case(vit, 6),
    "mamba": Case(mamba, 4),
    "encoder": Case(lambda: transformer_encoder(True), 4, GIVEN),
    "encoder-seq-first": Case(lambda: transformer_encoder(False), 4),
    "decoder-layer": Case(transformer_decoder_layer, 6, GIVEN),
    "functional": Case(functional, 5, GIVEN),
    "functional-blind": Case(functional, 5),
    "shared-module": Case(_of(SharedModule), 1),
    "shared-parameter": Case(_of(SharedParameter), 1),
    "tied-head": Case(lambda: llama(1, tie_word_embeddings=True), 8, {"include": ["*"]}),
    "lora": Case(lora, 11),
    "branching": Case(_of(BranchingModel), 2),
    "reaching": Case(_of(Reaching), 2, GIVEN),
    "reaching-blind": Case(_of(Reaching), 2),
}
