"""The block for a bug report: everything that helps, nothing that names the person, the machine or a secret."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from posttrain.cli.doctor.snapshot import Finding, Snapshot, gib
from posttrain.config.secrets import HIDDEN, secret_variables

_TOKENS = re.compile(r"\b(hf_|ghp_|gho_|github_pat_|sk-|xox[abp]-|AKIA|glpat-)[\w-]{8,}")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_CREDENTIALS = re.compile(r"://[^/\s:@]+:[^/\s@]+@")


def report(snapshot: Snapshot, findings: Sequence[Finding]) -> str:
    """The block, masked."""
    lines = [
        f"posttrain {snapshot.posttrain}, Python {snapshot.python}, {snapshot.system}",
        f"{snapshot.cores} cores, {gib(snapshot.memory or 0)} memory, GPUs: {', '.join(snapshot.devices) or 'none'}",
        *(f"{f.state:<5}{f.check}: {f.what}" for f in findings),
        *(f"set  {name}={value}" for name, value in snapshot.environ.items()),
    ]
    return "```text\n" + mask("\n".join(lines)) + "\n```"


def mask(text: str) -> str:
    """Without secrets and tokens, home folders, the current folder, the user, host names and addresses of machines."""
    for value in secret_variables():
        text = text.replace(value, HIDDEN)
    text = _CREDENTIALS.sub(f"://{HIDDEN}@", _TOKENS.sub(HIDDEN, text))
    with suppress(RuntimeError):
        text = re.sub(rf"{re.escape(str(Path.home()))}(?=/|\W|$)", "~", text, flags=re.MULTILINE)
    if (here := str(Path.cwd())) != "/":
        text = re.sub(rf"{re.escape(here)}(?=/|\W|$)", ".", text, flags=re.MULTILINE)
    text = re.sub(r"/(home|Users)/[^/\s:]+", r"/\1/USER", text)
    with suppress(KeyError, OSError):
        text = re.sub(rf"(?<=/){re.escape(getpass.getuser())}(?=[/\s:]|$)", "USER", text, flags=re.MULTILINE)
    for name in sorted({socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}, key=len, reverse=True):
        if name and name != "localhost":
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "HOST", text)
    return _ADDRESS.sub(lambda found: found[0] if found[0].startswith(("127.", "0.")) else "ADDRESS", text)
