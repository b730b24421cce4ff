"""Does an adapter that takes long to load hold up requests for the base model?

    python benchmarks/adapter_load.py --model MODEL.gguf [--load-ms 300] [--rank 16] [--loads 40] [--json FILE]

The real engine and its real loader, with room for two adapters on the device and none in DRAM, so that each request for
one of four adapters has to read it from disk; the loader then waits until ``--load-ms`` are over. Two requests for the
base model produce tokens all the time. Ten undisturbed steps precede each load. A load's delay is the time
that base requests lost to it: the time of its steps, less that of as many steps at the median of those before and
after. The same is said of undisturbed steps, which is the noise. The step that computes the adapter's own token is not
part of it; what it takes is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from dflash2.config import Config
from dflash2.engine.base import GenerationRequest
from dflash2.engine.engine import ReferenceEngine
from dflash2.engine.factory import assemble_engine
from dflash2.engine.lora_layers import adaptable_layers
from dflash2.engine.model_loader import LoadedModel, load_model
from dflash2.engine.sampling import SamplingParams
from dflash2.pipeline import adapter_loader
from dflash2.pipeline.adapter_file import AdapterSpec, AdapterWeights, read_weights

NUM_ADAPTERS = 4
BASE_REQUESTS = 2
CONTEXT = 2048
WARM_UP = 10
"""Steps."""
STEPS_BEFORE = 10
"""Undisturbed, before each load."""
ALLOWED_MS = 10.0


@dataclass(frozen=True)
class Load:
    """One load and the steps around it, seconds each."""

    before: list[float]
    during: list[float]
    own_step: float
    """The step that computed the adapter's token."""


def make_adapter(loaded: LoadedModel, folder: Path, rank: int, seed: int) -> str:
    """Random weights for every layer, as peft would write them."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    names = {name.rsplit(".", 1)[-1] for name in adaptable_layers(loaded.model)}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": sorted(names)}))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in adaptable_layers(loaded.model).items():
        shapes = {"A": (rank, module.in_features), "B": (module.out_features, rank)}
        for side, shape in shapes.items():
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = 0.01 * torch.randn(shape, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


class Bench:
    """An engine in which base requests run all the time."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine
        self._num_requests = 0
        self._rng = np.random.default_rng(0)
        for _ in range(BASE_REQUESTS):
            self._ask(None, CONTEXT - 100)
        for _ in range(WARM_UP):
            self._engine.step()

    def load(self, adapter: str) -> Load:
        """Steps without a load, then those during one."""
        before = [self._timed_step()[0] for _ in range(STEPS_BEFORE)]
        during: list[float] = []
        name = self._ask(adapter, 1)
        while True:
            seconds, ended = self._timed_step()
            if name in ended:
                return Load(before, during, seconds)
            during.append(seconds)

    def _timed_step(self) -> tuple[float, set[str]]:
        """What it took, and the requests that ended in it."""
        began = time.perf_counter()
        outputs = self._engine.step()
        taken = time.perf_counter() - began
        failed = [output.error for output in outputs if output.error is not None]
        if failed:
            raise failed[0]
        ended = {output.request_id for output in outputs if output.ends_request}
        if any(name.startswith("base-") for name in ended):
            raise SystemExit("the base requests came to their end; ask for fewer loads")
        return taken, ended

    def _ask(self, adapter: str | None, max_tokens: int) -> str:
        name = f"base-{self._num_requests}" if adapter is None else f"adapter-{self._num_requests}"
        self._num_requests += 1
        prompt = self._rng.integers(100, 10_000, 1 if adapter else 30).astype(np.int32)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add(GenerationRequest(name, prompt, sampling, self._engine.runtime.clock(), adapter=adapter))
        return name


def delays_ms(loads: Sequence[Load]) -> tuple[list[float], list[float]]:
    """What each load cost a base request, and the same of steps before it."""
    lost, noise = [], []
    for one, after in pairwise(loads):
        usual = statistics.median((*one.before, *after.before))
        lost.append(1e3 * (sum(one.during) - len(one.during) * usual))
        half = one.before[: len(one.during)]
        noise.append(1e3 * (sum(half) - len(half) * usual))
    return lost, noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-ms", type=float, default=300.0, help="what a load takes at least")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--loads", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def read_slowly(spec: AdapterSpec) -> AdapterWeights:
        end = time.monotonic() + args.load_ms / 1e3
        weights = read_weights(spec)
        time.sleep(max(0.0, end - time.monotonic()))
        return weights

    adapter_loader.read_weights = read_slowly
    loaded = load_model(args.model, dtype="float32", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        adapters = {f"a{i}": make_adapter(loaded, Path(folder, f"a{i}"), args.rank, i) for i in range(NUM_ADAPTERS)}
        config = {
            "enable": True,
            "memory": {"hbm_capacity_mb": 512, "dram_capacity_mb": 256, "staging_buffer_size_mb": 16},
            "kv_block": {"block_size": 16},
            "lora": {"adapters": adapters, "max_loaded": 2, "max_rank": args.rank, "dram_capacity_mb": 1},
        }
        engine = assemble_engine(loaded, Config.model_validate(config), CONTEXT)
        bench = Bench(engine)
        loads = [bench.load(f"a{number % NUM_ADAPTERS}") for number in range(args.loads + 1)]
        engine.close()
    lost, noise = delays_ms(loads)
    during = [step for one in loads for step in one.during]
    before = [step for one in loads for step in one.before]
    table = Table(title=f"{len(lost)} loads of {args.load_ms:g} ms, {len(during) / len(loads):.1f} steps each")
    for title in ("", "median", "90 %", "most"):
        table.add_column(title, justify="right")
    rows = {
        "lost by a base request to a load, ms": lost,
        "the same in undisturbed steps, ms": noise,
        "step during a load, ms": [1e3 * step for step in during],
        "step before it, ms": [1e3 * step for step in before],
        "step with the adapter's token, ms": [1e3 * one.own_step for one in loads],
    }
    for text, values in rows.items():
        quantiles = (statistics.median(values), float(np.quantile(values, 0.9)), max(values))
        table.add_row(text, *(f"{value:.1f}" for value in quantiles))
    console = Console(width=120)
    console.print(table)
    cheap, quiet = (sum(value <= ALLOWED_MS for value in values) / len(values) for values in (lost, noise))
    console.print(f"at most {ALLOWED_MS:g} ms lost: {cheap:.0%} of the loads, {quiet:.0%} without one")
    if args.json:
        document = {"settings": {name: str(value) for name, value in vars(args).items()}, "lost_ms": lost}
        document |= {"noise_ms": noise, "loads": [asdict(one) for one in loads]}
        args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
