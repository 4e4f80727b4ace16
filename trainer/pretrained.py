"""Published weights: a Hugging Face LLaMA directory into a model that may be sharded, and the words to write one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import ConfigurationError, DataError
from trainer.model import ModelConfig, RopeScaling, Transformer, local_rows

HUGGING_FACE_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    """The name that Hugging Face's LLaMA checkpoints give to our parameter ``name``."""
    module = name.removesuffix(".weight")
    if not module.startswith("blocks."):
        return f"{HUGGING_FACE_NAMES[module]}.weight"
    _, number, rest = module.split(".", 2)
    return f"model.layers.{number}.{HUGGING_FACE_NAMES[rest]}.weight"


@torch.no_grad()
def load_hugging_face(model: Transformer, directory: Path) -> None:
    """Fill ``model`` from a Hugging Face LLaMA directory (config.json and safetensors, one file or an index of several).

    Each rank reads only the rows it holds. ``ConfigurationError`` when the directory is not one of a LLaMA of this shape,
    ``DataError`` when a file or tensor is missing or damaged.
    """
    _check_hugging_face_config(model.config, directory)
    files = _hugging_face_files(directory)
    by_file: dict[Path, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        theirs = hugging_face_name(name)
        if files and theirs not in files:
            raise DataError(f"--init-from: {directory} has no tensor {theirs}")
        by_file.setdefault(files.get(theirs, directory / "model.safetensors"), []).append((theirs, parameter))
    for path, tensors in by_file.items():
        try:
            with safe_open(path, framework="pt", device="cpu") as source:
                for theirs, tensor in tensors:
                    _copy_rows(source.get_slice(theirs), tensor, f"{path}: {theirs}")
        except FileNotFoundError:
            raise DataError(f"--init-from: {path} is missing; download the weights again") from None
        except SafetensorError as error:
            raise DataError(f"--init-from: {path} cannot be read: {error}; download the weights again") from None


def _copy_rows(source: Any, parameter: Tensor, where: str) -> None:
    shape = tuple(source.get_shape())
    if shape != tuple(parameter.shape):
        raise DataError(f"--init-from: {where} has shape {shape}, its config.json asks for {tuple(parameter.shape)}")
    local, first = local_rows(parameter)
    if local.shape[0]:
        local.copy_(source[first : first + local.shape[0]])


def _hugging_face_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index; empty where there is the one file only."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return {}
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: directory / Path(file).name for name, file in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DataError(f"--init-from: {index} is damaged; download the weights again") from None


def _check_hugging_face_config(config: ModelConfig, directory: Path) -> None:
    path = directory / "config.json"
    try:
        theirs = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"--init-from: {path} does not exist; name a directory with Hugging Face weights"
        ) from None
    except ValueError:
        raise DataError(f"--init-from: {path} is damaged; download the weights again") from None
    # Transformers 5 moved theta and scaling into one entry.
    rope = theirs.get("rope_parameters") or {}
    scaling = theirs.get("rope_scaling") or rope
    scaling_type = scaling.get("rope_type", scaling.get("type", "default"))
    heads = theirs.get("num_attention_heads")
    found = {
        "model_type": theirs.get("model_type"),
        "hidden_size": theirs.get("hidden_size"),
        "num_hidden_layers": theirs.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": theirs.get("num_key_value_heads", heads),
        "head_dim": theirs.get("head_dim") or config.head_dim,
        "intermediate_size": theirs.get("intermediate_size"),
        "vocab_size": theirs.get("vocab_size"),
        "rms_norm_eps": theirs.get("rms_norm_eps"),
        "rope_theta": float(theirs.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        "rope_scaling": None if scaling_type == "default" else _rope_scaling(scaling_type, scaling),
        "tie_word_embeddings": theirs.get("tie_word_embeddings", False),
        "attention_bias": theirs.get("attention_bias", False),
        "mlp_bias": theirs.get("mlp_bias", False),
    }
    for name, ours in _as_hugging_face(config).items():
        if found[name] != ours:
            raise ConfigurationError(
                f"--init-from: {path} has {name} {found[name]}, but --model and the tokenizer make it {ours}"
            )


def _rope_scaling(kind: str, values: dict[str, Any]) -> RopeScaling | str:
    try:
        if kind == "llama3":
            return RopeScaling(
                float(values["factor"]),
                float(values["low_freq_factor"]),
                float(values["high_freq_factor"]),
                int(values["original_max_position_embeddings"]),
            )
    except KeyError:
        pass
    return kind


def hugging_face_config(config: ModelConfig, positions: int) -> dict[str, Any]:
    """config.json of a LLaMA of this shape that was trained on sequences of ``positions`` tokens."""
    scaling = config.rope_scaling
    described = _as_hugging_face(config) | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "initializer_range": config.init_std,
        "rope_scaling": None,
    }
    if scaling is not None:
        described["max_position_embeddings"] = max(positions, int(scaling.factor * scaling.original_length))
        described["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    return described


def _as_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """``config`` in the words of a Hugging Face config.json."""
    return {
        "model_type": "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocabulary_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }
