"""The log-prob kernel against a whole log-softmax: time and extra peak memory, for several chunk sizes.

    python tests/benchmarks/bench_logprobs.py                    # T = 4,096, vocabulary 151,936, hidden size 576
    python tests/benchmarks/bench_logprobs.py --tokens 512 --vocabulary 49152 --repeat 7

Each way runs in a process of its own, which reports the median time of forward and backward, and the growth of its peak
resident memory over the inputs and their gradients (these exist beforehand). The kernel also computes entropies, as it does
in training; the whole log-softmax does not.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

CHUNKS = (128, 256, 512)


def measure(chunk: int, tokens: int, vocabulary: int, hidden_size: int, threads: int, repeat: int) -> dict[str, float]:
    """Seconds and bytes of one way; chunk 0 is the whole log-softmax."""
    import torch

    from posttrain.policy.logprobs import token_logprobs

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size) * hidden_size**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)

    def once() -> float:
        began = time.perf_counter()
        if chunk:
            logprobs, _ = token_logprobs(hidden, weight, targets, chunk_tokens=chunk, entropy=True)
        else:
            logprobs = torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None])
        logprobs.sum().backward()
        return time.perf_counter() - began

    before = peak()
    seconds = [once() for _ in range(repeat)]
    gradient = weight.numel() * 4  # of this backward, before it is added to the accumulated one
    return {"seconds": statistics.median(seconds), "bytes": peak() - before - gradient}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("vocabulary", 151936), ("hidden-size", 576), ("threads", 2), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunk", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = (args.tokens, args.vocabulary, args.hidden_size, args.threads, args.repeat)
    if args.chunk is not None:
        print(json.dumps(measure(args.chunk, *shape)))
        return
    logits = args.tokens * args.vocabulary * 4
    print(f"{args.tokens} tokens, vocabulary {args.vocabulary}, hidden size {args.hidden_size}, {args.threads} threads, fp32")
    print(f"logits {logits / 2**20:.0f} MiB; medians of {args.repeat}")
    whole = 0.0
    for chunk in (0, *CHUNKS):
        command = [sys.executable, __file__, *sys.argv[1:], "--chunk", str(chunk)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        whole = whole or found["seconds"]
        print(
            f"{f'chunk {chunk}' if chunk else 'whole':>10}  {found['seconds']:7.2f} s  {found['seconds'] / whole:5.2f}×"
            f"  {found['bytes'] / 2**20:7.0f} MiB  {found['bytes'] / logits:6.3f} of the logits"
        )


if __name__ == "__main__":
    main()
