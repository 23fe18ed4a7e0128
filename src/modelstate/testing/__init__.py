"""For tests: checkpoints that cannot be read, on demand."""

from modelstate.testing.faults import Faults as Faults
from modelstate.testing.faults import Request as Request
from modelstate.testing.faults import faulty_reads as faulty_reads
