"""Former name of `document_chunks`, kept for existing scripts."""

from megatron.mixture.document_chunks import DocumentChunks

__all__ = ["DocumentChunks"]
