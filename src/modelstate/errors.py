"""The errors and warnings of modelstate.

A message says what is wrong and where, what was expected, what was found, and what to do next. The same facts are
fields of the error, so that a program need not parse the text. A call that raises leaves files and models unchanged,
except where the text says so.

ModelStateError
├── OpenError
│   ├── SourceNotFoundError       (FileNotFoundError)
│   ├── SourceAccessError         (PermissionError)
│   ├── SourceTypeError           (TypeError)
│   ├── UnknownFormatError        (ValueError)
│   ├── AmbiguousCheckpointError  (ValueError)
│   ├── TruncatedFileError        (EOFError, ValueError)
│   ├── DamagedFileError          (ValueError)
│   ├── ForbiddenGlobalError      (ValueError)
│   ├── UnsupportedTensorError    (NotImplementedError)
│   ├── NewerManifestError        (ValueError)
│   └── CombineError              (ValueError)
├── KeyNotFoundError              (KeyError)
├── ReadFailedError               (OSError)
├── ChecksumError                 (ValueError)
├── ComparisonError               (ValueError)
├── OptionError                   (TypeError, ValueError)
├── TensorSpecError               (TypeError, AttributeError)
├── PackageError                  (ImportError)
├── BufferNameError               (KeyError)
├── RuleError                     (ValueError)
├── OptimizerStateError           (ValueError)
├── ObjectStateError              (KeyError, TypeError, ValueError)
├── PlanError                     (RuntimeError)
├── ModelBusyError                (RuntimeError)
├── BackgroundCancelledError      (RuntimeError)
├── BackgroundTimeoutError        (TimeoutError)
├── ModelCodeError                (RuntimeError)
├── ExtraStateError               (ValueError)
├── TransformError                (ValueError)
├── PlacementError                (RuntimeError)
├── RollbackError                 (RuntimeError)
├── MemoryBudgetError             (MemoryError)
├── DistributedError              (RuntimeError, ValueError)
│   └── RankLostError             (TimeoutError)
├── CodecError                    (ValueError)
│   └── UnknownClassError
├── SaveError
│   ├── UnsavableError            (TypeError, ValueError)
│   ├── TargetExistsError         (FileExistsError)
│   ├── LockedError               (TimeoutError)
│   └── WriteFailedError          (OSError)
├── StoreError
│   ├── StepNotFoundError         (KeyError)
│   ├── DamagedCheckpointError    (ValueError)
│   └── StoreMovedError           (OSError)
├── ExportError                   (RuntimeError, ValueError)
├── NameMapError                  (ValueError)
└── LiveError
    ├── LiveTargetError           (TypeError)
    ├── ProgramInputError         (ValueError)
    ├── WeightsError              (ValueError)
    ├── CanaryError               (ValueError)
    ├── SwapBusyError             (TimeoutError)
    ├── VersionGoneError          (LookupError)
    └── SkippedCheckpointError    (ValueError)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, TypedDict, Unpack

import msgspec

from modelstate.text_format import as_given, printable, printable_lines

CUT_SHORT = "the file is damaged or cut short: compare its size with the original, and copy it again"
"""The remedy for a damaged file."""
OPEN_AGAIN = "open the checkpoint again, when nothing writes to it any more"
"""The remedy for a file or an object that has changed since it was opened."""


_OWN_PACKAGE = __name__.partition(".")[0]
_CO_OPTIMIZED, _CO_VARARGS = 1, 4
"""Flags of the code of a function, as `inspect` has them."""


def keep_interrupt(error: BaseException) -> None:
    """Raises an exception again if a signal handler has raised it, such as the `TimeoutError` of an alarm.

    Such an exception says nothing about a file or a model, at whatever call it arrives. `ModelStateError` calls this
    for the exception that is being handled. Code that catches any `Exception`, and raises no such error, calls it too.
    The code that it has called may have raised another one while it handled this, as `inspect` does, and has not said
    with `raise ... from` that this one is meant.
    """
    trace, before = error.__traceback__, error.__context__
    try:
        if is_interrupt(error):
            raise error
        if before is not None and before.__traceback__ is not None and not error.__suppress_context__:
            while trace is not None and trace.tb_frame is not before.__traceback__.tb_frame:
                trace = trace.tb_next
            if trace is not None:  # it was caught there, and not by the program that handles it now
                keep_interrupt(before)
    finally:
        del error, trace, before  # they would refer to themselves through this frame


def is_interrupt(error: BaseException) -> bool:
    """Whether a signal handler has raised an exception.

    Python calls a handler in the frame that the signal interrupts, and passes this frame.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        code = trace.tb_frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & _CO_VARARGS)
        arguments = code.co_varnames[:count]
        for name, value in variables_of(trace.tb_frame) if arguments else ():
            if name in arguments and any(item is interrupted for item in (value if type(value) is tuple else (value,))):
                return True
    return False


def variables_of(frame: FrameType) -> list[tuple[str, object]]:
    """Returns the local variables of a frame, and leaves no reference that would keep their values alive."""
    variables = frame.f_locals
    found = list(variables.items())
    # Until Python 3.12 the frame keeps a copy of its variables, which outlives their deletion. This function has the
    # only references to the copy, unless code of the frame has called locals().
    is_copy = bool(frame.f_code.co_flags & _CO_OPTIMIZED) and type(variables) is dict
    if is_copy and sys.getrefcount(variables) <= 3:
        variables.clear()
    return found


class Remedy(msgspec.Struct, frozen=True):
    """What to do about an error or about problems."""

    text: str
    """In terms of Python; empty for what helps on the command line only."""
    options: str | None = None
    """In terms of the command line; empty for what helps in Python only, None where the text fits both."""

    def spelled(self, *, command_line: bool) -> str:
        """Returns the text for Python, or for the command line."""
        return self.options if command_line and self.options is not None else self.text


class ProblemGroup(msgspec.Struct, frozen=True):
    """What an error says about the problems of one kind."""

    title: str
    count: int
    lines: tuple[str, ...]
    remedy: Remedy
    page: str


def render(groups: Sequence[ProblemGroup], *, command_line: bool = False) -> str:
    """Returns the text of groups of problems, with remedies for Python or for the command line."""
    lines = []
    for group in groups:
        remedy = group.remedy.spelled(command_line=command_line) or group.remedy.text
        lines.append(f"  {group.title} ({group.count}):")
        lines += [f"    {line}" for line in group.lines]
        lines += [f"    to do: {remedy}", f"    more: modelstate explain {group.page}"]
    return "\n".join(lines)


class ErrorFields(TypedDict, total=False):
    """The arguments of every error; `ModelStateError` says what they mean."""

    where: object
    expected: object
    found: object
    remedy: object
    options: str
    names: Sequence[str]
    problems: Sequence[Any]
    groups: Sequence[ProblemGroup]
    page: str


class ModelStateError(Exception):
    """The base class of all errors of modelstate.

    The text has one line for each field that is set; the last line names the page about the error. In the text, paths
    are relative where the caller gave relative ones; in the fields, they are absolute.

    Args:
        what: what is wrong, in one sentence.
        where: the file and the place in it, or the place in the model.
        expected: what was expected.
        found: what was found.
        remedy: what to do next; empty for the remedy of the class.
        options: what to do next on the command line; empty where the remedy fits there, too.
        problems: the problems of a plan or of rules, each a `modelstate.problems.Problem`.
        groups: what the text says about the problems.
        names: the names of the tensors, attributes or values that are wrong.
        page: the page about the error; empty for the page of the class.

    Raises:
        BaseException: The exception of a signal handler, where the error would take its place.

    Examples:
        >>> try:
        ...     ms.load(model, "missing.pt")
        ... except ms.ModelStateError as error:
        ...     print(error.where, error.remedy)
    """

    page: str = ""
    """The page that shows the cause and the fix: `modelstate explain PAGE` prints it."""
    _class_remedy: ClassVar[Remedy] = Remedy("")

    def __init_subclass__(cls, *, page: str = "", remedy: str = "", options: str = "") -> None:
        super().__init_subclass__()
        cls.page = page or cls.page
        if remedy:
            cls._class_remedy = Remedy(remedy, options)

    def __init__(self, what: str, **fields: Unpack[ErrorFields]) -> None:
        caught = sys.exc_info()[1]
        if caught is not None and caught.__traceback__ is not None:
            catcher: str = caught.__traceback__.tb_frame.f_globals.get("__name__", "")
            if catcher.partition(".")[0] == _OWN_PACKAGE:  # otherwise code of a user handles it
                try:
                    keep_interrupt(caught)
                finally:
                    caught = None
        super().__init__(what)
        self.what = what
        """What is wrong, in one sentence."""
        self.where = str(fields.get("where", ""))
        """The file and the place in it, or the place in the model."""
        self.expected = str(fields.get("expected", ""))
        """What was expected."""
        self.found = str(fields.get("found", ""))
        """What was found."""
        remedy = str(fields.get("remedy", ""))
        self.remedy = remedy or self._class_remedy.text
        """What to do next."""
        self.options = fields.get("options") or ("" if remedy else self._class_remedy.options or "")
        """What to do next on the command line; empty where the remedy fits there, too."""
        self.names = tuple(fields.get("names", ()))
        """The names of the tensors, attributes or values that are wrong; empty where the text alone names them."""
        self.problems = tuple(fields.get("problems", ()))
        """The problems of a plan or of rules, each a `modelstate.problems.Problem`."""
        self.groups = tuple(fields.get("groups", ()))
        """What the text says about the problems."""
        self.page = fields.get("page") or self.page

    @property
    def has_fields(self) -> bool:
        """Whether the fields are set. A subclass may have a constructor that does not call this one."""
        return "what" in self.__dict__

    def __str__(self) -> str:
        return self.text() if self.has_fields else super().__str__()

    def text(self, *, command_line: bool = False) -> str:
        """Returns the text of the error, with remedies for Python or for the command line."""
        what = printable_lines(self.what)
        lines = [f"{printable(self.where)}: {what}" if self.where else what]
        if self.groups:
            lines.append(render(self.groups, command_line=command_line))
        remedy = self.options if command_line and self.options else self.remedy
        # Each group of problems has a page of its own.
        more = f"modelstate explain {self.page}" if self.page and not self.problems else ""
        labels = {"expected": self.expected, "found": self.found, "to do": remedy, "more": more}
        lines += [f"  {label}: {printable_lines(text)}" for label, text in labels.items() if text]
        return as_given("\n".join(lines))


class OpenError(ModelStateError, page="no-checkpoint"):
    """A source that cannot be opened as a checkpoint."""


class SourceNotFoundError(OpenError, FileNotFoundError):
    """The path does not exist, the directory has no checkpoint, or a shard that the index names is missing."""


class SourceAccessError(OpenError, PermissionError):
    """The file or directory may not be read."""


class SourceTypeError(OpenError, TypeError, page="argument"):
    """The source is of a kind that cannot be opened."""


class UnknownFormatError(OpenError, ValueError, page="unknown-format"):
    """The file is not a checkpoint that modelstate reads.

    Examples are TorchScript, a plain pickle, GGUF, a Git LFS pointer, and the web page of a failed download.
    """


class AmbiguousCheckpointError(OpenError, ValueError, page="no-checkpoint"):
    """A file holds several state dicts that fit equally well, or a directory several checkpoints."""

    def __init__(self, what: str, *, candidates: Sequence[tuple[str, int]] = (), **fields: Unpack[ErrorFields]) -> None:
        super().__init__(what, **fields)
        self.candidates = tuple(candidates)
        """Pairs of a key and the number of names that match those of the module; empty for a directory."""


class TruncatedFileError(OpenError, EOFError, ValueError, page="damaged-file", remedy=CUT_SHORT):
    """The file is empty, or has fewer bytes than its header announces."""


class DamagedFileError(OpenError, ValueError, page="damaged-file", remedy=CUT_SHORT):
    """A header, an index, a zip archive, a pickle or a manifest is damaged, contradicts the file, or leads out of it.

    A header is not the JSON of the format, is too large, leads out of the file, has an unknown dtype or a name twice;
    or shapes and byte ranges of tensors contradict each other, overlap, or leave holes. A record of an archive is
    missing, compressed, of a wrong size, or does not match its checksum.
    """


class ForbiddenGlobalError(OpenError, ValueError, page="forbidden-global"):
    """A pickle that asks for classes or functions outside the allow-list."""

    def __init__(
        self,
        what: str,
        *,
        refused: Sequence[tuple[str, str]] = (),
        allow: Sequence[str] = (),
        **fields: Unpack[ErrorFields],
    ) -> None:
        super().__init__(what, **fields)
        self.refused = tuple(refused)
        """The refused globals: pairs of qualified name and path in the checkpoint."""
        self.allow = tuple(allow)
        """The value of `allow=` that would open the file; empty if allowing it would not be safe."""


class UnsupportedTensorError(OpenError, NotImplementedError, page="unknown-format"):
    """A tensor of a kind that modelstate does not read."""


class NewerManifestError(OpenError, ValueError, page="unknown-format", remedy="update modelstate"):
    """A newer version of modelstate wrote the file."""


class CombineError(OpenError, ValueError, page="bad-rule"):
    """Checkpoints cannot be combined, or an adapter does not fit its base."""


class KeyNotFoundError(ModelStateError, KeyError, page="no-checkpoint"):
    """The checkpoint has no tensor of this name, or nothing under this `key=`."""


class ReadFailedError(ModelStateError, OSError, page="reading"):
    """A file or a server cannot be read now, or a file has changed since it was opened."""


class ChecksumError(ModelStateError, ValueError, page="damaged-file"):
    """The bytes of a tensor do not match its checksum, or it has no checksum."""


class ComparisonError(ModelStateError, ValueError, page="argument"):
    """Two checkpoints that are compared have no name in common, or tensors without values."""


class OptionError(ModelStateError, TypeError, ValueError, page="argument"):
    """An argument is invalid."""


class TensorSpecError(ModelStateError, TypeError, AttributeError, page="argument"):
    """A `TensorSpec`, which describes a stored tensor and has no values, is used as the tensor."""


class PackageError(ModelStateError, ImportError, page="argument"):
    """An optional package that this call needs is not installed."""


class BufferNameError(ModelStateError, KeyError, page="argument"):
    """A name that a module cannot take for a lazy buffer."""


class RuleError(ModelStateError, ValueError, page="bad-rule"):
    """A rule that cannot be applied; a version that a schema does not have, or that is unknown."""


class OptimizerStateError(ModelStateError, ValueError, page="optimizer-state"):
    """The state of an optimizer that has no parameter names, or does not fit the parameters."""


class ObjectStateError(ModelStateError, KeyError, TypeError, ValueError, page="objects"):
    """Objects and the state that was saved do not fit together, or the code of an object raised.

    The names or kinds of the objects are others than those whose state was saved, random generators do not take the
    state, or the state of an object cannot be saved.
    """


class PlanError(ModelStateError, RuntimeError, page="names"):
    """A plan that has problems, all of them in `problems`; or a model that has changed since it was planned for."""


class ModelBusyError(ModelStateError, RuntimeError, page="model-code"):
    """Another thread is changing the module, or one that shares tensors with it, and did not finish in time."""


class BackgroundCancelledError(ModelStateError, RuntimeError, page="model-code"):
    """A background load or save that was cancelled has no result; or a thread that follows a store cannot start."""


class BackgroundTimeoutError(ModelStateError, TimeoutError, page="model-code"):
    """A background load or save that has not ended within the given time. It goes on."""


class ModelCodeError(
    ModelStateError,
    RuntimeError,
    page="model-code",
    remedy="see the traceback of the cause",
    options="--debug shows the traceback of the cause",
):
    """The model's own code raised while the model was loaded; its error is the cause."""


@contextmanager
def code_errors(kind: type[ModelStateError], what: str, **fields: Unpack[ErrorFields]) -> Iterator[None]:
    """Turns an exception of code that is not the library's into an error. Errors of modelstate are passed on.

    Args:
        kind: The class of the error. Its `found` is the class and the text of the exception.
        what: What is wrong.
        fields: Further arguments of the error. By default the remedy is to look at the traceback.
    """
    try:
        yield
    except ModelStateError:
        raise
    except Exception as error:
        if "remedy" not in fields:
            see = ModelCodeError._class_remedy
            fields["remedy"], fields["options"] = see.text, see.options or ""
        fields["found"] = f"{type(error).__name__}: {error}"
        raise kind(what, **fields) from error


class ExtraStateError(ModelStateError, ValueError, page="objects"):
    """Declared extra state cannot be saved or loaded. The module's attributes are unchanged.

    The value is not that of a declaration; names are missing or not declared; the version is not accepted; an
    attribute does not exist, cannot be set, or is in the state dict already; or an `upgrade` failed.
    """


class TransformError(ModelStateError, ValueError, page="bad-rule"):
    """A transform raised, or returned something that cannot be loaded."""


class PlacementError(ModelStateError, RuntimeError, page="cannot-be-placed"):
    """A value cannot be put into its tensor, or a tensor cannot become another one."""


class RollbackError(ModelStateError, RuntimeError, page="model-code"):
    """After a failure, a part of the model could not be restored."""


class MemoryBudgetError(ModelStateError, MemoryError, page="memory-budget"):
    """A call would need more memory than its budget allows."""


class DistributedError(ModelStateError, RuntimeError, ValueError, page="sharded-models"):
    """A call on a model that is spread over several ranks. The models of all ranks are as before.

    The layout of a DTensor cannot be loaded; the process group is missing or is not that of the mesh; or the ranks were
    given different sources, rules, options or models.
    """


class RankLostError(DistributedError, TimeoutError):
    """A rank has not taken part in time: it has died, hangs, or has not called."""


class CodecError(ModelStateError, ValueError, page="objects"):
    """A value has no encoding, or an encoding is damaged."""


class UnknownClassError(CodecError):
    """The class of an encoded value is not imported, not registered, of another kind, or has other fields."""


class SaveError(ModelStateError, page="cannot-be-saved"):
    """A state that cannot be saved."""


class UnsavableError(SaveError, TypeError, ValueError):
    """The object, its tensors or their names cannot be saved, or the path cannot be that of a file."""


class TargetExistsError(
    SaveError,
    FileExistsError,
    remedy="take another path, or overwrite=True to replace it",
    options="another path, or --overwrite to replace it",
):
    """The file or the step exists already, and may not be replaced."""


class WriteFailedError(SaveError, OSError):
    """An I/O error while a file was written, or a directory that cannot be written to.

    The previous file is intact, unless the error says that the new one is in its place.
    """


class StoreError(ModelStateError, page="store"):
    """A store of checkpoints that lacks what is requested, or cannot take what is saved."""


class LockedError(SaveError, StoreError, TimeoutError, page="cannot-be-saved"):
    """Another process or thread writes to the directory or the store. What was there before is intact."""


class StepNotFoundError(StoreError, KeyError):
    """The store has no checkpoint of this step, no checkpoint at all, or not this object in it."""


class DamagedCheckpointError(StoreError, ValueError):
    """A checkpoint of a store differs from what was saved, or is from another store or step."""


class StoreMovedError(StoreError, OSError, page="store"):
    """The directory of a store is no longer at its path."""


class ExportError(ModelStateError, RuntimeError, ValueError, page="export"):
    """A module cannot be exported to a program with the same outputs and swappable weights. No file is written."""


class NameMapError(ModelStateError, ValueError, page="export"):
    """Names of a state dict cannot be mapped to those of the module as it runs."""


class LiveError(ModelStateError, page="live"):
    """An operation on a program that is being served. The version that served goes on serving."""


class LiveTargetError(LiveError, TypeError, page="live"):
    """A program that cannot be served, or that cannot be duplicated for a second version."""


class ProgramInputError(LiveError, ValueError, page="live"):
    """The inputs of a request are not those that the program was exported for. Nothing has been computed."""


class WeightsError(LiveError, ValueError, page="live"):
    """The served program cannot take these weights.

    They have another dtype or class than the program's, have NaN or infinity where the weights that serve are finite,
    or are constants of the compiled program.
    """


class CanaryError(
    LiveError,
    ValueError,
    page="live",
    remedy="nothing has been changed; look at the new weights, or at the canary's conditions",
):
    """The new version raised on the canary's inputs, or its answer was not accepted."""


class SwapBusyError(LiveError, TimeoutError):
    """Another swap is under way, or did not end in time, or the version was rolled back meanwhile."""


class VersionGoneError(LiveError, LookupError):
    """A version that is no longer kept, a block that has ended, or a target that has no weights yet."""


class SkippedCheckpointError(LiveError, ValueError, page="store"):
    """A checkpoint of a followed store is skipped, and not tried again. Its cause says why."""

    def __init__(self, what: str, *, step: int | None = None, **fields: Unpack[ErrorFields]) -> None:
        super().__init__(what, **fields)
        self.step = step
        """The step of the checkpoint."""


class SaveFailedWarning(UserWarning):
    """A background save has failed. Training goes on, and the next save saves everything."""


class DamagedCheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped, and an older one was restored."""


class ResumeWarning(UserWarning):
    """A run that is resumed from a checkpoint would differ from an uninterrupted run."""


class CacheWarning(UserWarning):
    """A `Cache` cannot be written. What is read of remote files is no longer kept."""


class FollowWarning(UserWarning):
    """A problem while a store is followed without `on_error`."""
