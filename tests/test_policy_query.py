"""Policies that ask the question: their scores once more in float64."""

import torch
from reference import Seen, attention_paid


def question_attention(seen: Seen) -> torch.Tensor:
    return attention_paid(seen.new.q[-seen.num_asked :], seen.k)[seen.kept]


SCORES = {"query-aware": question_attention}
