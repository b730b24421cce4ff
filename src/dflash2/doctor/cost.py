"""What a swap will cost on a machine that was measured, in words (R-6.6)."""

from __future__ import annotations

from dflash2.doctor.profile import DeviceProfile


def swap_cost_lines(
    profile: DeviceProfile, block_size: int, sequence_tokens: int, block_is_the_models: bool
) -> list[str]:
    """Bandwidths, then the cost of a block and of a sequence.

    Args:
        profile: what was measured.
        block_size: tokens of a block.
        sequence_tokens: length of the sequence whose swap is computed.
        block_is_the_models: ``profile.block_bytes`` is that of the model, not an example.
    """
    num_blocks = -(-sequence_tokens // block_size)
    block = profile.block_bytes
    kind = "of the model" if block_is_the_models else "as an example; --model takes a model's own"
    fast = "HBM" if profile.device != "cpu" else "the CPU's fast pool"
    lines = [
        f"memcpy {_rate(profile.memcpy)}",
        f"{fast} to DRAM {_rate(profile.hbm_to_dram)}, back {_rate(profile.dram_to_hbm)} ({profile.device})",
    ]
    costs = [("DRAM to HBM", block / profile.dram_to_hbm), ("HBM to DRAM", block / profile.hbm_to_dram)]
    if profile.nvme_read is not None and profile.nvme_write is not None:
        lines.append(
            f"NVMe write {_rate(profile.nvme_write)}, read {_rate(profile.nvme_read)} "
            f"({profile.io_mode} I/O in {profile.nvme_path})"
        )
        costs += [("NVMe to DRAM", block / profile.nvme_read), ("DRAM to NVMe", block / profile.nvme_write)]
    lines.append(f"a swap of one block ({block / 2**20:.2f} MiB, {kind}) and of a sequence of {sequence_tokens} tokens")
    lines.append(f"({num_blocks} blocks of {block_size} tokens) costs:")
    lines += [f"  {name}: {seconds * 1e3:.2f} ms a block, {_time(seconds * num_blocks)} a sequence"
              for name, seconds in costs]  # fmt: skip
    return lines


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
