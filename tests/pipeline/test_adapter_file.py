"""What is accepted as an adapter, and what is said of the rest. Files are made here, without peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash2.errors import ModelError, RequestError
from dflash2.pipeline.adapter_file import read_spec, read_weights
from dflash2.pipeline.adapter_registry import AdapterRegistry

TARGETS = {"model.layers.0.self_attn.q_proj": (6, 8), "model.layers.0.mlp.up_proj": (6, 10)}
MODULE = "model.layers.0.self_attn.q_proj"
PREFIX = f"base_model.model.{MODULE}"
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "bias": "none"}
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def write(folder: Path, tensors: dict[str, Any] | None = None, dtype: str = "F32", **settings: Any) -> Path:
    """An adapter of rank 2 for one layer, unless said otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    if tensors is None:
        tensors = {f"{PREFIX}.lora_A.weight": np.ones((2, 6)), f"{PREFIX}.lora_B.weight": np.full((8, 2), 2.0)}
    header, body = {}, b""
    for name, array in tensors.items():
        data = np.asarray(array).astype(DTYPES[dtype]).tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(np.shape(array)), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    return folder


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    for dtype in DTYPES:
        spec = read_spec("a", write(tmp_path / dtype, dtype=dtype), TARGETS, 4)
        weights = read_weights(spec)[MODULE]
        assert weights.a.shape == (2, 6) and weights.b.shape == (8, 2) and weights.scale == 2.0
        assert weights.a.dtype == DTYPES[dtype] and np.all(weights.b == 2)
        assert spec.rank == 2 and spec.num_bytes == weights.a.nbytes + weights.b.nbytes


def test_a_file_that_changed_since_it_was_checked_is_not_used(tmp_path: Path) -> None:
    spec = read_spec("a", write(tmp_path / "a"), TARGETS, 4)
    file = tmp_path / "a" / "adapter_model.safetensors"
    whole = file.read_bytes()
    assert spec.file_bytes == len(whole)
    for other in (whole[:-1], whole + b"x", whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        file.write_bytes(other)
        with pytest.raises(ModelError, match="changed since it was loaded"):
            read_weights(spec)
    file.write_bytes(whole)
    assert np.all(read_weights(spec)[MODULE].b == 2)


def test_the_digest_is_of_weights_and_of_what_scales_them(tmp_path: Path) -> None:
    def digest(name: str, **options: Any) -> str:
        return read_spec(name, write(tmp_path / name, **options), TARGETS, 4).digest

    same = [digest("one"), digest("two"), digest("three", inference_mode=True)]
    other = {f"{PREFIX}.lora_A.weight": np.zeros((2, 6)), f"{PREFIX}.lora_B.weight": np.ones((8, 2))}
    different = [
        digest("alpha", lora_alpha=5),
        digest("rs", use_rslora=True),
        digest("pattern", alpha_pattern={"q_proj": 9}),
        digest("weights", tensors=other),
    ]
    assert len(set(same)) == 1 and len({*same, *different}) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "'IA3' is not supported"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "r must be a positive number"),
        ({"r": True}, "r must be a positive number"),
        ({"lora_alpha": "x"}, "lora_alpha must be"),
        ({"r": 3}, "has rank 2, and the adapter's configuration says 3"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    ],
)
def test_settings_that_are_not_computed_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_spec("a", write(tmp_path, **settings), TARGETS, 4)


A, B = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no weights"),
        ({A: np.ones((2, 6))}, "only one of"),
        ({A: np.ones((2, 7)), B: np.ones((8, 2))}, "belongs to another model"),
        ({A: np.ones((2, 6)), B: np.ones((8, 3))}, "belongs to another model"),
        ({"base_model.model.lm_head.lora_A.weight": np.ones((2, 6))}, "no layer lm_head"),
        ({f"{PREFIX}.lora_embedding_A": np.ones((2, 6))}, "no LoRA matrix"),
        ({A: np.ones(12), B: np.ones((8, 2))}, "not described as a matrix"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_spec("a", write(tmp_path, tensors), TARGETS, 4)


def test_a_rank_beyond_the_servers_and_a_file_beyond_any_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rank 2; this server takes up to 1"):
        read_spec("a", write(tmp_path), TARGETS, 1)
    with (tmp_path / "adapter_model.safetensors").open("ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelError, match=r"has 1073741824 bytes"):
        read_spec("a", tmp_path, TARGETS, 4)


@pytest.mark.parametrize("cut", [0, 7, 20, -1])
def test_damaged_files_are_refused(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match=r"safetensors file|damaged"):
        read_spec("a", tmp_path, TARGETS, 4)


def test_a_header_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "adapter_model.safetensors"
    for start, end in ((-48, 0), (0, 1 << 40), (48, 0)):
        header = json.dumps({A: {"dtype": "F32", "shape": [2, 6], "data_offsets": [start, end]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(96))
        with pytest.raises(ModelError, match="damaged"):
            read_spec("a", tmp_path, TARGETS, 4)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read_spec("a", tmp_path / "nothing", TARGETS, 4)
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        read_spec("a", tmp_path, TARGETS, 4)


# -- names and places ------------------------------------------------------------------------------------------------


def test_names_are_used_once(tmp_path: Path) -> None:
    registry = AdapterRegistry(TARGETS, 4, tmp_path)
    registry.reserve(("base", "alias"))
    write(tmp_path / "one")
    registry.add_from_client("a", "one")
    for name in ("a", "base", "alias"):
        with pytest.raises(RequestError, match="in use"):
            registry.add_from_client(name, "one")
    registry.remove("a")
    with pytest.raises(RequestError, match="no adapter 'a'"):
        registry.remove("a")
    registry.add_from_client("a", str(tmp_path / "one"))
    with pytest.raises(RequestError, match="name of the model"):
        registry.reserve(("a",))


@pytest.mark.parametrize("name", ["", "../x", "a b", "-a", "a\n", "x" * 200, "a/../b"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    write(tmp_path / "one")
    with pytest.raises(RequestError, match="lora_name"):
        AdapterRegistry(TARGETS, 4, tmp_path).add_from_client(name, "one")


def test_clients_load_from_the_folder_only(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    write(tmp_path / "outside")
    write(inside / "one")
    (inside / "link").symlink_to(tmp_path / "outside")
    registry = AdapterRegistry(TARGETS, 4, inside)
    for path in ("../outside", str(tmp_path / "outside"), "link", ".", "one/../../outside", "/etc", "a\0b"):
        with pytest.raises(RequestError, match="lora_path"):
            registry.add_from_client("a", path)
    assert registry.all() == []
    with pytest.raises(RequestError, match="--lora-dir"):
        AdapterRegistry(TARGETS, 4).add_from_client("a", str(inside / "one"))
