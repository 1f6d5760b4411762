"""What a bf16 engine's rounding does to the gap between engine and trainer, with the trainer computing in fp32 and in bf16.

    python tests/benchmarks/bench_precision.py          # needs posttrain[smollm2]; a few minutes, of no machine in particular

SmolLM2-135M-Instruct, its weights rounded to bf16 once, as a checkpoint's are. Every weight is then moved by a fixed amount along
the sign of a gradient, which is what Adam's first steps do, and the log-probs of a text are compared: those of a model whose
weights are stored in bf16, against fp32 masters computed in fp32, and against the same masters computed in bf16 (autocast, fp32
head), as `rl.param_dtype=bfloat16` does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

ROWS, LENGTH = 6, 48
MOVES = (0.0, 1e-6, 1e-5, 1e-4)


def main(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from posttrain_experiments.smollm2_weights import build

    if not (folder / "config.json").exists():
        build(folder)
    text = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"][: ROWS * LENGTH]).view(ROWS, LENGTH)
    masters = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for weight in masters.parameters():
            weight.copy_(weight.bfloat16())
    chosen(masters(ids, use_cache=False).logits, ids).mean().backward()
    start = {name: weight.clone() for name, weight in masters.state_dict().items()}
    print("moved by   gap to fp32 compute, mean (max)   gap to bf16 compute, mean (max)   nats")
    for move in MOVES:
        masters.load_state_dict(start)
        with torch.no_grad():
            for weight in masters.parameters():
                weight.add_(weight.grad.sign(), alpha=move)
            engine.load_state_dict({name: weight.bfloat16() for name, weight in masters.state_dict().items()})
            sampled = chosen(engine(ids, use_cache=False).logits, ids)
        gaps = [(sampled - trained(masters, ids, autocast)).abs() for autocast in (False, True)]
        print(f"{move:8g}   " + "   ".join(f"{gap.mean():.3f} ({gap.max():.2f})" for gap in gaps))


def trained(model: torch.nn.Module, ids: Tensor, autocast: bool) -> Tensor:
    """Log-probs as the policy computes them: the body as asked, the head in fp32."""
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = model.model(ids, use_cache=False).last_hidden_state
        return chosen(model.lm_head(hidden.float()), ids)


def chosen(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()))
