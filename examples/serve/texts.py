"""Converts texts to the tensors that the encoder takes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.serve.refusals import BadRequestError, TooLargeError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests and connections."""

    texts: int = 32
    """Of one request."""
    tokens: int = 256
    """Of one text, including the special tokens at its ends."""
    body_bytes: int = 1 << 20
    """Of one request."""
    waiting: int = 256
    """Requests that wait while others are computed."""
    connections: int = 320
    """Open at the same time. It should be more than the requests that may wait."""
    client_seconds: float = 20.0
    """The time for a client to send all of a request, and to read the answer."""


class Texts:
    """The tokenizer of the model. Several threads can use it at once."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        from tokenizers import Tokenizer

        self._limits = limits
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The setting in the file truncates texts at 128 tokens silently. The server refuses long texts instead.
        self._tokenizer.no_truncation()
        self._tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")

    def encode(self, texts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the token ids and the mask, both of shape (texts, tokens) and int64.

        Raises `BadRequestError`, `TooLargeError`.
        """
        limits = self._limits
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise BadRequestError('"texts" must be a list of one or more strings')
        if len(texts) > limits.texts:
            raise TooLargeError(f"{len(texts)} texts in one request; the limit is {limits.texts}")
        try:
            encoded = self._tokenizer.encode_batch(texts)
        except (TypeError, UnicodeError) as error:  # a lone surrogate, which JSON can contain
            raise BadRequestError(f"a text is not valid Unicode: {error}") from error
        for index, encoding in enumerate(encoded):
            count = sum(encoding.attention_mask)
            if count > limits.tokens:
                raise TooLargeError(f"text {index} has {count} tokens; the limit is {limits.tokens}")
        ids = torch.tensor([encoding.ids for encoding in encoded])
        return ids, torch.tensor([encoding.attention_mask for encoding in encoded])
