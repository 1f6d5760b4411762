"""`posttrain export RUN OUT`: a Hugging Face folder from a checkpoint."""

from __future__ import annotations

import argparse

from posttrain.cli.main import Parser
from posttrain.errors import EXIT_OK

EPILOG = """\
examples:
  posttrain export outputs/arithmetic-grpo-20260101-120000 my-model
  posttrain export outputs/arithmetic-grpo-20260101-120000 my-model --step 40 --dtype bfloat16

OUT holds weights, config, tokenizer, chat template, generation config and a model card; transformers and vLLM load it.
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain export",
        description="Write the policy of a checkpoint as a Hugging Face folder.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", metavar="RUN", help="a run directory, or one of its checkpoints")
    made.add_argument("out", metavar="OUT", help="the folder to write; must not exist, or be empty")
    made.add_argument("--step", type=int, metavar="N", help="the checkpoint of this batch step (default: the newest)")
    made.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: rl.master_dtype, which is exact)"
    )
    return made


def run(args: argparse.Namespace) -> int:
    from posttrain.loop.export import export
    from posttrain.policy.load import quiet_libraries
    from posttrain.tracking.text import near

    quiet_libraries()
    out = export(args.run, args.out, step=args.step, dtype=args.dtype)
    size = sum(file.stat().st_size for file in out.iterdir() if file.is_file())
    print(f"exported to {near(out)} ({size / 2**20:,.1f} MiB)")
    return EXIT_OK
