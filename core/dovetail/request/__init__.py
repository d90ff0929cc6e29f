"""Requests, their parameters and their results, as users and policies see them. Nothing here needs
torch."""

from dovetail.request.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from dovetail.request.request import Request

__all__ = ["CompletionOutput", "Logprob", "Request", "RequestMetrics", "RequestOutput"]
