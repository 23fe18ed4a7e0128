"""Just enough of the models behind the published checkpoints to load them strictly and run them.

Names and shapes are those of the checkpoints. The front ends (audio features, image pyramids) are left out.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class SpeakerEncoder(nn.Module):
    """Of Resemblyzer: mel frames (batch, time, 40) to unit embeddings (batch, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)
        self.similarity_weight = nn.Parameter(torch.tensor([10.0]))
        self.similarity_bias = nn.Parameter(torch.tensor([-5.0]))

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        return functional.normalize(self.linear(hidden[-1]).relu(), dim=1)


class ProposalNet(nn.Module):
    """The first stage of a face detector: images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 10, 3), nn.PReLU(10)
        self.conv2, self.prelu2 = nn.Conv2d(10, 16, 3), nn.PReLU(16)
        self.conv3, self.prelu3 = nn.Conv2d(16, 32, 3), nn.PReLU(32)
        self.conv4_1, self.conv4_2 = nn.Conv2d(32, 2, 1), nn.Conv2d(32, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.max_pool2d(self.prelu1(self.conv1(image)), 2, 2, ceil_mode=True)
        x = self.prelu3(self.conv3(self.prelu2(self.conv2(x))))
        return torch.cat([self.conv4_1(x).softmax(dim=1), self.conv4_2(x)], dim=1)


class OutputNet(nn.Module):
    """The third stage: crops of 48 x 48, with five landmarks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 32, 3), nn.PReLU(32)
        self.conv2, self.prelu2 = nn.Conv2d(32, 64, 3), nn.PReLU(64)
        self.conv3, self.prelu3 = nn.Conv2d(64, 64, 3), nn.PReLU(64)
        self.conv4, self.prelu4 = nn.Conv2d(64, 128, 2), nn.PReLU(128)
        self.dense5, self.prelu5 = nn.Linear(1152, 256), nn.PReLU(256)
        self.dense6_1, self.dense6_2, self.dense6_3 = nn.Linear(256, 2), nn.Linear(256, 4), nn.Linear(256, 10)

    def forward(self, crop: Tensor) -> Tensor:
        x = functional.max_pool2d(self.prelu1(self.conv1(crop)), 3, 2, ceil_mode=True)
        x = functional.max_pool2d(self.prelu2(self.conv2(x)), 3, 2, ceil_mode=True)
        x = functional.max_pool2d(self.prelu3(self.conv3(x)), 2, 2, ceil_mode=True)
        x = self.prelu5(self.dense5(self.prelu4(self.conv4(x)).flatten(1)))
        return torch.cat([self.dense6_1(x).softmax(dim=1), self.dense6_2(x), self.dense6_3(x)], dim=1)


class _WeightedSum(nn.Module):
    """One linear layer of the perceptual metric; the dropout is why its convolution is number 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Dropout(), nn.Conv2d(channels, 1, 1, bias=False))

    def forward(self, difference: Tensor) -> Tensor:
        return self.model(difference).mean(dim=(1, 2, 3))


class PerceptualHead(nn.Module):
    """Of LPIPS: squared feature differences, here drawn from a seed, to one distance each."""

    CHANNELS = {  # noqa: RUF012 - a constant
        "alex": (64, 192, 384, 256, 256),
        "squeeze": (64, 128, 256, 384, 384, 512, 512),
        "vgg": (64, 128, 256, 512, 512),
    }

    def __init__(self, net: str) -> None:
        super().__init__()
        self.channels = self.CHANNELS[net]
        for i, channels in enumerate(self.channels):
            self.add_module(f"lin{i}", _WeightedSum(channels))

    def forward(self, seed: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        parts = [torch.rand(2, channels, 4, 4, generator=generator) for channels in self.channels]
        return sum(layer(part) for layer, part in zip(self.children(), parts, strict=True))


class VoiceActivity(nn.Module):
    """Of Silero VAD at 16 kHz: 576 samples (64 of them context) to the probability of speech."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, samples: Tensor) -> Tensor:
        spectrum = self.stft_conv(functional.pad(samples, (0, 64), mode="reflect").unsqueeze(1))
        x = (spectrum[:, :129].square() + spectrum[:, 129:].square()).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = conv(x).relu()
        hidden, _ = self.lstm_cell(x.squeeze(-1))
        return self.final_conv(hidden.relu().unsqueeze(-1)).sigmoid().flatten(1)
