"""Changes to SGLang 0.5.23 on a CPU that the comparison of caches needs; made by the benchmark only, as a plug-in.

In every setting alike:
- attention computes the new rows only. The stock CPU backend pads the queries to the whole sequence, so that a turn
  with a cached prefix costs as much attention as one without.

For HiCache, which has no CPU build of its copies (without these it does not start):
- its host pool is plain memory;
- device <-> host copies are torch index copies of whole pages, all pages of a layer at once;
- the page buffer of its file storage is not page-locked.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

COUNTER = "DFLASH2_BENCH_HOST_BYTES"
"""Environment variable: a file of one int64, the bytes that HiCache has written to its host pool."""


def register() -> None:
    """Called by SGLang in each of its processes; the changes are for the scheduler's."""
    if multiprocessing.parent_process() is None or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend._run_sdpa_forward_extend = attend_new_rows
    if COUNTER in os.environ:
        _let_hicache_run()


def attend_new_rows(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Causal attention of each sequence's new tokens over all of its tokens."""
    start = 0
    for index in range(len(seq_lens)):
        num_new, num_before = int(extend_seq_lens[index]), int(extend_prefix_lens[index])
        total = num_before + num_new
        tokens = req_to_token[req_pool_indices[index], :total]
        rows = query[start : start + num_new].movedim(0, 1).unsqueeze(0)
        keys = k_cache[tokens].movedim(0, 1).unsqueeze(0).to(rows.dtype)
        values = v_cache[tokens].movedim(0, 1).unsqueeze(0).to(rows.dtype)
        mask = torch.arange(total) <= torch.arange(num_before, total).unsqueeze(1) if num_before else None
        found = scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=enable_gqa, scale=scaling
        )
        output[start : start + num_new] = found.squeeze(0).movedim(1, 0)
        start += num_new
    return output


def _let_hicache_run() -> None:
    from sglang.srt.mem_cache.pool_host import common, mha

    counter = np.memmap(Path(os.environ[COUNTER]), np.int64, "r+", shape=(1,))

    def plain_memory(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: Any) -> torch.Tensor:
        return torch.zeros(dims, dtype=dtype, device=device)

    def plain_memory_by_position(dims: Any, dtype: Any, device: Any, *_: Any, **__: Any) -> torch.Tensor:
        return plain_memory(dims, dtype, device)

    def copy_pages(
        src_layers: Sequence[torch.Tensor],
        dst_layers: Sequence[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        src_pages, dst_pages = src_indices[::page_size] // page_size, dst_indices[::page_size] // page_size
        for src, dst in zip(src_layers, dst_layers, strict=True):
            _paged(dst, page_size)[dst_pages] = _paged(src, page_size)[src_pages]
        if len(src_layers) > 2:  # all layers at once is towards the host, one layer is towards the device
            counter[0] += len(src_pages) * page_size * sum(src[0].nbytes for src in src_layers)

    def page_buffer(self: Any) -> torch.Tensor:
        shape = (2, self.layer_num, self.page_size, self.head_num, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype).flatten()

    def counted(self: Any, index: int, data_page: torch.Tensor) -> None:
        counter[0] += data_page.nbytes
        from_storage(self, index, data_page)

    from_storage = mha.MHATokenToKVPoolHost.set_from_flat_data_page
    common.ALLOC_MEMORY_FUNCS["cpu"] = plain_memory_by_position
    mha.transfer_kv_direct = copy_pages
    mha.MHATokenToKVPoolHost.get_dummy_flat_data_page = page_buffer
    mha.MHATokenToKVPoolHost.set_from_flat_data_page = counted


def _paged(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    num_pages = layer.shape[0] // page_size
    return layer[: num_pages * page_size].view(num_pages, -1)
