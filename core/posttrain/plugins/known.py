"""Names that people know and that may not be installed here: which distribution brings them, and what to type.

Everything in this table is a plug-in of `posttrain` itself. It is absent when an older posttrain is installed, or a clone whose
entry points have not been read since it was updated; the extra is what the plug-in needs beside posttrain.
"""

from __future__ import annotations

EXTRAS: dict[str, dict[str, str]] = {
    "algorithms": dict.fromkeys(("grpo", "rloo", "dr_grpo", "reinforce_pp", "cispo", "gspo", "sapo", "dpo", "nft"), ""),
    "datapackers": dict.fromkeys(("decoder_only", "preference"), ""),
    "envs": {
        **dict.fromkeys(("function", "arithmetic", "preference", "countdown", "gpqa", "wordle"), ""),
        **dict.fromkeys(("calculator", "search", "python_tool", "code"), ""),
        "math": "math",
        "reasoning_gym": "reasoning-gym",
        "verifiers": "verifiers",
        "textarena": "textarena",
    },
    "engines": {"hf": "", "vllm": "vllm"},
    "transports": {"inproc": "", "shm": "", "nixl": "ray"},
    "hooks": {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"},
}
"""kind -> name -> extra of posttrain that it needs, "" for none."""


def elsewhere(kind: str, name: str) -> tuple[str, str] | None:
    """`(distribution, what to type)` for a name that is known and was not found among the installed ones."""
    extra = EXTRAS.get(kind, {}).get(name)
    if extra is None:
        return None
    wanted = f"posttrain[{extra}]" if extra else "posttrain"
    return wanted, f"pip install --upgrade '{wanted}', in a clone pip install -e '.{f'[{extra}]' if extra else ''}'"
