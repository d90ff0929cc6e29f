"""Files and batches of OpenAI's API (https://platform.openai.com/docs/api-reference/batch).
`BatchStore` stores the same structs."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct, field

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)
WINDOW = "24h"
WINDOW_S = 24 * 3600

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")


class ExpiresAfter(Struct, forbid_unknown_fields=True):
    """Retention of a file."""

    seconds: Annotated[int, Meta(ge=3600, le=30 * 24 * 3600)]
    anchor: Literal["created_at"] = "created_at"


class FileObject(Struct):
    """An uploaded file, or a batch's answers."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"] = "batch"
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class BatchError(Struct):
    """An error in the input, for which the whole batch was rejected."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class Counts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class CreateBatchRequest(Struct, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class Batch(Struct):
    """A batch. Times are seconds since 1970."""

    id: str
    endpoint: Endpoint
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    completion_window: str = WINDOW
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = field(default_factory=Counts)
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    object: Literal["batch"] = "batch"

    @property
    def ended_at(self) -> int | None:
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at
