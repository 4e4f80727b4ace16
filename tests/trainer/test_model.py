"""The model: its shapes, its numbers against Hugging Face's implementation, its initial values, published weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.errors import ConfigurationError, DataError, ExitCode
from trainer.model import (
    PRESETS,
    ModelConfig,
    RopeScaling,
    build,
    flops_per_token,
    init_weights,
    model_config,
    parameter_count,
    rope_frequencies,
    token_loss,
)
from trainer.pretrained import load_hugging_face

# The scaling's three regions (kept, blended, stretched) all lie within the positions that the tests reach.
SCALING = RopeScaling(factor=8.0, original_length=64)
SHAPE = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=96, vocabulary_size=256, rope_theta=10_000.0)
CASES = {
    "plain": SHAPE,
    "scaled": ModelConfig(**(vars(SHAPE) | {"rope_scaling": SCALING})),
    "tied": ModelConfig(**(vars(SHAPE) | {"tie_embeddings": True})),
    "scaled-tied-multihead": ModelConfig(
        **(vars(SHAPE) | {"rope_scaling": SCALING, "tie_embeddings": True, "kv_heads": 4})
    ),
}


def hugging_face(config: ModelConfig) -> Any:
    """transformers' LLaMA of the same shape, with random weights large enough for attention to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_frequency_factor,
            "high_freq_factor": config.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": config.rope_scaling.original_length,
        }
    theirs = LlamaConfig(
        hidden_size=config.dim,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.ffn_dim,
        vocab_size=config.vocabulary_size,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=512,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(theirs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["one-file", "sharded"])
def test_logits_and_gradients_equal_hugging_faces(case: str, layout: str, tmp_path: Path) -> None:
    config = CASES[case]
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB" if layout == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (layout == "sharded")
    ours = build(config, "cpu")
    load_hugging_face(ours, tmp_path)
    tokens_BL = torch.randint(0, config.vocabulary_size, (2, 300), generator=torch.Generator().manual_seed(1))

    logits_BLV, expected_BLV = ours(tokens_BL), theirs(tokens_BL).logits
    torch.testing.assert_close(logits_BLV, expected_BLV, atol=2e-4, rtol=1e-4)

    token_loss(logits_BLV[:, :-1], tokens_BL[:, 1:]).backward()
    theirs(tokens_BL, labels=tokens_BL).loss.backward()
    torch.testing.assert_close(ours.embedding.weight.grad, theirs.model.embed_tokens.weight.grad, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(
        ours.blocks[0].attention.key.weight.grad,
        theirs.model.layers[0].self_attn.k_proj.weight.grad,
        atol=1e-5,
        rtol=1e-3,
    )


def test_the_comparison_would_notice_a_missing_scaling(tmp_path: Path) -> None:
    hugging_face(CASES["scaled"]).save_pretrained(tmp_path)
    tokens_BL = torch.arange(200)[None]
    scaled, plain = build(CASES["scaled"], "cpu"), build(CASES["plain"], "cpu")
    load_hugging_face(scaled, tmp_path)
    plain.load_state_dict(scaled.state_dict())
    assert (scaled(tokens_BL) - plain(tokens_BL)).abs().max() > 0.1


def test_rope_scaling_keeps_short_and_stretches_long_wavelengths() -> None:
    config = ModelConfig(**(vars(PRESETS["llama-3.1-8b"])))
    plain = rope_frequencies(ModelConfig(**(vars(config) | {"rope_scaling": None})))
    ratio = plain / rope_frequencies(config)
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)
    assert (ratio.diff() >= -1e-5).all()  # and blends from the one to the other
    assert ((ratio > 1.001) & (ratio < 7.999)).any()


@pytest.mark.parametrize(
    ("name", "vocabulary", "parameters"),
    [("llama-3.1-8b", 128_256, 8_030_261_248), ("1b", 128_256, 1_235_814_400)],  # as published by Meta
)
def test_published_shapes_have_their_published_size(name: str, vocabulary: int, parameters: int) -> None:
    assert parameter_count(model_config(name, vocabulary)) == parameters


def test_presets_make_room_for_the_tokenizer() -> None:
    assert model_config("tiny", 256).vocabulary_size == 256
    assert model_config("tiny", 1000).vocabulary_size == 1000
    assert model_config("llama-3.1-8b", 256).vocabulary_size == 128_256
    assert parameter_count(model_config("tiny", 256)) < 600_000


def test_an_unknown_preset_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigurationError, match=r"no preset '7b'; use one of tiny, 160m, 1b, llama-3.1-8b"):
        model_config("7b", 256)


def test_flops_count_what_a_token_is_multiplied_with() -> None:
    config = PRESETS["tiny"]
    matrices = parameter_count(config) - config.vocabulary_size * config.dim
    assert flops_per_token(config, 0) == 6 * matrices
    # Attention: two products, forward and twice backward, of 2 operations, over half of the positions.
    assert flops_per_token(config, 128) - flops_per_token(config, 0) == 3 * 2 * 2 * config.layers * config.dim * 128 / 2
    tied = ModelConfig(**(vars(config) | {"tie_embeddings": True}))
    assert flops_per_token(tied, 128) == flops_per_token(config, 128)  # the matrix is multiplied with all the same


def test_initial_values_follow_from_seed_and_name() -> None:
    first, again, other = (build(PRESETS["tiny"], "cpu") for _ in range(3))
    torch.manual_seed(1)
    init_weights(first, 3)
    torch.manual_seed(2)  # the global generator has no say
    init_weights(again, 3)
    init_weights(other, 4)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.ndim == 1 or not torch.equal(a, c), name
    blocks = first.blocks
    assert not torch.equal(blocks[0].attention.query.weight, blocks[1].attention.query.weight)
    assert not torch.equal(blocks[0].ffn.gate.weight, blocks[0].ffn.up.weight)
    assert blocks[0].ffn.gate.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert blocks[0].ffn.down.weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)  # over sqrt(2 x 2 layers)
    assert torch.equal(first.norm.weight, torch.ones(128))


def test_a_matrix_of_several_blocks_is_filled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.model.DRAW_ELEMENTS", 1000)  # blocks of 7 rows, the last one not whole
    model = build(PRESETS["tiny"], "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    init_weights(model, 0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    rows = model.embedding.weight
    assert len(torch.unique(rows[:, 0])) == rows.shape[0]  # no block repeats another


def test_a_meta_build_allocates_nothing_and_survives_materialisation() -> None:
    big = build(PRESETS["llama-3.1-8b"], "meta")
    assert all(parameter.is_meta for parameter in big.parameters())
    assert not list(big.buffers())
    model, direct = build(PRESETS["tiny"], "meta").to_empty(device="cpu"), build(PRESETS["tiny"], "cpu")
    init_weights(model, 0)
    init_weights(direct, 0)
    tokens_BL = torch.arange(64)[None]
    assert torch.equal(model(tokens_BL), direct(tokens_BL))


def test_a_longer_sequence_than_before_is_the_same_model() -> None:
    model = build(PRESETS["tiny"], "cpu")
    init_weights(model, 0)
    tokens_BL = torch.arange(96)[None] % 256
    short_BLV = model(tokens_BL[:, :32])
    torch.testing.assert_close(model(tokens_BL)[:, :32], short_BLV, atol=1e-5, rtol=1e-5)  # and it is causal


# -- published weights that do not fit, or are damaged -------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    hugging_face(SHAPE).save_pretrained(tmp_path, max_shard_size="60KB")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "hidden_size 128, but --model and the tokenizer make it 64"),
        ({"vocab_size": 512}, "vocab_size 512"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ({"model_type": "mistral"}, "model_type mistral"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0}}, "rope_scaling yarn"),
        ({"rope_parameters": None, "rope_theta": 500_000.0}, "rope_theta 500000.0"),
        ({"attention_bias": True}, "attention_bias True"),
    ],
)
def test_weights_of_another_shape_are_refused(weights: Path, change: dict[str, Any], message: str) -> None:
    path = weights / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigurationError, match=message) as refusal:
        load_hugging_face(build(SHAPE, "cpu"), weights)
    assert "\n" not in str(refusal.value)


def test_the_older_way_to_write_scaling_is_understood(tmp_path: Path) -> None:
    hugging_face(CASES["scaled"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    rope = content.pop("rope_parameters")
    content["rope_theta"] = rope.pop("rope_theta")
    content["rope_scaling"] = rope
    path.write_text(json.dumps(content))
    load_hugging_face(build(CASES["scaled"], "cpu"), tmp_path)


def test_no_directory_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="name a directory with Hugging Face weights") as refusal:
        load_hugging_face(build(SHAPE, "cpu"), tmp_path / "absent")
    assert refusal.value.exit_code == ExitCode.CONFIGURATION


def test_damaged_weights_are_data_errors(weights: Path) -> None:
    def refused() -> str:
        with pytest.raises(DataError) as refusal:
            load_hugging_face(build(SHAPE, "cpu"), weights)
        assert refusal.value.exit_code == ExitCode.DATA and "\n" not in str(refusal.value)
        return str(refusal.value)

    part = sorted(weights.glob("model-*.safetensors"))[0]
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    assert part.name in refused()
    part.unlink()
    assert "is missing" in refused()
    part.write_bytes(whole)

    index = weights / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    removed = content["weight_map"].pop("lm_head.weight")
    index.write_text(json.dumps(content))
    assert "has no tensor lm_head.weight" in refused()
    content["weight_map"]["lm_head.weight"] = next(f for f in content["weight_map"].values() if f != removed)
    index.write_text(json.dumps(content))
    assert "lm_head.weight" in refused()
    index.write_text("{")
    assert "damaged" in refused()
