"""`python -m examples.serve`: the options, the start and the end of the server."""

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

from examples.serve.app import Service, log
from examples.serve.connections import config
from examples.serve.metrics import Metrics
from examples.serve.program import KINDS, live, published_folder
from examples.serve.swaps import Swaps
from examples.serve.texts import Limits, Texts

_MAX_TOKENS = 512
"""The number of positions that the model has."""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.serve",
        description="Serves all-MiniLM-L6-v2 over HTTP, and swaps its weights while it serves.",
    )
    limits = Limits()
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default %(default)s)")
    parser.add_argument(
        "--port", type=_port, default=8000, help="the port to listen on; 0 for any free port (default %(default)s)"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("checkpoints"),
        help="the only directory that swaps take weights from (default %(default)s)",
    )
    parser.add_argument("--checkpoint", type=Path, help="the first weights; without it the published ones")
    parser.add_argument(
        "--kind", choices=KINDS, default="exported", help="the kind of program that is served (default %(default)s)"
    )
    parser.add_argument(
        "--token-file", type=Path, help="a file with the token for swaps; without it the token is in $MODELSTATE_TOKEN"
    )
    parser.add_argument(
        "--workers",
        type=_count,
        default=2,
        help="the number of requests computed at the same time (default %(default)s)",
    )
    parser.add_argument(
        "--threads", type=_count, default=1, help="the number of torch threads for each of them (default %(default)s)"
    )
    parser.add_argument(
        "--max-waiting", type=_count, default=limits.waiting, help="the most requests that wait (default %(default)s)"
    )
    parser.add_argument(
        "--max-texts", type=_count, default=limits.texts, help="the most texts in a request (default %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=_count, default=limits.tokens, help="the most tokens in a text (default %(default)s)"
    )
    parser.add_argument(
        "--max-connections",
        type=_count,
        default=limits.connections,
        help="the most open connections (default %(default)s)",
    )
    parser.add_argument(
        "--client-seconds",
        type=_count,
        default=int(limits.client_seconds),
        help="the time for a client to send a request, and to read its answer (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    if not 3 <= options.max_tokens <= _MAX_TOKENS:
        parser.error(f"--max-tokens must be from 3 to {_MAX_TOKENS}, the number of positions of the model")
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
        raise argparse.ArgumentTypeError(f"must be a number >= 1, not {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, not {text!r}")
    return int(text)


def _service(options: argparse.Namespace) -> Service:
    folder = published_folder()
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
        Metrics(lambda: program.version().id),
        limits,
        options.token,
        options.workers,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or Ctrl-C. Then it accepts no more requests, answers the running ones, and ends."""
    options = _options(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each request already has a thread
    # uvicorn handles SIGTERM while it runs, and raises the signal again after the last answer. Then, and before uvicorn
    # runs, this handler ends the program with exit code 0.
    signal.signal(signal.SIGTERM, _end)
    _set_up_logging()
    torch.set_num_threads(options.threads)
    service = _service(options)
    if not service.token:
        log.warning("neither MODELSTATE_TOKEN nor --token-file is given: weights cannot be swapped")
    elif not options.directory.is_dir():
        log.warning("the directory %s does not exist: no weights can be swapped in from it", options.directory)
    configuration = config(service, host=options.host, port=options.port, timeout_graceful_shutdown=60)
    try:
        uvicorn.Server(configuration).run()
    except KeyboardInterrupt:
        sys.exit(130)


def _set_up_logging() -> None:
    logging.basicConfig(format="%(levelname)s:     %(message)s")
    log.setLevel(logging.INFO)
    os.environ.setdefault("TORCHAO_SKIP_LOADING_SO_FILES", "1")
    for name in ("torchao", "torch.utils._pytree"):  # they log notices that do not concern this program
        logging.getLogger(name).setLevel(logging.ERROR)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
