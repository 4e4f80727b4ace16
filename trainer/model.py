"""A LLaMA-family transformer: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, no biases.

1. ``model_config`` names the shape, ``build`` makes the modules, on the meta device if asked (nothing is allocated).
2. Once sharded and materialised, ``init_weights`` (or ``pretrained``) gives the parameters their values; both fill
   only the rows this rank holds, and the values are the same at every world size.
3. ``forward`` maps tokens_BL to logits_BLV, or with targets_BL to the loss.

Letters in names: B sequences, L positions, D model width, N query heads, K key/value heads, H head width, C = H / 2,
F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from trainer.errors import ConfigurationError
from trainer.loss import projected_loss

DRAW_ELEMENTS = 1 << 22
"""Elements that one generator draws: enough to keep a GPU busy, few enough for a temporary at a shard's edge."""


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA-3's stretching of the rotary wavelengths beyond the context that the model was first trained on."""

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocabulary_size: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """Whether the output projection is the embedding matrix."""
    init_std: float = 0.02
    """Standard deviation of random weights; what writes to the residual stream has it over sqrt(2 x layers)."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(dim=128, layers=2, heads=4, kv_heads=2, ffn_dim=256, vocabulary_size=256, rope_theta=10_000.0),
    "160m": ModelConfig(dim=768, layers=12, heads=12, kv_heads=4, ffn_dim=2048, vocabulary_size=256),
    "1b": ModelConfig(
        dim=2048, layers=16, heads=32, kv_heads=8, ffn_dim=8192, vocabulary_size=256,
        rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True,
    ),
    "llama-3.1-8b": ModelConfig(
        dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, vocabulary_size=128_256,
        rope_scaling=RopeScaling(factor=8.0),
    ),
}  # fmt: skip
"""Shapes by name; ``vocabulary_size`` here is the smallest one. ``1b`` has the shape of LLaMA-3.2-1B."""


def model_config(name: str, vocabulary_size: int) -> ModelConfig:
    """The preset ``name`` with room for ``vocabulary_size`` tokens; ``ConfigurationError`` for an unknown name."""
    if name not in PRESETS:
        raise ConfigurationError(f"--model: there is no preset '{name}'; use one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    return replace(preset, vocabulary_size=max(preset.vocabulary_size, vocabulary_size))


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and a value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor, cos_LC: Tensor, sin_LC: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        q_BNLH = self.query(x_BLD).unflatten(-1, heads).transpose(1, 2)
        k_BKLH = self.key(x_BLD).unflatten(-1, heads).transpose(1, 2)
        v_BKLH = self.value(x_BLD).unflatten(-1, heads).transpose(1, 2)
        y_BNLH = F.scaled_dot_product_attention(
            rotate(q_BNLH, cos_LC, sin_LC),
            rotate(k_BKLH, cos_LC, sin_LC),
            v_BKLH,
            is_causal=True,
            enable_gqa=q_BNLH.shape[1] != k_BKLH.shape[1],
        )
        out_BLD: Tensor = self.out(y_BNLH.transpose(1, 2).flatten(2))
        return out_BLD


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        out_BLD: Tensor = self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))
        return out_BLD


class Block(nn.Module):
    """Attention, then the feed-forward network, each on a normalised copy and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config)
        self.recompute = False
        """Whether the backward pass computes the activations again, rather than the forward pass keep them."""

    def forward(self, x_BLD: Tensor, cos_LC: Tensor, sin_LC: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            # Inside the block, so that its parameters are gathered once for both.
            out_BLD: Tensor = checkpoint(
                self._forward, x_BLD, cos_LC, sin_LC, use_reentrant=False, preserve_rng_state=False
            )
            return out_BLD
        return self._forward(x_BLD, cos_LC, sin_LC)

    def _forward(self, x_BLD: Tensor, cos_LC: Tensor, sin_LC: Tensor) -> Tensor:
        h_BLD: Tensor = x_BLD + self.attention(self.attention_norm(x_BLD), cos_LC, sin_LC)
        out_BLD: Tensor = h_BLD + self.ffn(self.ffn_norm(h_BLD))
        return out_BLD


class Transformer(nn.Module):
    """tokens_BL -> logits_BLV, or with targets_BL the mean loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = None if config.tie_embeddings else nn.Linear(config.dim, config.vocabulary_size, bias=False)
        # A plain attribute made at the first forward: neither a meta build nor ``to_empty`` can leave it undefined.
        self._rope: tuple[Tensor, Tensor] | None = None
        self.compile_loss = False
        """Whether the part of the loss that only moves memory is compiled, where the vocabulary is large."""

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor | None = None) -> Tensor:
        """Logits of the next token at each position; float32 on a CPU, the compute type (bf16) on a GPU.

        With targets: their mean cross entropy, for which the logits are never in memory together.
        """
        x_BLD = self.embedding(tokens_BL)
        cos_LC, sin_LC = self._rope_tables(tokens_BL.shape[1], x_BLD.device)
        for block in self.blocks:
            x_BLD = block(x_BLD, cos_LC, sin_LC)
        x_BLD = self.norm(x_BLD)
        weight_VD = self.embedding.weight if self.output is None else self.output.weight
        if targets_BL is None:
            return F.linear(x_BLD, weight_VD)
        return projected_loss(x_BLD, weight_VD, targets_BL, compiled=self.compile_loss)

    def _rope_tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._rope is None or self._rope[0].device != device or self._rope[0].shape[0] < length:
            self._rope = rope_tables(self.config, length, device)
        cos_LC, sin_LC = self._rope
        return cos_LC[:length], sin_LC[:length]


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotary pair, (C,), float32 on the CPU.

    LLaMA-3's scaling leaves short wavelengths alone, divides the frequency of long ones by ``factor``, and blends
    linearly (in wavelengths per original context) between the two.
    """
    pair_C = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequency_C = 1.0 / (config.rope_theta ** (pair_C / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequency_C
    turns_C = scaling.original_length * frequency_C / (2 * math.pi)  # of the pair, within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep_C = ((turns_C - low) / (high - low)).clamp(0.0, 1.0)
    return keep_C * frequency_C + (1.0 - keep_C) * frequency_C / scaling.factor


def rope_tables(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (L, C) in float32."""
    angle_LC = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), rope_frequencies(config))
    return angle_LC.cos().to(device), angle_LC.sin().to(device)


def rotate(x_BNLH: Tensor, cos_LC: Tensor, sin_LC: Tensor) -> Tensor:
    """Rotate the pairs (i, i + C) of each head, in float32; the pairing of Hugging Face's LLaMA weights."""
    first_BNLC, second_BNLC = x_BNLH.float().chunk(2, dim=-1)
    rotated_BNLH = torch.cat(
        (first_BNLC * cos_LC - second_BNLC * sin_LC, second_BNLC * cos_LC + first_BNLC * sin_LC), dim=-1
    )
    return rotated_BNLH.to(x_BNLH.dtype)


def build(config: ModelConfig, device: torch.device | str) -> Transformer:
    """The modules with undefined values: ``init_weights``, published weights or a checkpoint must follow."""
    with torch.device("meta"):
        model = Transformer(config)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)


def token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Mean cross entropy over all positions, nats per token, float32."""
    return F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten())


def parameter_count(config: ModelConfig) -> int:
    return sum(parameter.numel() for parameter in build(config, "meta").parameters())


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations of forward and backward per token that the model needs, for MFU.

    Six per parameter that a token is multiplied with (the lookup of an embedding multiplies nothing), and the two
    attention products over the half of the positions that a causal mask leaves. Recomputation does not count.
    """
    embedding = 0 if config.tie_embeddings else config.vocabulary_size * config.dim
    attention = 6 * config.layers * config.heads * config.head_dim * sequence_length
    return float(6 * (parameter_count(config) - embedding) + attention)


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """The part of ``parameter`` that this rank holds, and the index of its first row in the whole.

    FSDP2 shards dimension 0 like ``torch.chunk``: the last ranks may hold fewer rows, or none.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    assert parameter.device_mesh.ndim == 1 and parameter.placements == (Shard(0),), parameter.placements
    rows = parameter.shape[0]
    chunk = -(-rows // parameter.device_mesh.size())
    return parameter.to_local(), min(rows, chunk * parameter.device_mesh.get_local_rank())


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Draw all parameters: norms are one, matrices normal. Values follow from ``seed``, the parameter's name and the kind
    of device alone, so that they are the same however the parameters are sharded.

    Rows are drawn in blocks, each by its own generator; a rank draws the blocks that it holds rows of.
    """
    config = model.config
    for name, parameter in model.named_parameters():
        local, first = local_rows(parameter)
        if local.ndim == 1:
            local.fill_(1.0)
            continue
        writes_residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
        std = config.init_std / math.sqrt(2 * config.layers) if writes_residual else config.init_std
        rows, columns = parameter.shape
        height = max(1, DRAW_ELEMENTS // columns)
        last = first + local.shape[0]
        for start in range(first - first % height, last, height):
            block = torch.empty(min(height, rows - start), columns, device=local.device, dtype=torch.float32)
            block.normal_(0.0, std, generator=_generator(local.device, seed, name, start // height))
            low, high = max(first, start), min(last, start + block.shape[0])
            local[low - first : high - first] = block[low - start : high - start].to(local.dtype)


def _generator(device: torch.device, seed: int, name: str, block: int) -> torch.Generator:
    key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(key, "little") >> 1)
