"""`python -m examples.serve`: the options, the start and the end."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from bench.demo import find_material
from examples.serve.app import Service, log
from examples.serve.connections import config
from examples.serve.metrics import Metrics
from examples.serve.program import KINDS, live
from examples.serve.swaps import Swaps
from examples.serve.texts import Limits, Texts

_MOST_TOKENS = 512
"""Positions that the model has."""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description="Serves all-MiniLM-L6-v2 over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free (default %(default)s)")
    parser.add_argument(
        "--directory", type=Path, default=Path("checkpoints"), help="the only place that weights are taken from"
    )
    parser.add_argument("--checkpoint", type=Path, help="the weights to begin with (default the published ones)")
    parser.add_argument("--kind", choices=KINDS, default="exported", help="of program (default %(default)s)")
    parser.add_argument("--token-file", type=Path, help="has the token for swaps (default $MODELSTATE_TOKEN)")
    parser.add_argument("--workers", type=_count, default=2, help="requests computed at a time (default %(default)s)")
    parser.add_argument("--threads", type=_count, default=1, help="of torch, for each of them (default %(default)s)")
    parser.add_argument("--max-waiting", type=_count, default=Limits().waiting, help="requests (default %(default)s)")
    parser.add_argument("--max-texts", type=_count, default=Limits().texts, help="in a request (default %(default)s)")
    parser.add_argument("--max-tokens", type=_count, default=Limits().tokens, help="in a text (default %(default)s)")
    parser.add_argument(
        "--max-connections", type=_count, default=Limits().connections, help="open at a time (default %(default)s)"
    )
    parser.add_argument(
        "--client-seconds", type=_count, default=int(Limits().client_seconds),
        help="for a client to send a request, and to read its answer (default %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if not 2 < options.max_tokens <= _MOST_TOKENS:
        parser.error(f"--max-tokens is from 3 to {_MOST_TOKENS}, for which the model has positions")
    options.token = os.fsencode(os.environ.get("MODELSTATE_TOKEN", "")).strip()
    if options.token_file:
        try:
            options.token = options.token_file.read_bytes().strip()
        except OSError as error:
            parser.error(f"--token-file cannot be read: {error}")
        if not options.token:
            parser.error("--token-file has no token in it")
    return options


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"a number from 1, not {text!r}")
    return int(text)


def _service(options: argparse.Namespace) -> Service:
    folder = find_material().folder
    checkpoint = options.checkpoint or folder / "model.safetensors"
    limits = Limits(
        texts=options.max_texts,
        tokens=options.max_tokens,
        waiting=options.max_waiting,
        connections=options.max_connections,
        client_seconds=options.client_seconds,
    )
    program = live(options.kind, folder, checkpoint, limits)
    return Service(
        program,
        Texts(folder, limits),
        Swaps(program, options.directory, str(checkpoint)),
        Metrics(lambda: program.version),
        limits,
        options.token,
        options.workers,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until it is told to end: then requests that are under way are answered, and no others are taken."""
    options = _options(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # requests have a thread each already
    # Before the start it ends the program, and after the last answer with exit code 0: uvicorn passes it on then.
    signal.signal(signal.SIGTERM, _end)
    _set_up_logging()
    torch.set_num_threads(options.threads)
    service = _service(options)
    if not service.token:
        log.warning("neither MODELSTATE_TOKEN nor --token-file is given: weights cannot be swapped")
    served = config(service, host=options.host, port=options.port, timeout_graceful_shutdown=60)
    try:
        uvicorn.Server(served).run()
    except KeyboardInterrupt:
        sys.exit(130)


def _set_up_logging() -> None:
    logging.basicConfig(format="%(levelname)s:     %(message)s")
    log.setLevel(logging.INFO)
    os.environ.setdefault("TORCHAO_SKIP_LOADING_SO_FILES", "1")
    for name in ("torchao", "torch.utils._pytree"):  # notices that are about other programs
        logging.getLogger(name).setLevel(logging.ERROR)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
