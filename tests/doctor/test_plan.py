"""Plans against arithmetic done by hand, and the files that are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.doctor.models import DEEPSEEK_V3, LLAMA_3_8B, QWEN_2_5_72B

from dflash2 import cli
from dflash2.config import load_config
from dflash2.doctor.model_shape import read_kv_shape
from dflash2.doctor.parameters import count_parameters, weight_bytes
from dflash2.doctor.plan import ASSUMED_SPEEDS, PlanRequest, make_plan, speeds_of
from dflash2.doctor.plan_report import reasons
from dflash2.doctor.profile import DeviceProfile, write_profile
from dflash2.errors import CapacityError, ModelError, RequestError
from dflash2.types import MIB

GIB = 1 << 30


def request(config: dict[str, Any], **fields: Any) -> PlanRequest:
    parameters = count_parameters(config)
    values: dict[str, Any] = {
        "shape": read_kv_shape(config, fields.pop("kv_dtype", "auto")),
        "parameters": parameters,
        "weight_bytes": weight_bytes(config, parameters)[0],
        "device_bytes": 80 * GIB,
        "ranks": 1,
        "context_tokens": 8192,
        "concurrency": 64,
    }
    return PlanRequest(**(values | fields))


def test_llama_3_8b_on_one_device_by_hand() -> None:
    # Weights 2 * 8030261248 = 16060522496 bytes; allowance 5 % of 80 GiB = 4 GiB; together 20355489792, 19413 MiB.
    # Left 81920 - 19413 = 62507 MiB: 3906 blocks of 16 MiB, 64 of them for copies, a batch in each direction: 3842.
    # A sequence of 8192 tokens is 64 blocks, 1 GiB; 3842 // 64 = 60 run at once. 64 need 4096 blocks: 254 are missing,
    # and 33 more for exchanging a batch of 32: 287 blocks of 16 MiB = 4592 MiB of DRAM. (3842 + 287 - 32) // 64 = 64.
    plan = make_plan(request(LLAMA_3_8B))
    assert plan.reserve_bytes == 19413 * MIB
    assert plan.staging_bytes == 512 * MIB  # four batches would be 2048
    assert (plan.hbm_blocks, plan.sequence_blocks, plan.resident_sequences) == (3842, 64, 60)
    assert (plan.dram_bytes, plan.dram_blocks, plan.nvme_bytes) == (4592 * MIB, 287, 0)
    assert (plan.total_sequences, plan.fits) == (64, True)
    # 1 GiB at 20 GB/s: 53.7 ms. Recompute: 131945757409280 operations at 40 % of 312 TFLOPS: 1.057 s.
    assert plan.dram_seconds(64, inwards=True) == pytest.approx(0.0536870912)
    assert plan.recompute_seconds == pytest.approx(131_945_757_409_280 / 124.8e12)


def test_the_reference_machine_by_hand() -> None:
    # 72B in fp8 on 8 devices of 80 GiB, context 32768, the tiers of the reference configuration.
    # A rank's token: 40960 bytes; a block: 5242880 bytes = 5 MiB; a sequence: 256 blocks, 1280 MiB.
    # DRAM: 125 GiB / 8 = 16000 MiB, 3200 blocks; NVMe: 500 GiB / 8 = 64000 MiB, 12800 blocks.
    config = QWEN_2_5_72B | {"quantization_config": {"quant_method": "fp8"}}
    plan = make_plan(
        request(
            config,
            ranks=8,
            context_tokens=32768,
            concurrency=200,
            dram_bytes=128000 * MIB,
            nvme_bytes=512000 * MIB,
            activation_bytes=20480 * MIB - 9399 * MIB,
        )
    )
    # Layers 70.214623232 GB in 8 bits, embeddings 2 * 2491416576 numbers in bf16: 80.18 GB; a rank 9557 MiB.
    assert plan.request.weight_bytes == (72_706_203_648 - 2_491_416_576) + 2_491_416_576 * 2
    assert plan.block_bytes == 5 * MIB
    assert plan.staging_bytes == 512 * MIB  # 4 * 32 * 5 MiB = 640
    assert (plan.dram_blocks, plan.nvme_blocks, plan.sequence_blocks) == (3200, 12800, 256)
    assert plan.hbm_blocks == (81920 - plan.reserve_bytes // MIB) // 5 - 64
    assert plan.total_sequences == (plan.hbm_blocks + 16000 - 32) // 256
    assert not plan.fits
    # The disk is shared: 8 ranks * 1280 MiB at 3 GB/s.
    assert plan.nvme_seconds(256, inwards=True) == pytest.approx(8 * 1280 * MIB / 3e9)


def test_latent_attention_is_kept_whole_on_every_rank() -> None:
    plan = make_plan(request(DEEPSEEK_V3, ranks=8, device_bytes=140 * GIB, context_tokens=65536, concurrency=8))
    # 512 blocks of 8994816 bytes = 4605345792 bytes on each rank.
    assert plan.sequence_bytes == 512 * 8_994_816
    assert plan.fits


def test_what_is_given_is_kept_and_the_rest_proposed() -> None:
    # 128 sequences: 8192 blocks, 4350 missing, 33 for exchange: 4383. DRAM of 16 GiB holds 1024, NVMe the other 3359.
    plan = make_plan(request(LLAMA_3_8B, concurrency=128, dram_bytes=16 * GIB))
    assert (plan.dram_blocks, plan.nvme_blocks) == (1024, 3359)
    assert plan.nvme_bytes == 3359 * 16 * MIB
    assert plan.total_sequences == 128


def test_no_pressure_needs_no_tiers() -> None:
    plan = make_plan(request(LLAMA_3_8B, concurrency=60))
    assert (plan.dram_bytes, plan.nvme_bytes, plan.total_sequences) == (0, 0, 60)
    assert plan.config().memory.dram_capacity_mb is None


def test_a_small_device_swaps_in_smaller_batches() -> None:
    # 24 GiB: 24576 - (15317 + 2048 allowance, together 17365 MiB rounded up) leaves 7211 MiB: 450 blocks, batch 32;
    # with 20 GiB 3115 MiB: 194 blocks, batch 32; with 18 GiB 1067 MiB: 66 blocks, a quarter of them 16.
    plan = make_plan(request(LLAMA_3_8B, device_bytes=18 * GIB, context_tokens=1024, concurrency=1))
    assert plan.batch_blocks == 16
    assert plan.config().policy.swap_batch_size == 16


def test_a_sequence_that_never_fits_is_not_held_however_large_the_tiers() -> None:
    plan = make_plan(request(LLAMA_3_8B, device_bytes=18 * GIB, dram_bytes=1000 * GIB, concurrency=1))
    assert plan.hbm_blocks < plan.sequence_blocks
    assert (plan.total_sequences, plan.fits) == (0, False)


def test_weights_that_do_not_fit() -> None:
    # 145.4 GB of weights are 135.4 GiB; halved and with the allowance of 4 GiB 71.7 of 80 GiB.
    with pytest.raises(CapacityError, match="at least 2 such devices"):
        make_plan(request(QWEN_2_5_72B))
    with pytest.raises(CapacityError, match="at least 8 such devices"):
        make_plan(request(QWEN_2_5_72B, device_bytes=30 * GIB, ranks=2))


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"context_tokens": 8193}, RequestError, "more than the 8192"),
        ({"concurrency": 0}, RequestError, "concurrency"),
        ({"ranks": 3}, ModelError, "cannot be divided"),
    ],
)
def test_what_makes_no_sense(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_plan(request(LLAMA_3_8B, **fields))


def test_memory_bandwidth_is_shared_by_the_ranks() -> None:
    slow = replace(ASSUMED_SPEEDS, memcpy=10e9)
    plan = make_plan(request(LLAMA_3_8B, ranks=4, speeds=slow))
    # 16 blocks of 4 MiB on each of 4 ranks: 256 MiB through 10 GB/s, not 64 MiB through 20 GB/s.
    assert plan.dram_seconds(16, inwards=False) == pytest.approx(256 * MIB / 10e9)


def test_measured_prefill_replaces_the_assumption() -> None:
    assert make_plan(request(LLAMA_3_8B, prefill_tokens_per_s=4096.0)).recompute_seconds == 2.0


def test_speeds_of_a_profile_without_a_disk() -> None:
    speeds = speeds_of(DeviceProfile("H200", 2 * MIB, 9e10, 5e10, 6e10), "p.json")
    assert (speeds.hbm_to_dram, speeds.dram_to_hbm, speeds.memcpy) == (5e10, 6e10, 9e10)
    assert speeds.nvme_read == ASSUMED_SPEEDS.nvme_read
    assert speeds.source == "measured on H200 (p.json); NVMe was not measured and is assumed"


def test_every_key_of_the_file_has_a_reason() -> None:
    plan = make_plan(request(LLAMA_3_8B))
    values = plan.config().model_dump(exclude_none=True, exclude_unset=True)
    keys = {f"{section}.{key}" for section, inner in values.items() if isinstance(inner, dict) for key in inner}
    assert {key for key, _ in reasons(plan, "x")} == keys


def model_folder(root: Path, config: dict[str, Any] | None = None) -> Path:
    folder = root / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or LLAMA_3_8B), encoding="utf-8")
    return folder


ARGUMENTS = ["--gpu-memory-gb", "80", "--context", "8192", "--concurrency", "64"]


def plan_json(capsys: pytest.CaptureFixture[str], model: str, *more: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["plan", model, *ARGUMENTS, "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_writes_a_valid_file_with_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    assert cli.main(["plan", str(model_folder(tmp_path)), *ARGUMENTS, "--output", str(file)]) == 0
    config = load_config(file)
    assert config.enable
    assert (config.memory.hbm_reserve_mb, config.memory.dram_capacity_mb) == (19413, 4592)
    text = (tmp_path / "c.json.reasons.md").read_text(encoding="utf-8")
    assert "`memory.hbm_reserve_mb` = 19413: 15316 MiB of weights (8.03 billion parameters in bfloat16)" in text
    output = capsys.readouterr().out
    assert "resident in HBM at the same time: 60 of 64 sequences" in output
    assert "assumed: PCIe 4.0" in output
    assert "assumed: 40% of 312 TFLOPS" in output
    assert cli.main(["plan", str(model_folder(tmp_path)), *ARGUMENTS, "--output", str(file)]) == 1
    assert "--force" in capsys.readouterr().err


def test_a_load_that_is_not_held_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = plan_json(capsys, str(model_folder(tmp_path)), "--dram-gb", "0", "--nvme-gb", "0")
    assert (code, document["fits"], document["total_sequences"]) == (1, False, 60)


def test_speeds_from_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    write_profile(DeviceProfile("H200", 2 * MIB, 9e10, 5e10, 6e10, 1e9, 2e9, "/x", "direct"), file)
    _, document = plan_json(capsys, str(model_folder(tmp_path)), "--profile", str(file))
    assert document["swap_in_dram_s"] == pytest.approx(GIB / 6e10)
    assert document["store_nvme_s"] == pytest.approx(GIB / 1e9)
    assert document["speeds_source"].startswith("measured on H200")


def test_weights_are_weighed_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path)
    (folder / "a.safetensors").write_bytes(b"x" * 1000)
    (folder / "b.safetensors").write_bytes(b"x" * 24)
    assert plan_json(capsys, str(folder))[1]["weight_bytes"] == 1024
    index = folder / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 5000000}}', encoding="utf-8")
    assert plan_json(capsys, str(folder / "config.json"))[1]["weight_bytes"] == 5_000_000
    assert plan_json(capsys, str(folder), "--weights-gb", "2")[1]["weight_bytes"] == 2 * GIB


def test_a_model_of_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--name"
    for revision, layers in (("aaa", 32), ("bbb", 16)):
        folder = model_folder(model / "snapshots" / revision, LLAMA_3_8B | {"num_hidden_layers": layers})
        (folder / "config.json").rename(folder.parent / "config.json")
    (model / "refs").mkdir()
    (model / "refs/main").write_text("aaa\n", encoding="utf-8")
    assert plan_json(capsys, "org/name")[1]["bytes_per_token"] == 131_072
    assert cli.main(["plan", "org/other", *ARGUMENTS]) == 1
    assert "local Hugging Face cache" in capsys.readouterr().err
