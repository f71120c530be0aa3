"""All errors that this package raises on purpose.

    TrtKvCacheError
    ├── ModelError                 the model, as a file or as a graph
    │   ├── InvalidModelError      not readable as ONNX, or breaks a rule of the ONNX operators
    │   ├── UnsupportedModelError  legal ONNX whose meaning the target cannot express
    │   └── AmbiguousRoleError     an input could play several roles, or a role fits several inputs
    ├── OptionError                an option's value that is illegal, or illegal for this model
    ├── OutputError                a file that cannot be written
    ├── BackendError               TensorRT (or TensorRT for RTX) is missing, too old, or failed
    │   └── BuildError             parsing or building failed; carries TensorRT's own words
    ├── ManifestError              a manifest that is unreadable, of an unknown schema, or not of this engine
    ├── VerificationError          the rewritten model does not give the original's numbers
    └── SessionError               a decode session: closed, or its runner failed
        ├── PromptError            an empty prompt, a token id out of range
        ├── CapacityError          a sequence would outgrow its cache; nothing was written
        ├── SlotError              an unknown slot, or none is free
        └── CacheFileError         a saved cache that is unreadable or of another model

Messages say what was found, what is supported, and what to do. The commands print them on one line and exit with 1; any
other exception is a bug and keeps its trace. Commands show options in messages as flags; ``str`` of an error shows them
as arguments of Python.
"""

from __future__ import annotations

from trt_kvcache.messages import as_arguments

__all__ = [
    "AmbiguousRoleError",
    "BackendError",
    "BuildError",
    "CacheFileError",
    "CapacityError",
    "InvalidModelError",
    "ManifestError",
    "ModelError",
    "OptionError",
    "OutputError",
    "PromptError",
    "SessionError",
    "SlotError",
    "TrtKvCacheError",
    "UnsupportedModelError",
    "VerificationError",
]


class TrtKvCacheError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        sequence: slot of the sequence that failed, if `DecodeSession.step` raises the error; else None.
    """

    sequence: int | None = None

    @property
    def message(self) -> str:
        """The message in the form that commands print, with options as flags."""
        return super().__str__()

    def __str__(self) -> str:
        return as_arguments(self.message)


class ModelError(TrtKvCacheError):
    """The model cannot be used: something is wrong with its file or its graph."""


class InvalidModelError(ModelError):
    """The model is not readable as ONNX, or conflicts with the ONNX operator definitions."""


class UnsupportedModelError(ModelError):
    """The model is legal ONNX, but its meaning cannot be preserved on the target."""


class AmbiguousRoleError(ModelError):
    """An input of the model fits several roles, or a role fits several inputs."""


class OptionError(TrtKvCacheError):
    """An option has an illegal value, either always or for this model."""


class OutputError(TrtKvCacheError):
    """An output file cannot be written."""


class BackendError(TrtKvCacheError):
    """The TensorRT backend is missing or too old, or it failed."""


class BuildError(BackendError):
    """Parsing a model or building an engine failed. The message has TensorRT's own words."""


class ManifestError(TrtKvCacheError):
    """A manifest is unreadable, of an unknown schema version, or belongs to another engine."""


class VerificationError(TrtKvCacheError):
    """The rewritten model's results differ from the original model's."""


class SessionError(TrtKvCacheError):
    """A decode session cannot do what was asked: it is closed, or its runner failed."""


class PromptError(SessionError):
    """A prompt is empty, or has token ids that the model does not know."""


class CapacityError(SessionError):
    """A sequence would outgrow its cache, or a cache no longer has the requested contents. Nothing was written."""


class SlotError(SessionError):
    """The slot is not in use, or no slot is free."""


class CacheFileError(SessionError):
    """A file of saved cache contents cannot be read, or belongs to another model."""
