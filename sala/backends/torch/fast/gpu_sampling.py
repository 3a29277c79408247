"""Sampling on the device: the state of each slot, and the parameters that a step sends before it samples.

Tokens are sampled by `kernels/sampling.py`, inside the CUDA graph of a decode step or after a prefill pass. Counts for
penalties stay on the device and advance with every sampled token; the host sends them only when a sequence begins, or
after tokens that were not sampled there.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sala.backends.torch.cache import send
from sala.backends.torch.kernels.sampling import (
    NUM_FIELDS,
    SamplingBuffers,
    packed_mask,
    parameters_of,
    sample_rows,
    top_logprobs,
)
from sala.errors import ModelBroken
from sala.protocol import Row, SampledToken, Sampling


class DeviceSampler:
    """The buffers of all slots, and which sequence they are for."""

    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        self.buffers = SamplingBuffers(num_slots, vocab, device)
        self.vocab, self.device = vocab, device
        self._counted: dict[int, int] = {}  # slot → tokens of its sequence that the counts include
        self._biased: dict[int, Sampling] = {}

    def forget(self, slot: int) -> None:
        """Forget the sequence of a slot, which another one gets."""
        self._counted.pop(slot, None)
        self._biased.pop(slot, None)

    def new_masks(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, -(-self.vocab // 8), dtype=torch.uint8, device=self.device)

    def prepare(self, rows: Sequence[Row], masks: Tensor) -> list[int]:
        """Send what the rows need and return their parameters, one row after another."""
        values: list[int] = []
        for index, row in enumerate(rows):
            sampling = row.sampling
            if sampling is None:
                values += [0] * NUM_FIELDS
                continue
            values += parameters_of(row)
            if row.mask is not None or row.banned:
                masks[index].copy_(send(torch.from_numpy(packed_mask(row, self.vocab)), self.device))
            is_counted = not sampling.has_penalty or self._counted.get(row.slot) == row.end
            is_biased = not sampling.logit_bias or self._biased.get(row.slot) is sampling
            if not (is_counted and is_biased):
                assert not sampling.has_penalty or len(row.history) == row.end, "tokens are missing"
                self.buffers.load(row)
                self._biased[row.slot] = sampling
            self._counted[row.slot] = row.end + 1
        return values

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Sample a token for each row of logits [n, V], outside a graph → [n]."""
        masks, sampled = self.new_masks(len(rows)), torch.zeros(len(rows), dtype=torch.long, device=self.device)
        parameters = send(torch.tensor(self.prepare(rows, masks)), self.device).unflatten(0, (len(rows), -1))
        sample_rows(logits, parameters, self.buffers, masks, sampled)
        return sampled


class SampledRows:
    """Tokens on their way to the host; `wait` returns them."""

    def __init__(self, rows: Sequence[Row], tokens: Tensor, logits: Tensor) -> None:
        """Begin to copy the tokens [n] of rows, sampled from logits [n, V], and log-probabilities if asked for.

        A token ~t says that a logit was not a number, see `sample_rows`.
        """
        self.counts = [None if row.sampling is None else row.sampling.logprobs for row in rows]
        asked = [count for count in self.counts if count is not None]
        found = [tokens]
        if asked:
            found += top_logprobs(logits, torch.maximum(tokens, ~tokens), min(max(asked), logits.shape[1]))
        self.copies = [to_host(one) for one in found]

    def wait(self) -> list[SampledToken]:
        """Raise ModelBroken if a logit was not a number."""
        tokens, *more = (copy().tolist() for copy in self.copies)
        if min(tokens, default=0) < 0:
            raise ModelBroken
        if not more:
            return [SampledToken(token) for token in tokens]
        found = []
        for token, count, logprob, values, ids in zip(tokens, self.counts, *more, strict=True):
            top = tuple(zip(ids, values, strict=True))[:count]
            found.append(SampledToken(token) if count is None else SampledToken(token, logprob, top))
        return found


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host; return what waits for it."""
    if not tensor.is_cuda:
        copied = tensor.clone()
        return lambda: copied
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> Tensor:
        event.synchronize()
        return host

    return wait
