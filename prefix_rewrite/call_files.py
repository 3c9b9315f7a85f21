"""Read captured calls from files: JSON lines, plain or gzipped, and Parquet.

One call a line or row, with these fields; others are ignored:

    context_ids, sampled_ids   token ids; prompt_ids and output_ids are read as the same
    token_ids, sampled         instead of these two: a whole row, and True where it was sampled
    routing                    optional: integers, one row a token
    provenance                 optional: anything; calls share only where it is equal
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from prefix_rewrite.calls import CapturedCall
from prefix_rewrite.errors import ForestError

Progress = Callable[[float], None]

FIELDS = (
    "context_ids",
    "sampled_ids",
    "prompt_ids",
    "output_ids",
    "token_ids",
    "sampled",
    "routing",
    "provenance",
)


def read_calls(path: str | Path, progress: Progress | None = None) -> list[CapturedCall]:
    """Read every call of a `.jsonl`, `.jsonl.gz` or `.parquet` file, in order.

    Args:
        path: the file.
        progress: told the fraction read so far, now and then.

    Raises:
        ForestError: the file is of another kind or damaged, or a call in it is malformed; the
            message names the file and the line or row.
    """
    path = Path(path)
    name = path.name.lower()
    progress = progress or (lambda fraction: None)
    records: Iterator[tuple[str, Any]]
    if name.endswith((".jsonl", ".jsonl.gz")):
        records = _lines(path, progress)
    elif name.endswith(".parquet"):
        records = _parquet_rows(path, progress)
    else:
        raise ForestError(
            f"{path.name} must be a .jsonl, .jsonl.gz or .parquet file; "
            "name it by its format, or convert it"
        )
    calls = []
    for where, record in records:
        try:
            calls.append(_make_call(_parse(record) if isinstance(record, bytes) else record))
        except ForestError as error:
            raise ForestError(f"{path.name} {where}: {error}") from None
    return calls


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ForestError(f"must be JSON, got {line[:30]!r}: {error}") from None


def _make_call(record: Any) -> CapturedCall:
    if not isinstance(record, Mapping):
        raise ForestError(f"a call must be an object, got {type(record).__name__}")
    given = {name: value for name, value in record.items() if value is not None}
    options = {"routing": given.get("routing"), "provenance": _freeze(given.get("provenance"))}
    for first, second in (("context_ids", "sampled_ids"), ("prompt_ids", "output_ids")):
        if first in given and second in given:
            return CapturedCall(given[first], given[second], **options)
    if "token_ids" in given and "sampled" in given:
        return CapturedCall.from_tokens(given["token_ids"], given["sampled"], **options)
    raise ForestError(
        "a call must have context_ids and sampled_ids, or token_ids and sampled, "
        f"got {', '.join(sorted(map(str, given))) or 'nothing'}"
    )


def _freeze(value: Any) -> Any:
    """Return a hashable equivalent of a JSON value."""
    if isinstance(value, (list, dict)):
        return json.dumps(value, sort_keys=True)
    return value


def _lines(path: Path, progress: Progress) -> Iterator[tuple[str, bytes]]:
    total = max(1, path.stat().st_size)
    number = 0
    with path.open("rb") as raw, _unzipped(path, raw) as lines:
        try:
            for number, line in enumerate(lines, 1):
                progress(min(1.0, raw.tell() / total))
                if line.strip():
                    yield f"line {number}", line
        except (OSError, EOFError) as error:
            raise ForestError(f"{path.name} line {number + 1}: cannot be read: {error}") from None


def _unzipped(path: Path, raw: BinaryIO) -> AbstractContextManager[BinaryIO | gzip.GzipFile]:
    return gzip.open(raw, "rb") if path.name.lower().endswith(".gz") else nullcontext(raw)


def _parquet_rows(path: Path, progress: Progress) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ForestError(
            f"{path.name}: reading Parquet needs pyarrow; pip install pyarrow, or use .jsonl.gz"
        ) from None
    try:
        table = ParquetFile(path)
    except ArrowInvalid as error:
        raise ForestError(f"{path.name}: is not a Parquet file: {error}") from None
    columns = [name for name in FIELDS if name in table.schema_arrow.names]
    row = 0
    for batch in table.iter_batches(batch_size=256, columns=columns):
        for i in range(batch.num_rows):
            row += 1
            yield f"row {row}", {name: _cell(batch.column(name)[i], name) for name in columns}
        progress(row / table.metadata.num_rows)


def _cell(cell: Any, name: str) -> Any:
    if name.endswith("_ids") and cell.is_valid:
        return cell.values.to_numpy(zero_copy_only=False)
    return cell.as_py()
