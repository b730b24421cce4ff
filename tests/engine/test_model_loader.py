"""Models from directories and GGUF files, what is refused and why, and the identity of weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.gguf_writer import write_gguf
from tests.engine.paged_case import MODEL_TYPES, VOCAB, plain_logits, prompt, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from dflash2.engine.fingerprint import model_fingerprint
from dflash2.engine.model_loader import load_model, load_tokenizer
from dflash2.engine.model_support import check_supported
from dflash2.errors import ModelError
from dflash2.types import KVLayout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


def test_a_directory_is_loaded_as_it_is(saved: Path) -> None:
    loaded = load_model(saved)
    assert torch.equal(plain_logits(loaded.model, prompt(9, 0)), plain_logits(tiny_model(), prompt(9, 0)))
    assert loaded.kv_layout(16) == KVLayout(2, 2, 8, 16, "float32")
    assert (loaded.max_context, loaded.vocab_size, loaded.source) == (256, VOCAB, str(saved))
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_dtype_is_that_of_weights_and_kv(saved: Path) -> None:
    loaded = load_model(saved, dtype="bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.kv_layout(16).dtype == "bfloat16"


@pytest.mark.parametrize("eos", [None, 3, [3, 4]])
def test_end_tokens_come_from_the_generation_config(tmp_path: Path, eos: Any) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = eos
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).eos_token_ids == {None: (), 3: (3,)}.get(eos if eos != [3, 4] else 0, (3, 4))


@pytest.mark.parametrize("what", ["missing", "missing.gguf"])
def test_a_path_that_does_not_exist_is_a_model_error(tmp_path: Path, what: str) -> None:
    with pytest.raises(ModelError, match="missing"):
        load_model(tmp_path / what)
    with pytest.raises(ModelError, match="missing"):
        load_tokenizer(tmp_path / what)


def test_missing_weights_are_an_error_not_random_numbers(tmp_path: Path) -> None:
    model = tiny_model()
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        load_model(tmp_path)


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="no CUDA device"):
        load_model("/nothing/there", device="cuda:0")


def test_another_dtype_is_refused(saved: Path) -> None:
    with pytest.raises(ModelError, match="int8"):
        load_model(saved, dtype="int8")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tested_types_are_supported(model_type: str) -> None:
    check_supported(tiny_config(model_type))


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("llava", {}, "vision_config"),
        ("deepseek_v3", {}, "latent attention"),
        ("mistral", {"sliding_window": 128, "max_position_embeddings": 256}, "slid"),
        ("gemma2", {}, "sliding_attention|soft-capped"),
        ("gpt_oss", {}, "sliding_attention|sinks"),
        ("qwen3_next", {}, "linear_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ("gpt2", {}, "not been tested"),
    ],
)
def test_other_models_are_refused_with_the_reason(model_type: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_supported(AutoConfig.for_model(model_type, **changes))


def test_a_window_that_covers_every_position_is_no_obstacle() -> None:
    check_supported(AutoConfig.for_model("mistral", sliding_window=256, max_position_embeddings=256))


def test_an_unsupported_directory_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="gpt2"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_a_gguf_file_gives_the_same_model(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    model = tiny_model(model_type, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, **changes)
    write_gguf(tmp_path / "m.gguf", model)
    loaded = load_model(tmp_path / "m.gguf")
    assert torch.equal(plain_logits(loaded.model, prompt(12, 0)), plain_logits(model, prompt(12, 0)))
    assert getattr(loaded.config, "quantization_config", None) is None
    assert loaded.eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("extra", "tensors", "reason"),
    [
        ({"expert_count": 4}, {}, "expert_count"),
        ({"rope.scaling.type": "yarn"}, {}, "yarn"),
        ({"rope.dimension_count": 4}, {}, "dimension_count"),
        ({"attention.sliding_window": 64}, {}, "sliding_window"),
        ({}, {"rope_freqs.weight": np.ones(4, np.float32)}, "rope_freqs"),
        ({}, {"blk.2.attn_norm.weight": np.ones(32, np.float32)}, "layers.2"),
    ],
)
def test_gguf_content_that_would_be_passed_over_is_refused(
    tmp_path: Path, extra: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model(), extra, tensors)
    with pytest.raises(ModelError, match=reason):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("size", [0, 2, 40, 300, -40])
def test_a_damaged_gguf_file_is_a_model_error(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match="gguf"):
        load_model(path)


def test_a_file_of_another_kind_is_not_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK" * 50)
    with pytest.raises(ModelError, match="not a GGUF"):
        load_model(tmp_path / "m.gguf")


def test_a_gguf_without_needed_metadata_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model())
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"other.block_count"))
    with pytest.raises(ModelError, match="block_count"):
        load_model(path)


def test_fingerprint_sees_every_kind_of_change() -> None:
    base = model_fingerprint(tiny_model())
    assert model_fingerprint(tiny_model()) == base
    assert model_fingerprint(tiny_model(seed=1)) != base
    assert model_fingerprint(tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})) != base
    assert model_fingerprint(tiny_model().to(torch.bfloat16)) != base
    nudged = tiny_model()
    with torch.no_grad():
        nudged.model.layers[1].mlp.up_proj.weight[3, 3] += 1.0
    assert model_fingerprint(nudged) != base


def test_fingerprint_of_a_large_tensor_samples_both_ends() -> None:
    prints = set()
    for row in (None, 0, -1):
        model = tiny_model(vocab_size=40_000)
        if row is not None:
            with torch.no_grad():
                model.model.embed_tokens.weight[row] += 1.0
        prints.add(model_fingerprint(model))
    assert len(prints) == 3


def test_fingerprint_is_the_same_in_another_process(saved: Path) -> None:
    code = "import sys; from dflash2.engine.model_loader import load_model; print(load_model(sys.argv[1]).fingerprint)"
    run = subprocess.run(
        [sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.split()[-1] == load_model(saved).fingerprint


@pytest.mark.e2e
def test_the_real_gguf_equals_what_transformers_reads(model_path: Path) -> None:
    ours = load_model(model_path, pack=False).model.state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(
        str(model_path.parent), gguf_file=model_path.name, dtype=torch.float32
    ).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
