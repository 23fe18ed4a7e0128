"""Every error of modelstate.

A message says what is wrong and where, what was expected, what was found, and what to do next. The same facts are
fields of the error, so that a program need not parse the text. Whatever raises leaves files and models as they were.

ModelStateError
├── OpenError                         a source that cannot be opened as a checkpoint
│   ├── SourceNotFoundError           (FileNotFoundError)
│   ├── SourceAccessError             (PermissionError)
│   ├── SourceTypeError               (TypeError) neither a path nor a mapping, or a URL that nothing here reads
│   ├── EmptyFileError                (ValueError)
│   ├── UnknownFormatError            (ValueError) the content is no checkpoint format
│   │   ├── LfsPointerError           a Git LFS pointer in place of the file
│   │   ├── HtmlPageError             a web page in place of the file
│   │   └── NotACheckpointError       a known file of another kind: TorchScript, plain pickle, GGUF, ...
│   ├── NoCheckpointError             (FileNotFoundError) a directory without one
│   ├── AmbiguousDirectoryError       (ValueError) a directory with several
│   ├── TruncatedFileError            (EOFError) fewer bytes than the file itself announces
│   ├── HeaderLengthError             (ValueError) safetensors: length beyond the file
│   ├── HeaderTooLargeError           (ValueError) safetensors: above 100 MB
│   ├── HeaderSyntaxError             (ValueError) safetensors: not the JSON it must be
│   ├── DuplicateNameError            (ValueError) one name twice in a file, or in two shards
│   ├── UnknownDtypeError             (ValueError)
│   ├── TensorRangeError              (ValueError) a tensor's bytes overlap, leave holes or leave the file
│   ├── TensorSizeError               (ValueError) shape times dtype is not the size of the range, or overflows
│   ├── ArchiveError                  (ValueError) a damaged zip container
│   │   ├── MissingRecordError
│   │   ├── CompressedRecordError
│   │   ├── RecordSizeError           sizes that lie
│   │   └── UnsafePathError           a path that leaves the archive, or a shard outside its directory
│   ├── PickleError                   (ValueError) a damaged pickle
│   ├── ForbiddenGlobalError          (ValueError) a pickle that asks for more than is allowed
│   ├── UnsupportedTensorError        (NotImplementedError) quantized tensors and the like, by name
│   ├── ManifestError                 (ValueError) what `modelstate.save` has put into the file is damaged
│   │   └── NewerManifestError        it comes from a newer version
│   ├── ShardIndexError               (ValueError) an index that is not what it must be
│   ├── MissingShardError             (FileNotFoundError)
│   └── CombineError                  (ValueError) checkpoints that cannot be combined
│       └── AdapterError              an adapter that does not fit its base
├── TensorNotFoundError               (KeyError)
├── KeyNotFoundError                  (KeyError) `key=` selects nothing
├── AmbiguousKeyError                 (ValueError) several state dicts, and none stands out
├── ReadFailedError                   (OSError) an I/O error or a short read while tensors were read
├── ReadTargetError                   (ValueError) `read_into` a tensor that does not fit
├── ChecksumError                     (ValueError) bytes that are not what their checksum says, or have none
├── OptionError                       (TypeError) an argument that means nothing
├── TensorSpecError                   (TypeError, AttributeError) a description of a tensor is used as the tensor
├── PackageError                      (ImportError) a package that is needed and is not there
├── BufferNameError                   (KeyError) a name that a module cannot take for a lazy buffer
├── RuleError                         (ValueError) a rule that cannot be applied
├── SchemaError                       (ValueError) a checkpoint whose version a schema does not know
├── OptimizerStateError               (ValueError) the state of an optimizer that does not fit
├── RandomStateError                  (ValueError) a state that random generators do not take
├── StoreError                        a store of checkpoints
│   ├── StepNotFoundError             (KeyError) a step, or an object in it, that is not there
│   ├── StepExistsError               (FileExistsError) a step that is there already
│   ├── DamagedCheckpointError        (ValueError) a checkpoint that is not what was saved
│   ├── ForeignCheckpointError        (ValueError) a checkpoint of another store, or of another step
│   ├── SaveTimeoutError              (TimeoutError) a save in the background that is not done in time
│   ├── StoreLockedError              (RuntimeError) a store that somebody else writes to
│   └── StoreAccessError              (OSError) a store's directory that cannot be written to, or has no locks
│       └── StoreMovedError           it was renamed, removed or replaced while the store was in use
├── PlanError                         (RuntimeError) a plan that has problems; see `.problems`
├── ObjectsError                      objects whose state cannot be saved or restored together
│   ├── MissingObjectError            (KeyError) an object that nothing was saved for
│   ├── UnexpectedObjectError         (KeyError) something was saved for an object that is not there
│   ├── ObjectKindError               (TypeError) an object of another kind than what was saved
│   └── ObjectStateError              (RuntimeError) code of an object raised when its state was taken or given
├── StalePlanError                    (RuntimeError) the model is no longer what was planned for
├── LoadCancelledError                (RuntimeError) the result of a load in the background that was cancelled
├── LoadTimeoutError                  (TimeoutError) a load in the background that is not done in time
├── ModelCodeError                    (RuntimeError) a hook, an override or `set_extra_state` of the model raised
├── ExtraStateError                   (ValueError) declared extra state that cannot be saved or loaded
│   ├── ExtraStateFormatError         a value that is not what a declaration saves
│   ├── ExtraStateNamesError          names that are missing, or that nothing declares
│   ├── ExtraStateVersionError        a version that the class does not take
│   ├── ExtraStateAttributeError      an attribute that is not there, cannot be set, or is in the state dict already
│   └── UpgradeError                  an `upgrade` that raised, or returned no values
├── TransformError                    (ValueError) a transform that raised, or returned something unusable
├── PlacementError                    (RuntimeError) a value that cannot be put in its place
├── RollbackError                     (RuntimeError) after a failure something could not be made what it was
├── CodecError                        (ValueError) a value that cannot be encoded, or made of its encoding
│   ├── UnsupportedValueError         a value of a kind that has no encoding
│   ├── EncodedValueError             an encoding that is damaged
│   ├── UnknownClassError             its class is not imported, not registered, or has other fields
│   └── CodecNameError                a name that belongs to another class
├── SaveError                         a state that cannot be saved
│   ├── SaveTargetError               (TypeError) no module or flat state dict, or no path of a file
│   ├── UnsavableError                (ValueError) tensors or names that the format does not have
│   ├── TargetExistsError             (FileExistsError) a file that may not be replaced
│   ├── DirectoryLockedError          (TimeoutError) another process keeps the directory locked
│   └── WriteFailedError              (OSError) an I/O error; what was there before still is
├── ExportError                       (RuntimeError) a module of which no program can be made
│   ├── ExportedAnswerError           (ValueError) the program does not answer as the module does
│   └── NotSwappableError             (ValueError) weights whose change the program does not follow
├── NameMapError                      (ValueError) names that cannot be led to those of the running module
├── LiveError                         a program that is being served
│   ├── LiveTargetError               (TypeError) what cannot be served, or not in versions
│   ├── ProgramInputError             (ValueError) inputs that the program was not exported for
│   ├── WeightsError                  (ValueError) weights that may not go into the program
│   │   ├── WeightDtypeError          they would have to be cast
│   │   ├── WeightKindError           they are sparse, or of a class of their own
│   │   ├── WeightStrideError         their elements lie in another order
│   │   ├── WeightStorageError        they are parts of a larger storage
│   │   ├── NonFiniteWeightError      NaN or infinity
│   │   └── FixedWeightError          they are a part of the compiled program, or no part of it
│   ├── CanaryError                   (ValueError) the new version failed on the canary's inputs
│   ├── SwapBusyError                 (RuntimeError) another swap is under way
│   ├── SwapTimeoutError              (TimeoutError) requests, or another swap, did not end in time
│   ├── VersionGoneError              (LookupError) a version that is not kept any more
│   ├── QuarantinedError              (RuntimeError) no version can serve: an undo failed
│   ├── SkippedCheckpointError        (ValueError) a checkpoint of a store that is followed is not taken up
│   ├── AppUnreachableError           (ConnectionError) a serving app that cannot take a checkpoint now
│   ├── AppAnswerError                (RuntimeError) a serving app gave no answer, or one that is none
│   ├── AppAccessError                (PermissionError) a serving app does not take the token, or the path
│   └── AppRefusedError               (ValueError) a serving app refuses a checkpoint
├── SwapError                         (RuntimeError) a tensor that somebody holds, who would go on with what it was
├── ModelBusyError                    (RuntimeError) another thread changes the model
└── MemoryBudgetError                 (MemoryError)
"""

from collections.abc import Sequence
from typing import Any, ClassVar


class ModelStateError(Exception):
    """What every error of modelstate derives from.

    The text is made of the fields, a line each where they are given; the last line names the page about the error.
    """

    page: ClassVar[str] = ""
    """The page that shows the cause and the fix: `modelstate explain PAGE` prints it."""

    def __init_subclass__(cls, *, page: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.page = page or cls.page

    def __init__(
        self, what: str, *, where: object = "", expected: object = "", found: object = "", remedy: object = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        """What is wrong, in one sentence."""
        self.where = str(where)
        """The file, and the place in it; or the place in the model."""
        self.expected = str(expected)
        """What should have been there."""
        self.found = str(found)
        """What was there."""
        self.remedy = str(remedy)
        """What to do next."""

    @property
    def has_fields(self) -> bool:
        """Whether the fields are set: a subclass may have a constructor that does not call this one."""
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
    """There is nothing at the path."""


class SourceAccessError(OpenError, PermissionError):
    """The file or directory may not be read."""


class SourceTypeError(OpenError, TypeError, page="argument"):
    """The source is of a kind that cannot be opened."""


class EmptyFileError(OpenError, ValueError, page="truncated-file"):
    """The file has no bytes."""


class UnknownFormatError(OpenError, ValueError, page="unknown-format"):
    """The content is none of the formats that are read here."""


class LfsPointerError(UnknownFormatError):
    """A Git LFS pointer lies where the file should be."""


class HtmlPageError(UnknownFormatError):
    """A web page was saved where the file should be."""


class NotACheckpointError(UnknownFormatError):
    """A file of a known kind that does not hold a checkpoint."""


class NoCheckpointError(OpenError, FileNotFoundError):
    """A directory in which nothing is a checkpoint."""


class AmbiguousDirectoryError(OpenError, ValueError, page="several-checkpoints"):
    """A directory in which several files could be meant."""


class TruncatedFileError(OpenError, EOFError, page="truncated-file"):
    """The file ends before what it announces."""


class HeaderLengthError(OpenError, ValueError, page="damaged-header"):
    """A safetensors header that would end behind the end of the file."""


class HeaderTooLargeError(OpenError, ValueError, page="damaged-header"):
    """A safetensors header above the 100 MB that the format allows."""


class HeaderSyntaxError(OpenError, ValueError, page="damaged-header"):
    """A safetensors header that is not JSON, or not the JSON that it must be."""


class DuplicateNameError(OpenError, ValueError, page="damaged-header"):
    """One name stands twice in a file, or in two shards."""


class UnknownDtypeError(OpenError, ValueError, page="damaged-header"):
    """A dtype that PyTorch does not have, or not in this version."""


class TensorRangeError(OpenError, ValueError, page="damaged-header"):
    """The bytes of a tensor overlap others, leave holes, or lie outside the file."""


class TensorSizeError(OpenError, ValueError, page="damaged-header"):
    """Shape times dtype does not give the number of bytes that are there, or no number at all."""


class ArchiveError(OpenError, ValueError, page="damaged-archive"):
    """A zip container that is damaged."""


class MissingRecordError(ArchiveError):
    """A record that the archive needs is not in it."""


class CompressedRecordError(ArchiveError):
    """A record is compressed, so its bytes cannot be mapped or bounded."""


class RecordSizeError(ArchiveError):
    """The sizes that the archive states of a record contradict each other or the file."""


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
        """What was asked for: pairs of qualified name and path in the checkpoint."""
        self.allow = tuple(allow)
        """What `allow=` would have to hold to open it; nothing where that would not be right."""


class UnsupportedTensorError(OpenError, NotImplementedError, page="unsupported-tensor"):
    """A tensor of a kind that is not read here."""


class ManifestError(OpenError, ValueError, page="damaged-manifest"):
    """What `modelstate.save` has put into a file beside its tensors is damaged."""


class NewerManifestError(ManifestError):
    """The file was written by a version of modelstate that is newer than this one."""


class ShardIndexError(OpenError, ValueError, page="missing-shard"):
    """A shard index that is not what it must be."""


class MissingShardError(OpenError, FileNotFoundError, page="missing-shard"):
    """A shard that the index names is not there."""


class CombineError(OpenError, ValueError, page="combine"):
    """Several checkpoints that cannot be combined as they should be."""


class AdapterError(CombineError):
    """An adapter that does not fit its base, or that is of a kind which is not merged here."""


class TensorNotFoundError(ModelStateError, KeyError, page="no-such-key"):
    """The checkpoint has no tensor of that name."""


class KeyNotFoundError(ModelStateError, KeyError, page="no-such-key"):
    """`key=` names no part of the checkpoint."""


class AmbiguousKeyError(ModelStateError, ValueError, page="several-checkpoints"):
    """The checkpoint holds several state dicts, and which one is meant is not clear."""

    def __init__(self, what: str, *, candidates: Sequence[tuple[str, int]] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.candidates = tuple(candidates)
        """Pairs of key, and number of names that match the module's."""


class ReadFailedError(ModelStateError, OSError, page="file-changed"):
    """An I/O error, or fewer bytes than there were at opening, while tensors were read."""


class ReadTargetError(ModelStateError, ValueError, page="argument"):
    """The tensor to read into does not fit what is read."""


class ChecksumError(ModelStateError, ValueError, page="checksum"):
    """The bytes of a tensor are not what its checksum says; or there is no checksum to tell."""


class OptionError(ModelStateError, TypeError, page="argument"):
    """An argument of a kind that means nothing here."""


class TensorSpecError(ModelStateError, TypeError, AttributeError, page="not-a-tensor"):
    """A `TensorSpec`, which describes a stored tensor and has no values, is used as the tensor."""


class PackageError(ModelStateError, ImportError, page="missing-package"):
    """A package that this needs, and modelstate itself does not, is not installed."""


class BufferNameError(ModelStateError, KeyError, page="attribute-already-exists"):
    """A name that a module cannot take for a lazy buffer."""


class RuleError(ModelStateError, ValueError, page="bad-rule"):
    """A rule that cannot be applied."""


class SchemaError(ModelStateError, ValueError, page="schema-version"):
    """A version that is none of a schema's, or a checkpoint of which nothing says its version."""


class OptimizerStateError(ModelStateError, ValueError, page="optimizer-state"):
    """The state of an optimizer that goes by no names, or does not fit the parameters."""


class RandomStateError(ModelStateError, ValueError, page="random-state"):
    """A state that is none of these random generators. They draw what they would have drawn."""


class StoreError(ModelStateError, page="store"):
    """A store of checkpoints that does not have what was asked for, or cannot take it."""


class StepNotFoundError(StoreError, KeyError):
    """The store has no checkpoint of this step, or none at all, or not this object in it."""


class StepExistsError(StoreError, FileExistsError):
    """The store has a checkpoint of this step already."""


class DamagedCheckpointError(StoreError, ValueError):
    """A checkpoint of a store is not what was saved."""


class ForeignCheckpointError(StoreError, ValueError):
    """A checkpoint in a store's directory is that of another store, or of another step."""


class SaveTimeoutError(StoreError, TimeoutError):
    """A save in the background that is not done in time."""


class SaveFailedWarning(UserWarning):
    """A save in the background has failed; training goes on, and the next one saves all of it."""


class DamagedCheckpointWarning(UserWarning):
    """A damaged checkpoint was passed over, and an older one was restored."""


class ResumeWarning(UserWarning):
    """A run that is resumed from a checkpoint would differ from an uninterrupted run."""


class StoreLockedError(StoreError, RuntimeError, page="store-locked"):
    """Somebody else writes to the store."""


class StoreAccessError(StoreError, OSError, page="store-locked"):
    """The directory of a store cannot be written to, or its file system has no locks."""


class StoreMovedError(StoreAccessError, page="store-moved"):
    """The directory of a store is no longer at its path."""


class ObjectsError(ModelStateError, page="objects"):
    """Objects whose state cannot be saved, or restored, together."""


class MissingObjectError(ObjectsError, KeyError):
    """There is an object that nothing was saved for."""


class UnexpectedObjectError(ObjectsError, KeyError):
    """Something was saved for an object that is not there now."""


class ObjectKindError(ObjectsError, TypeError):
    """An object is of another kind than the one whose state was saved."""


class ObjectStateError(ObjectsError, RuntimeError):
    """Code of an object raised when its state was taken or given, or what it gave cannot be kept."""


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
    """The model or the checkpoint is no longer what was planned for, or the plan has been applied."""


class ModelBusyError(ModelStateError, RuntimeError, page="model-busy"):
    """Another thread changes the module, or one that shares tensors with it, and does not come to an end."""


class LoadCancelledError(ModelStateError, RuntimeError, page="background-load"):
    """A load in the background that was cancelled before its result was put in place."""


class LoadTimeoutError(ModelStateError, TimeoutError, page="background-load"):
    """A load in the background has not brought everything in within the time that was given. It goes on."""


class ModelCodeError(ModelStateError, RuntimeError, page="model-code"):
    """Code of the model raised while it was loaded; what it raised is the cause."""


class ExtraStateError(ModelStateError, ValueError, page="extra-state"):
    """Declared extra state cannot be saved or loaded. The module's attributes are what they were."""


class ExtraStateFormatError(ExtraStateError):
    """The value is not what a declaration saves: another class's, or edited by hand."""


class ExtraStateNamesError(ExtraStateError):
    """The extra state lacks declared names, or has names that nothing declares."""

    def __init__(self, what: str, *, names: Sequence[str] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.names = tuple(names)
        """The names that are missing or too many."""


class ExtraStateVersionError(ExtraStateError):
    """The extra state is of a newer version than the class, or of an older one that nothing upgrades."""


class ExtraStateAttributeError(ExtraStateError):
    """A declared attribute is not there, cannot be set, or is a parameter, a buffer or a module."""


class UpgradeError(ExtraStateError):
    """An `upgrade` raised, or returned something that is no mapping from names to values."""


class TransformError(ModelStateError, ValueError, page="transform"):
    """A transform raised, or returned something that cannot be loaded."""


class PlacementError(ModelStateError, RuntimeError, page="cannot-be-placed"):
    """A value cannot be put in its place."""


class RollbackError(ModelStateError, RuntimeError, page="rollback"):
    """After a failure, something of the model could not be made what it was. The only error that leaves a change."""


class CodecError(ModelStateError, ValueError, page="no-encoding"):
    """A value cannot be encoded, or cannot be made of its encoding."""


class UnsupportedValueError(CodecError):
    """A value of a kind that has no encoding, that holds itself, or that is nested too deeply."""


class EncodedValueError(CodecError):
    """What should be an encoded value is none."""


class UnknownClassError(CodecError):
    """The class of an encoded value is not imported, not registered, of another kind, or has other fields."""


class CodecNameError(CodecError):
    """Two classes would have one name in files."""


class SaveError(ModelStateError, page="cannot-be-saved"):
    """A state that cannot be saved."""


class SaveTargetError(SaveError, TypeError):
    """What should be saved is no module and no flat state dict, or where it should be saved no file can be."""


class UnsavableError(SaveError, ValueError):
    """Tensors or names that the format does not have, or more of them than it holds."""


class TargetExistsError(SaveError, FileExistsError):
    """There is a file already, which may not be replaced."""


class DirectoryLockedError(SaveError, TimeoutError):
    """Another process keeps the directory locked in which a file should be put. What was there before still is."""


class WriteFailedError(SaveError, OSError):
    """An I/O error while a file was written. What was there before still is."""


class ExportError(ModelStateError, RuntimeError, page="export"):
    """A module of which no program can be made whose weights can be swapped. No file has been written."""

    def __init__(self, what: str, *, names: Sequence[str] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.names = tuple(names)
        """The names of the tensors that it is about."""


class ExportedAnswerError(ExportError, ValueError):
    """The program that was made does not answer as the module does."""


class NotSwappableError(ExportError, ValueError):
    """Weights that were compiled into the program: its answers do not follow their changes."""


class NameMapError(ModelStateError, ValueError, page="name-map"):
    """Names of a state dict that cannot be led to those of the module as it runs."""

    def __init__(self, what: str, *, names: Sequence[str] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.names = tuple(names)
        """The names that it is about."""


class LiveError(ModelStateError, page="live-swap"):
    """A program that is being served, and what is done to it. The version that served goes on serving."""


class LiveTargetError(LiveError, TypeError, page="live-target"):
    """A program that cannot be served, or of which no second version can be made."""


class ProgramInputError(LiveError, ValueError, page="program-input"):
    """A request's inputs are not what the program was exported for. Nothing has been computed."""


class WeightsError(LiveError, ValueError, page="live-weights"):
    """Weights that may not go into the program that is being served."""

    def __init__(self, what: str, *, names: Sequence[str] = (), **fields: object) -> None:
        super().__init__(what, **fields)
        self.names = tuple(names)
        """The names of the tensors that it is about."""


class WeightDtypeError(WeightsError):
    """Weights of another dtype than the program's."""


class WeightKindError(WeightsError):
    """Weights of another layout than the program's, as sparse ones, or of a tensor subclass where its are plain."""


class WeightStrideError(WeightsError):
    """Weights whose elements lie in another order than the program's."""


class WeightStorageError(WeightsError):
    """Weights that are parts of a larger storage."""


class NonFiniteWeightError(WeightsError):
    """Weights that are NaN or infinite where those that serve are not."""


class FixedWeightError(WeightsError):
    """Weights that a package has no place for: they were inlined when it was compiled, or are no part of it."""


class CanaryError(LiveError, ValueError, page="canary"):
    """The new version raised on the canary's inputs, or its answer was not accepted."""


class SwapBusyError(LiveError, RuntimeError):
    """Another swap is under way, or this one was called from within itself."""


class SwapTimeoutError(LiveError, TimeoutError):
    """Another swap, or the requests that have to end first, did not end in time."""


class VersionGoneError(LiveError, LookupError):
    """A version that is not kept any more, or a pin of one that has ended."""


class QuarantinedError(LiveError, RuntimeError):
    """A swap in place failed, and so did its undo: no version can serve until another swap succeeds."""


class SkippedCheckpointError(LiveError, ValueError, page="following"):
    """A checkpoint of a store that is followed is not taken up, and not tried again. Its cause says why."""

    def __init__(self, what: str, *, step: int | None = None, **fields: object) -> None:
        super().__init__(what, **fields)
        self.step = step
        """The step of the checkpoint."""


class AppUnreachableError(LiveError, ConnectionError, page="serving-app"):
    """A serving app that does not answer, or does not see the path of a checkpoint. It is tried again."""


class AppAnswerError(LiveError, RuntimeError, page="serving-app"):
    """A serving app gave no answer to a swap, or one that says nothing."""


class AppAccessError(LiveError, PermissionError, page="serving-app"):
    """A serving app does not take the token, or no checkpoints from this directory."""


class AppRefusedError(LiveError, ValueError, page="serving-app"):
    """A serving app refuses a checkpoint: what it serves with is what it was."""


class FollowWarning(UserWarning):
    """Something that following a store has met, where nobody has given an `on_error`."""


class SwapError(ModelStateError, RuntimeError, page="somebody-holds-it"):
    """A tensor cannot become another one, most often because somebody would go on with what it was."""


class MemoryBudgetError(ModelStateError, MemoryError, page="memory-budget"):
    """The load would need more memory than it was given."""
