"""From texts to the tensors that the encoder takes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.serve.refusals import BadRequestError, TooLargeError


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one request may ask for, and how many may wait."""

    texts: int = 32
    tokens: int = 256
    """Of one text, with those at its ends."""
    body_bytes: int = 1 << 20
    waiting: int = 256
    """Requests that wait for those that are being computed."""
    connections: int = 320
    """Open at a time: more than the requests that may wait."""
    client_seconds: float = 20.0
    """For a client to send all of a request, and to read the answer."""


class Texts:
    """The tokenizer of the model. It is used by several threads at once."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        from tokenizers import Tokenizer

        self._limits = limits
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file's own setting cuts texts off at 128 tokens without a word; here one that is too long is refused.
        self._tokenizer.no_truncation()
        self._tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")

    def encode(self, texts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask, both (texts, tokens) of int64. Raises `BadRequestError`, `TooLargeError`."""
        limits = self._limits
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise BadRequestError('"texts" is a list of one or more strings')
        if len(texts) > limits.texts:
            raise TooLargeError(f"{len(texts)} texts in one request; the most is {limits.texts}")
        try:
            encoded = self._tokenizer.encode_batch(texts)
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair, which JSON can spell
            raise BadRequestError(f"a text is no Unicode: {error}") from error
        for at, one in enumerate(encoded):
            count = sum(one.attention_mask)
            if count > limits.tokens:
                raise TooLargeError(f"text {at} has {count} tokens; the most is {limits.tokens}")
        ids = torch.tensor([one.ids for one in encoded])
        return ids, torch.tensor([one.attention_mask for one in encoded])
