"""Runs in a sandbox: loads a program, calls one function of it, writes what came of it to a file of its own.

    python call.py program.py result.json < {"name": …, "args": […], "kwargs": {…}}

The file holds `{"value": …}`, `{"error": "…"}`, or `{"error": …, "stage": "compile"}`. What the program prints is not looked at,
and no expected value ever comes here: a program that writes the file itself must know the right answer. Imports no posttrain.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    program, result = sys.argv[1:3]
    call = json.load(sys.stdin)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    names: dict[str, Any] = {"__name__": "solution", "__file__": program}
    try:
        with open(program, encoding="utf-8", errors="surrogatepass") as file:
            code = compile(file.read(), program, "exec")
    except Exception as exc:
        return write(result, {"error": describe(exc), "stage": "compile"})
    try:
        exec(code, names)
        value = find(names, call["name"])(*call["args"], **call["kwargs"])
        text = json.dumps({"value": plain(value)})
    except BaseException as exc:
        return write(result, {"error": describe(exc)})
    write(result, text)


def find(names: dict[str, Any], name: str) -> Any:
    """A function of the program, or a method of its class `Solution`."""
    if callable(names.get(name)):
        return names[name]
    if "Solution" in names and hasattr(names["Solution"], name):
        return getattr(names["Solution"](), name)
    raise NameError(f"there is no function {name!r}")


def plain(value: Any) -> Any:
    """A value as JSON has them: tuples, sets (in order) and arrays become lists."""
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(plain(key)): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value


def describe(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"[:500]


def write(result: str, found: Any) -> None:
    with open(result, "w", encoding="utf-8") as file:
        file.write(found if isinstance(found, str) else json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # threads of the program need not end


if __name__ == "__main__":
    main()
