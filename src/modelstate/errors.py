"""The errors and warnings of modelstate.

A message says what is wrong and where, what was expected, what was found, and what to do next. The same facts are
fields of the error, so that a program need not parse the text. A call that raises leaves files and models unchanged.

ModelStateError
├── OpenError                         a source that cannot be opened as a checkpoint
│   ├── SourceNotFoundError           (FileNotFoundError)
│   ├── SourceAccessError             (PermissionError)
│   ├── SourceTypeError               (TypeError) neither a path nor a mapping, or a URL of an unknown scheme
│   ├── EmptyFileError                (ValueError)
│   ├── UnknownFormatError            (ValueError) the content is not of a known format
│   │   ├── LfsPointerError           a Git LFS pointer in place of the file
│   │   ├── HtmlPageError             a web page in place of the file
│   │   └── NotACheckpointError       a known file of another kind: TorchScript, plain pickle, GGUF, ...
│   ├── NoCheckpointError             (FileNotFoundError) a directory without a checkpoint
│   ├── AmbiguousDirectoryError       (ValueError) a directory with several checkpoints
│   ├── TruncatedFileError            (EOFError) fewer bytes than the file itself announces
│   ├── HeaderLengthError             (ValueError) safetensors: length beyond the file
│   ├── HeaderTooLargeError           (ValueError) safetensors: above 100 MB
│   ├── HeaderSyntaxError             (ValueError) safetensors: not JSON of the expected form
│   ├── DuplicateNameError            (ValueError) a name twice in a file, or in two shards
│   ├── UnknownDtypeError             (ValueError)
│   ├── TensorRangeError              (ValueError) a tensor's bytes overlap, leave holes or leave the file
│   ├── TensorSizeError               (ValueError) shape times dtype is not the size of the range, or overflows
│   ├── ArchiveError                  (ValueError) a damaged zip container
│   │   ├── MissingRecordError
│   │   ├── CompressedRecordError
│   │   ├── RecordSizeError           sizes that contradict each other or the file
│   │   └── UnsafePathError           a path that leaves the archive, or a shard outside its directory
│   ├── PickleError                   (ValueError) a damaged pickle
│   ├── ForbiddenGlobalError          (ValueError) a pickle that asks for more than is allowed
│   ├── UnsupportedTensorError        (NotImplementedError) quantized tensors and the like, by name
│   ├── ManifestError                 (ValueError) the manifest of `modelstate.save` is damaged
│   │   └── NewerManifestError        written by a newer version
│   ├── ShardIndexError               (ValueError) a damaged shard index
│   ├── MissingShardError             (FileNotFoundError)
│   └── CombineError                  (ValueError) checkpoints that cannot be combined
│       └── AdapterError              an adapter that does not fit its base
├── TensorNotFoundError               (KeyError)
├── KeyNotFoundError                  (KeyError) `key=` selects nothing
├── AmbiguousKeyError                 (ValueError) several state dicts that fit equally well
├── ReadFailedError                   (OSError) an I/O error or a short read while tensors were read
├── ReadTargetError                   (ValueError) `read_into` a tensor that does not fit
├── ChecksumError                     (ValueError) bytes that do not match their checksum, or have none
├── OptionError                       (TypeError) an invalid argument
├── TensorSpecError                   (TypeError, AttributeError) a `TensorSpec` is used as a tensor
├── PackageError                      (ImportError) a package that is needed is not installed
├── BufferNameError                   (KeyError) a name that a module cannot take for a lazy buffer
├── RuleError                         (ValueError) a rule that cannot be applied
├── SchemaError                       (ValueError) a checkpoint whose version is unknown
├── OptimizerStateError               (ValueError) the state of an optimizer that does not fit
├── RandomStateError                  (ValueError) a state that random generators reject
├── StoreError                        a store of checkpoints
│   ├── StepNotFoundError             (KeyError) a step, or an object in it, that does not exist
│   ├── StepExistsError               (FileExistsError) a step that exists already
│   ├── DamagedCheckpointError        (ValueError) a checkpoint that differs from what was saved
│   ├── ForeignCheckpointError        (ValueError) a checkpoint of another store, or of another step
│   ├── StoreLockedError              (RuntimeError) a store that another process writes to
│   └── StoreAccessError              (OSError) a store's directory that is not writable, or has no locks
│       └── StoreMovedError           it was renamed, removed or replaced while the store was in use
├── PlanError                         (RuntimeError) a plan that has problems; see `.problems`
├── ObjectsError                      objects whose state cannot be saved or restored together
│   ├── MissingObjectError            (KeyError) an object without saved state
│   ├── UnexpectedObjectError         (KeyError) saved state without an object
│   ├── ObjectKindError               (TypeError) an object of another kind than the saved one
│   └── ObjectStateError              (RuntimeError) an object's code raised while its state was saved or loaded
├── StalePlanError                    (RuntimeError) the slots of the model are not those that the plan was made for
├── BackgroundCancelledError          (RuntimeError) a background load or save that was cancelled
├── BackgroundTimeoutError            (TimeoutError) a background load or save that has not ended in time
├── ModelCodeError                    (RuntimeError) a hook, an override or `set_extra_state` of the model raised
├── ExtraStateError                   (ValueError) declared extra state that cannot be saved or loaded
│   ├── ExtraStateFormatError         a value that no declaration saves
│   ├── ExtraStateNamesError          names that are missing, or not declared
│   ├── ExtraStateVersionError        a version that the class does not accept
│   ├── ExtraStateAttributeError      an attribute that is missing, read-only, or in the state dict already
│   └── UpgradeError                  an `upgrade` that raised, or returned no mapping
├── TransformError                    (ValueError) a transform that raised, or returned something unusable
├── PlacementError                    (RuntimeError) a value that cannot be put into its tensor
├── RollbackError                     (RuntimeError) after a failure something could not be restored
├── CodecError                        (ValueError) a value that cannot be encoded or decoded
│   ├── UnsupportedValueError         a value of a kind that has no encoding
│   ├── EncodedValueError             an encoding that is damaged
│   ├── UnknownClassError             its class is not imported, not registered, or has other fields
│   └── CodecNameError                a name that belongs to another class
├── SaveError                         a state that cannot be saved
│   ├── SaveTargetError               (TypeError) not a module or flat state dict, or not the path of a file
│   ├── UnsavableError                (ValueError) tensors or names that the format cannot hold
│   ├── TargetExistsError             (FileExistsError) a file that may not be replaced
│   ├── DirectoryLockedError          (TimeoutError) another process holds the lock of the directory
│   └── WriteFailedError              (OSError) an I/O error; the previous file is intact
├── ExportError                       (RuntimeError) a module that cannot be exported
│   ├── ExportedAnswerError           (ValueError) the program's outputs differ from the module's
│   └── NotSwappableError             (ValueError) weights that cannot be swapped in the program
├── NameMapError                      (ValueError) names that cannot be mapped to those of the running module
├── LiveError                         a program that is being served
│   ├── LiveTargetError               (TypeError) a program that cannot be served, or not in versions
│   ├── ProgramInputError             (ValueError) inputs that the program was not exported for
│   ├── WeightsError                  (ValueError) weights that the program cannot take
│   │   ├── WeightDtypeError          they would have to be cast
│   │   ├── WeightKindError           they are sparse, or of a tensor subclass
│   │   ├── WeightStrideError         their elements lie in another order
│   │   ├── WeightStorageError        they are parts of a larger storage
│   │   ├── NonFiniteWeightError      NaN or infinity
│   │   └── FixedWeightError          they are constants of the compiled program, or not in it
│   ├── CanaryError                   (ValueError) the new version failed on the canary's inputs
│   ├── SwapBusyError                 (RuntimeError) another swap is under way
│   ├── SwapTimeoutError              (TimeoutError) requests, or another swap, did not end in time
│   ├── VersionGoneError              (LookupError) a version that is no longer kept
│   ├── QuarantinedError              (RuntimeError) no version can serve: an undo failed
│   ├── SkippedCheckpointError        (ValueError) a checkpoint of a followed store is skipped
│   ├── AppUnreachableError           (ConnectionError) a serving app that is not reachable now
│   ├── AppAnswerError                (RuntimeError) a serving app gave no answer, or an invalid one
│   ├── AppAccessError                (PermissionError) a serving app refuses the token or the path
│   └── AppRefusedError               (ValueError) a serving app refuses a checkpoint
├── SwapError                         (RuntimeError) a tensor that something else holds, which would keep its old value
├── ModelBusyError                    (RuntimeError) another thread is changing the model
└── MemoryBudgetError                 (MemoryError)
"""

from collections.abc import Sequence
from typing import Any, ClassVar


class ModelStateError(Exception):
    """The base class of all errors of modelstate.

    The text has one line for each field that is set; the last line names the page about the error.

    Args:
        what: what is wrong, in one sentence.
        where: the file and the place in it, or the place in the model.
        expected: what was expected.
        found: what was found.
        remedy: what to do next.

    Example:
        >>> try:
        ...     ms.load(model, "missing.pt")
        ... except ms.ModelStateError as error:
        ...     print(error.where, error.remedy)
    """

    page: ClassVar[str] = ""
    """The page that shows the cause and the fix: `modelstate explain PAGE` prints it."""

    def __init_subclass__(cls, *, page: str = "", **options: object) -> None:
        super().__init_subclass__(**options)
        cls.page = page or cls.page

    def __init__(
        self, what: str, *, where: object = "", expected: object = "", found: object = "", remedy: object = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        """What is wrong, in one sentence."""
        self.where = str(where)
        """The file and the place in it, or the place in the model."""
        self.expected = str(expected)
        """What was expected."""
        self.found = str(found)
        """What was found."""
        self.remedy = str(remedy)
        """What to do next."""

    @property
    def has_fields(self) -> bool:
        """Whether the fields are set. A subclass may have a constructor that does not call this one."""
        return "what" in self.__dict__

    def __str__(self) -> str:
        if not self.has_fields:
            return super().__str__()
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        lines += [f"  {k}: {v}" for k, v in (("expected", self.expected), ("found", self.found)) if v]
        if self.remedy:
            lines.append(f"  to do: {self.remedy}")
        return "\n".join(lines + self._more())

    def _more(self) -> list[str]:
        return [f"  more: modelstate explain {self.page}"] if self.page else []


class OpenError(ModelStateError, page="no-checkpoint"):
    """A source that cannot be opened as a checkpoint."""


class SourceNotFoundError(OpenError, FileNotFoundError):
    """The path does not exist."""


class SourceAccessError(OpenError, PermissionError):
    """The file or directory may not be read."""


class SourceTypeError(OpenError, TypeError, page="argument"):
    """The source is of a kind that cannot be opened."""


class EmptyFileError(OpenError, ValueError, page="truncated-file"):
    """The file has no bytes."""


class UnknownFormatError(OpenError, ValueError, page="unknown-format"):
    """The content is not of a format that modelstate reads."""


class LfsPointerError(UnknownFormatError):
    """The file is a Git LFS pointer, and not the file itself."""


class HtmlPageError(UnknownFormatError):
    """The file is a web page, and not a checkpoint."""


class NotACheckpointError(UnknownFormatError):
    """A file of a known kind that does not hold a checkpoint."""


class NoCheckpointError(OpenError, FileNotFoundError):
    """A directory that holds no checkpoint."""


class AmbiguousDirectoryError(OpenError, ValueError, page="several-checkpoints"):
    """A directory that holds several checkpoints."""


class TruncatedFileError(OpenError, EOFError, page="truncated-file"):
    """The file has fewer bytes than its header announces."""


class HeaderLengthError(OpenError, ValueError, page="damaged-header"):
    """A safetensors header that is longer than the file."""


class HeaderTooLargeError(OpenError, ValueError, page="damaged-header"):
    """A safetensors header above the 100 MB that the format allows."""


class HeaderSyntaxError(OpenError, ValueError, page="damaged-header"):
    """A safetensors header that is not JSON, or not of the expected form."""


class DuplicateNameError(OpenError, ValueError, page="damaged-header"):
    """A name occurs twice in a file, or in two shards."""


class UnknownDtypeError(OpenError, ValueError, page="damaged-header"):
    """A dtype that this version of PyTorch does not have."""


class TensorRangeError(OpenError, ValueError, page="damaged-header"):
    """The bytes of a tensor overlap others, leave holes, or lie outside the file."""


class TensorSizeError(OpenError, ValueError, page="damaged-header"):
    """Shape times dtype is not the number of bytes, or overflows."""


class ArchiveError(OpenError, ValueError, page="damaged-archive"):
    """A zip container that is damaged."""


class MissingRecordError(ArchiveError):
    """A record that the archive needs is not in it."""


class CompressedRecordError(ArchiveError):
    """A record is compressed, so its bytes cannot be mapped or bounded."""


class RecordSizeError(ArchiveError):
    """The sizes of a record in the archive contradict each other or the file."""


class UnsafePathError(ArchiveError):
    """A path that leads out of the archive, or out of the directory of a shard index."""


class PickleError(OpenError, ValueError, page="damaged-archive"):
    """A pickle that is damaged."""


class ForbiddenGlobalError(OpenError, ValueError, page="forbidden-global"):
    """A pickle that asks for classes or functions outside the allow-list."""

    def __init__(
        self,
        what: str,
        *,
        refused: Sequence[tuple[str, str]] = (),
        allow: Sequence[str] = (),
        **fields: object,
    ) -> None:
        super().__init__(what, **fields)
        self.refused = tuple(refused)
        """The refused globals: pairs of qualified name and path in the checkpoint."""
        self.allow = tuple(allow)
        """The value of `allow=` that would open the file; empty if allowing it would not be safe."""


class UnsupportedTensorError(OpenError, NotImplementedError, page="unsupported-tensor"):
    """A tensor of a kind that modelstate does not read."""


class ManifestError(OpenError, ValueError, page="damaged-manifest"):
    """The manifest that `modelstate.save` puts into a file beside its tensors is damaged."""


class NewerManifestError(ManifestError):
    """The file was written by a version of modelstate that is newer than this one."""


class ShardIndexError(OpenError, ValueError, page="missing-shard"):
    """A shard index that is damaged."""


class MissingShardError(OpenError, FileNotFoundError, page="missing-shard"):
    """A shard that the index names does not exist."""


class CombineError(OpenError, ValueError, page="combine"):
    """Several checkpoints that cannot be combined."""


class AdapterError(CombineError):
    """An adapter that does not fit its base, or is of a kind that modelstate does not merge."""


class TensorNotFoundError(ModelStateError, KeyError, page="no-such-key"):
    """The checkpoint has no tensor of this name."""


class KeyNotFoundError(ModelStateError, KeyError, page="no-such-key"):
    """`key=` does not name a part of the checkpoint."""


class AmbiguousKeyError(ModelStateError, ValueError, page="several-checkpoints"):
    """The checkpoint holds several state dicts that fit equally well."""

    def __init__(self, what: str, *, candidates: Sequence[tuple[str, int]] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.candidates = tuple(candidates)
        """Pairs of a key and the number of names that match those of the module."""


class ReadFailedError(ModelStateError, OSError, page="file-changed"):
    """An I/O error while tensors were read, or fewer bytes than when the file was opened."""


class ReadTargetError(ModelStateError, ValueError, page="argument"):
    """The tensor to read into does not fit the stored one."""


class ChecksumError(ModelStateError, ValueError, page="checksum"):
    """The bytes of a tensor do not match its checksum, or it has no checksum."""


class OptionError(ModelStateError, TypeError, page="argument"):
    """An invalid argument."""


class TensorSpecError(ModelStateError, TypeError, AttributeError, page="not-a-tensor"):
    """A `TensorSpec`, which describes a stored tensor and has no values, is used as the tensor."""


class PackageError(ModelStateError, ImportError, page="missing-package"):
    """An optional package that this call needs is not installed."""


class BufferNameError(ModelStateError, KeyError, page="attribute-already-exists"):
    """A name that a module cannot take for a lazy buffer."""


class RuleError(ModelStateError, ValueError, page="bad-rule"):
    """A rule that cannot be applied."""


class SchemaError(ModelStateError, ValueError, page="schema-version"):
    """A version that a schema does not have, or a checkpoint whose version is unknown."""


class OptimizerStateError(ModelStateError, ValueError, page="optimizer-state"):
    """The state of an optimizer that has no parameter names, or does not fit the parameters."""


class RandomStateError(ModelStateError, ValueError, page="random-state"):
    """A state that does not fit these random generators, which are unchanged."""


class StoreError(ModelStateError, page="store"):
    """A store of checkpoints that lacks what is requested, or cannot take what is saved."""


class StepNotFoundError(StoreError, KeyError):
    """The store has no checkpoint of this step, no checkpoint at all, or not this object in it."""


class StepExistsError(StoreError, FileExistsError):
    """The store has a checkpoint of this step already."""


class DamagedCheckpointError(StoreError, ValueError):
    """A checkpoint of a store differs from what was saved."""


class ForeignCheckpointError(StoreError, ValueError):
    """A checkpoint in a store's directory belongs to another store or another step."""


class SaveFailedWarning(UserWarning):
    """A background save has failed. Training goes on, and the next save saves everything."""


class DamagedCheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped, and an older one was restored."""


class ResumeWarning(UserWarning):
    """A run that is resumed from a checkpoint would differ from an uninterrupted run."""


class StoreLockedError(StoreError, RuntimeError, page="store-locked"):
    """Another process or thread writes to the store."""


class StoreAccessError(StoreError, OSError, page="store-locked"):
    """The directory of a store cannot be written to, or its file system has no locks."""


class StoreMovedError(StoreAccessError, page="store-moved"):
    """The directory of a store is no longer at its path."""


class ObjectsError(ModelStateError, page="objects"):
    """Objects whose state cannot be saved, or restored, together."""


class MissingObjectError(ObjectsError, KeyError):
    """An object has no saved state."""


class UnexpectedObjectError(ObjectsError, KeyError):
    """There is saved state for an object that does not exist now."""


class ObjectKindError(ObjectsError, TypeError):
    """An object is of another kind than the one whose state was saved."""


class ObjectStateError(ObjectsError, RuntimeError):
    """An object's code raised while its state was saved or loaded, or its state cannot be saved."""


class PlanError(ModelStateError, RuntimeError, page="plan-problems"):
    """A plan that has problems, all of them in `problems`."""

    def __init__(self, what: str, *, problems: Sequence[Any] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.problems = tuple(problems)
        """The problems, each a `modelstate.problems.Problem`."""

    def _more(self) -> list[str]:
        # The text has the problems by their causes, each with its page.
        return [] if self.problems else super()._more()


class StalePlanError(ModelStateError, RuntimeError, page="stale-plan"):
    """The slots of the model are not those that the plan was made for."""


class ModelBusyError(ModelStateError, RuntimeError, page="model-busy"):
    """Another thread is changing the module, or one that shares tensors with it, and did not finish in time."""


class BackgroundCancelledError(ModelStateError, RuntimeError, page="background"):
    """A background load or save that was cancelled has no result."""


class BackgroundTimeoutError(ModelStateError, TimeoutError, page="background"):
    """A background load or save has not ended within the given time. It goes on."""


class ModelCodeError(ModelStateError, RuntimeError, page="model-code"):
    """The model's own code raised while the model was loaded; its error is the cause."""


class ExtraStateError(ModelStateError, ValueError, page="extra-state"):
    """Declared extra state cannot be saved or loaded. The module's attributes are unchanged."""


class ExtraStateFormatError(ExtraStateError):
    """A value that no declaration saves: it is of another class, or was edited by hand."""


class ExtraStateNamesError(ExtraStateError):
    """The extra state lacks declared names, or has names that are not declared."""

    def __init__(self, what: str, *, names: Sequence[str] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.names = tuple(names)
        """The names that are missing, or not declared."""


class ExtraStateVersionError(ExtraStateError):
    """The extra state is of a newer version than the class, or of an older one without an upgrade."""


class ExtraStateAttributeError(ExtraStateError):
    """A declared attribute does not exist, cannot be set, or is a parameter, a buffer or a module."""


class UpgradeError(ExtraStateError):
    """An `upgrade` raised, or did not return a mapping from names to values."""


class TransformError(ModelStateError, ValueError, page="transform"):
    """A transform raised, or returned something that cannot be loaded."""


class PlacementError(ModelStateError, RuntimeError, page="cannot-be-placed"):
    """A value cannot be put into its tensor."""


class RollbackError(ModelStateError, RuntimeError, page="rollback"):
    """After a failure, a part of the model could not be restored. The only error that leaves a change."""


class CodecError(ModelStateError, ValueError, page="no-encoding"):
    """A value cannot be encoded or decoded."""


class UnsupportedValueError(CodecError):
    """A value that has no encoding, contains itself, or is nested too deeply."""


class EncodedValueError(CodecError):
    """An encoding that is damaged."""


class UnknownClassError(CodecError):
    """The class of an encoded value is not imported, not registered, of another kind, or has other fields."""


class CodecNameError(CodecError):
    """Two classes would have the same name in files."""


class SaveError(ModelStateError, page="cannot-be-saved"):
    """A state that cannot be saved."""


class SaveTargetError(SaveError, TypeError):
    """The object to save is neither a module nor a flat state dict, or the path cannot be that of a file."""


class UnsavableError(SaveError, ValueError):
    """Tensors or names that the format cannot hold, or more of them than it can hold."""


class TargetExistsError(SaveError, FileExistsError):
    """A file exists already, and may not be replaced."""


class DirectoryLockedError(SaveError, TimeoutError):
    """Another process holds the lock of the directory to write to. The previous file is intact."""


class WriteFailedError(SaveError, OSError):
    """An I/O error while a file was written. The previous file is intact."""


class ExportError(ModelStateError, RuntimeError, page="export"):
    """A module that cannot be exported to a program with swappable weights. No file has been written."""

    def __init__(self, what: str, *, names: Sequence[str] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.names = tuple(names)
        """The names of the tensors concerned."""


class ExportedAnswerError(ExportError, ValueError):
    """The outputs of the exported program differ from those of the module."""


class NotSwappableError(ExportError, ValueError):
    """Weights that were compiled into the program, so that swapping them does not change its outputs."""


class NameMapError(ModelStateError, ValueError, page="name-map"):
    """Names of a state dict that cannot be mapped to those of the module as it runs."""

    def __init__(self, what: str, *, names: Sequence[str] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.names = tuple(names)
        """The names concerned."""


class LiveError(ModelStateError, page="live-swap"):
    """An operation on a program that is being served. The version that served goes on serving."""


class LiveTargetError(LiveError, TypeError, page="live-target"):
    """A program that cannot be served, or that cannot be duplicated for a second version."""


class ProgramInputError(LiveError, ValueError, page="program-input"):
    """The inputs of a request are not those that the program was exported for. Nothing has been computed."""


class WeightsError(LiveError, ValueError, page="live-weights"):
    """Weights that the served program cannot take."""

    def __init__(self, what: str, *, names: Sequence[str] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.names = tuple(names)
        """The names of the tensors concerned."""


class WeightDtypeError(WeightsError):
    """Weights of another dtype than the program's."""


class WeightKindError(WeightsError):
    """Weights of another layout than the program's, such as sparse ones, or of a tensor subclass."""


class WeightStrideError(WeightsError):
    """Weights whose elements lie in another order than the program's."""


class WeightStorageError(WeightsError):
    """Weights that are parts of a larger storage."""


class NonFiniteWeightError(WeightsError):
    """Weights with NaN or infinity, where the weights that serve have finite values."""


class FixedWeightError(WeightsError):
    """Weights that a package cannot take: they were inlined when it was compiled, or are not in it."""


class CanaryError(LiveError, ValueError, page="canary"):
    """The new version raised on the canary's inputs, or its answer was not accepted."""


class SwapBusyError(LiveError, RuntimeError):
    """Another swap is under way, or this one was called from within itself."""


class SwapTimeoutError(LiveError, TimeoutError):
    """Another swap, or the requests that have to end first, did not end in time."""


class VersionGoneError(LiveError, LookupError):
    """A version that is no longer kept, or a pin that has ended."""


class QuarantinedError(LiveError, RuntimeError):
    """A swap in place failed, and so did its undo: no version can serve until another swap succeeds."""


class SkippedCheckpointError(LiveError, ValueError, page="following"):
    """A checkpoint of a followed store is skipped, and not tried again. Its cause says why."""

    def __init__(self, what: str, *, step: int | None = None, **fields: object) -> None:
        super().__init__(what, **fields)
        self.step = step
        """The step of the checkpoint."""


class AppUnreachableError(LiveError, ConnectionError, page="serving-app"):
    """A serving app that does not answer, or does not see the path of a checkpoint. It is tried again."""


class AppAnswerError(LiveError, RuntimeError, page="serving-app"):
    """A serving app gave no answer to a swap, or an invalid one."""


class AppAccessError(LiveError, PermissionError, page="serving-app"):
    """A serving app refuses the token, or checkpoints from this directory."""


class AppRefusedError(LiveError, ValueError, page="serving-app"):
    """A serving app refuses a checkpoint, and serves with the same weights as before."""


class FollowWarning(UserWarning):
    """A problem while a store is followed without `on_error`."""


class SwapError(ModelStateError, RuntimeError, page="somebody-holds-it"):
    """A tensor cannot become another one, most often because something else would keep its old value."""


class MemoryBudgetError(ModelStateError, MemoryError, page="memory-budget"):
    """A call would need more memory than its budget allows."""
