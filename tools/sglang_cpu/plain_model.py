"""Write a model given as .gguf file as a plain float32 directory, which SGLang can load on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, PretrainedConfig

from dflash2.engine.model_loader import load_model, load_tokenizer


def main(gguf: str, target: str) -> None:
    """Convert ``gguf`` into the directory ``target``."""
    model = load_model(gguf, "float32", pack=False).model
    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config: PretrainedConfig = type(model.config)(**settings)
    # A fresh model of the same kind: the quantised wrapper refuses to be saved.
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.float().save_pretrained(target)
    load_tokenizer(gguf).save_pretrained(target)
    print(f"wrote {Path(target)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
